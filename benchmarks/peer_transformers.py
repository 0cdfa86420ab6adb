"""transformers' continuous batching behind peer_wire: python peer_transformers.py FOLDER PORT THREADS"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch
import transformers
from peer_wire import serve


class Manager:
    """peer_wire.Engine over the manager's own thread."""

    def __init__(self, folder: str, threads: int) -> None:
        torch.set_num_threads(threads)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="sdpa")
        config = transformers.GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
        self._manager = model.eval().init_continuous_batching(generation_config=config)
        self._manager.start()
        self._told: dict[str, int] = {}  # ids of each request that were handed on

    def add(self, number: int, input_ids: list[int], max_new_tokens: int) -> None:
        self._told[str(number)] = 0
        self._manager.add_request(input_ids, request_id=str(number), max_new_tokens=max_new_tokens, streaming=True)

    def step(self) -> Iterator[tuple[int, list[int], bool]]:
        result = self._manager.get_result(timeout=1.0)
        if result is not None and result.request_id in self._told:
            ids = list(result.generated_tokens)
            new = ids[self._told[result.request_id] :]
            self._told[result.request_id] = len(ids)
            ended = result.is_finished()
            if ended:
                del self._told[result.request_id]
            yield int(result.request_id), new, ended

    def busy(self) -> bool:
        return bool(self._told)


if __name__ == "__main__":
    serve(Manager(sys.argv[1], int(sys.argv[3])), int(sys.argv[2]))
