"""Which part of a model a process holds, and how it finds the processes that hold the others. Torch-free."""

from __future__ import annotations

import msgspec


class RankSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One rank of a model that pp_size stages of tp_size ranks each compute together.

    init_method: "file://PATH" for ranks of one machine, "tcp://HOST:PORT" for several; rank 0 listens there. timeout: seconds after
    which a rank that does not answer counts as lost.
    """

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    init_method: str = ""
    timeout: float = 60.0
    local_rank: int = 0  # among the ranks of its machine
    local_size: int = 1  # how many these are
    replica: int = 0  # of the model's replicas, which one it belongs to

    @property
    def rank(self) -> int:
        """Its number among all ranks: stage by stage."""
        return self.pp_rank * self.tp_size + self.tp_rank

    @property
    def world_size(self) -> int:
        return self.tp_size * self.pp_size

    @property
    def overall_rank(self) -> int:
        """Its number among the ranks of all replicas."""
        return self.replica * self.world_size + self.rank

    @property
    def is_first_stage(self) -> bool:
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pp_rank == self.pp_size - 1

    @property
    def name(self) -> str:
        """For people."""
        return f"rank {self.rank} (tp {self.tp_rank} of {self.tp_size}, pp {self.pp_rank} of {self.pp_size})"


SINGLE = RankSpec()
