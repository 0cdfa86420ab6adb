"""Which ranks a machine runs, and the config of each."""

from __future__ import annotations

from typing import Any

import msgspec

from ...model_executor.step import RankSpec
from ..config import Layout, RankLinks, SchedulerConfig

COLLECTIVE_TIMEOUT = 300.0  # seconds that a rank which gives signs of life may keep the others waiting in a step


def rank_configs(base: SchedulerConfig, layout: Layout) -> list[SchedulerConfig]:
    """The configs of the ranks of this machine; ``base`` itself where there is only one rank in all."""
    sharers = len(layout.ranks) * layout.num_replicas
    if layout.world_size == 1:
        if sharers == 1:
            return [base]
        alone = RankSpec(local_rank=layout.replica, local_size=sharers, replica=layout.replica)
        return [msgspec.structs.replace(base, runner=msgspec.structs.replace(base.runner, ranks=alone))]
    links, meeting = _links(base, layout)
    configs = []
    for rank in layout.ranks:
        pp_rank, tp_rank = divmod(rank, layout.tp_size)
        spec = RankSpec(
            tp_rank=tp_rank,
            tp_size=layout.tp_size,
            pp_rank=pp_rank,
            pp_size=layout.pp_size,
            init_method=meeting,
            timeout=COLLECTIVE_TIMEOUT,
            local_rank=layout.replica * len(layout.ranks) + rank - layout.ranks.start,
            local_size=sharers,
            replica=layout.replica,
        )
        runner = msgspec.structs.replace(base.runner, ranks=spec)
        record = f"{base.record_decisions}.rank{rank}" if base.record_decisions and rank else base.record_decisions
        level = "warning" if rank and base.log_level == "info" else base.log_level  # rank 0 tells what all do
        configs.append(msgspec.structs.replace(base, runner=runner, links=links, record_decisions=record, log_level=level))
    return configs


def _links(base: SchedulerConfig, layout: Layout) -> tuple[RankLinks, str]:
    """The sockets between the ranks, and where the ranks of the model meet."""
    common: dict[str, Any] = {"token": layout.token, "silence": layout.timeout, "check": layout.check}
    if layout.nnodes == 1:
        place = f"{base.ipc.directory}/{base.ipc.scheduler.rpartition('/')[2]}"
        return RankLinks(turns=f"ipc://{place}-turns", watch=f"ipc://{place}-watch", **common), f"file://{place}-meet"
    host, _, port = layout.address.rpartition(":")
    turns, watch = (f"tcp://{host}:{int(port) + offset}" for offset in (1, 2))
    return RankLinks(turns=turns, watch=watch, **common), f"tcp://{host}:{port}"


def meeting_again(ranks: RankSpec, attempt: int) -> RankSpec:
    """The same rank in a new start of its group: what the last one left at the meeting place must not be found."""
    if not ranks.init_method.startswith("file://"):
        return ranks
    return msgspec.structs.replace(ranks, init_method=f"{ranks.init_method.partition('#')[0]}#{attempt}")


def rank_name(config: SchedulerConfig) -> str:
    """What a scheduler's process is called in reports."""
    ranks = config.runner.ranks
    return "scheduler" if ranks.world_size == 1 else f"scheduler {ranks.name}"
