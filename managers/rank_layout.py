"""Which ranks a machine runs, and the config of each."""

from __future__ import annotations

from typing import Any

import msgspec

from ..model_executor.step import RankSpec
from .config import RankLinks, SchedulerConfig
from .errors import StartError

COLLECTIVE_TIMEOUT = 300.0  # seconds that a rank which gives signs of life may keep the others waiting in a step
TOKEN_MIN = 16  # characters


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """How the ranks of one model are laid out over machines. timeout: seconds of silence after which a rank counts as lost."""

    tp_size: int = 1
    pp_size: int = 1
    nnodes: int = 1
    node_rank: int = 0
    address: str = ""  # host:port of the first machine; the two ports after it are used too
    token: str = ""
    timeout: float = 20.0
    check: bool = False

    @property
    def world_size(self) -> int:
        return self.tp_size * self.pp_size

    @property
    def ranks(self) -> range:
        """Those of this machine."""
        size = self.world_size // self.nnodes
        return range(self.node_rank * size, (self.node_rank + 1) * size)

    def check_sizes(self) -> None:
        """Raises StartError for what cannot be laid out."""
        if self.nnodes == 1:
            return
        if self.world_size % self.nnodes:
            raise StartError(
                f"--nnodes: {self.world_size} ranks (--tp-size x --pp-size) do not divide among {self.nnodes} machines."
            )
        if self.node_rank >= self.nnodes:
            raise StartError(f"--node-rank must be below --nnodes {self.nnodes}, got {self.node_rank}.")
        host, _, port = self.address.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65534:
            raise StartError(f"--dist-init-addr must be host:port of the first machine, got {self.address!r}.")
        if len(self.token) < TOKEN_MIN:
            raise StartError(
                f"--nnodes above 1 needs a --dist-token (or BANYAN_DIST_TOKEN) of at least {TOKEN_MIN} characters, the same on all."
            )


def rank_configs(base: SchedulerConfig, layout: Layout) -> list[SchedulerConfig]:
    """The configs of the ranks of this machine; ``base`` itself where there is only one rank in all."""
    if layout.world_size == 1:
        return [base]
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
            local_rank=rank - layout.ranks.start,
            local_size=len(layout.ranks),
        )
        runner = msgspec.structs.replace(base.runner, ranks=spec)
        record = f"{base.record_decisions}.rank{rank}" if base.record_decisions and rank else base.record_decisions
        configs.append(msgspec.structs.replace(base, runner=runner, links=links, record_decisions=record))
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
