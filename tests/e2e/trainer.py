"""A trainer of its own process: meets the ranks that serve as SGLang's trainers do, and broadcasts a checkpoint's tensors.

Arguments: port, world size, group, safetensors file. Each line that it reads names tensors to broadcast; "*" means all.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed import distributed_c10d


def main() -> None:
    port, world_size, name, path = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4]
    limit = timedelta(seconds=60)
    store, rank, size = next(dist.rendezvous(f"tcp://127.0.0.1:{port}", 0, world_size, timeout=limit))
    prefixed: Any = dist.PrefixStore(name, store)
    helper: Any = distributed_c10d._new_process_group_helper
    group, _ = helper(size, rank, [], dist.Backend("gloo"), prefixed, group_name=name, timeout=limit)
    distributed_c10d._world.pg_group_ranks[group] = {index: index for index in range(world_size)}
    print("met", flush=True)
    tensors = load_file(path)
    for line in sys.stdin:
        for each in line.split() if line.strip() != "*" else tensors:
            dist.broadcast(tensors[each] if each in tensors else torch.zeros(3), src=0, group=group)
        print("sent", flush=True)


main()
