"""Frozen configs, one per process. A child reads its own as JSON; nothing else configures it."""

from __future__ import annotations

from typing import Literal

import msgspec

from ..model_executor.step import ModelInfo, RunnerConfig
from .errors import StartError
from .ipc import IpcNames

TOKEN_MIN = 16  # characters

__all__ = [
    "ControllerConfig",
    "DetokenizerConfig",
    "Layout",
    "ModelInfo",
    "RankLinks",
    "RayOptions",
    "RunnerConfig",
    "SchedulerConfig",
    "SchedulerInfo",
    "TokenizerManagerConfig",
]


class RankLinks(msgspec.Struct, frozen=True, kw_only=True):
    """How the schedulers of one engine reach each other; see ranks_io. Unused where there is only one."""

    turns: str = ""
    watch: str = ""
    token: str = ""
    silence: float = 15.0  # seconds without a sign of life after which a rank counts as lost
    check: bool = False  # compare every decision


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """How the ranks of one model are laid out over machines. timeout: seconds of silence after which a rank counts as lost."""

    tp_size: int = 1
    pp_size: int = 1
    nnodes: int = 1
    node_rank: int = 0
    address: str = ""  # host:port of the first machine; the two ports after it are used too
    token: str = ""
    timeout: float = 15.0
    check: bool = False
    replica: int = 0
    num_replicas: int = 1  # on this machine

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


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One scheduler process. None means: derive it (scheduler_process logs what and why)."""

    ipc: IpcNames
    runner: RunnerConfig
    tokenizer_path: str  # for stop strings
    links: RankLinks = RankLinks()
    tells_ended: bool = False  # tells a controller of replicas which requests have ended
    max_running_requests: int | None = None
    chunked_prefill_size: int | None = None  # None: derive, -1: never split a prompt
    max_prefill_tokens: int = 16384
    prefill_max_requests: int | None = None
    shared_prefix_min: int | None = None  # None: by device
    enable_mixed_chunk: bool = False
    prefill_decode_interval: int = 0
    target_itl_ms: float | None = None  # above 0 it implies mixed steps; 0: off
    target_itl_slack: float = 0.0  # decode steps that a step may take at least, whatever the target
    schedule_policy: str = "fcfs"
    schedule_conservativeness: float = 1.0
    enable_priority_scheduling: bool = False
    schedule_low_priority_values_first: bool = False
    default_priority_value: int | None = None
    priority_scheduling_preemption_threshold: int = 10
    disable_priority_preemption: bool = False
    max_wait_steps: int = 4096
    max_queued_requests: int | None = None
    request_queue_timeout: float | None = None  # seconds
    request_running_timeout: float | None = None  # seconds
    disable_radix_cache: bool = False
    radix_eviction_policy: str = "lru"
    session_hold_fraction: float = 0.5  # share of the pool that streaming sessions may keep between their turns
    pin_budget_fraction: float = 0.25  # share of the pool that cache hints may pin
    grammar_mask_timeout: float = 0.5  # seconds
    disable_jump_forward: bool = False  # sample what a grammar forces token by token
    disable_overlap_schedule: bool | None = None  # None: decided by device
    weight_version: str = "default"
    decode_log_interval: int = 40
    strict: bool = False  # a breach of the slot invariant is fatal
    record_decisions: str | None = None  # path of a file
    record_prompts: bool = False
    crash_dump_folder: str | None = None
    log_level: str = "info"


class SchedulerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a scheduler reports when it is ready."""

    model: ModelInfo
    max_total_num_tokens: int
    max_req_input_len: int  # longest prompt that is served
    max_req_len: int  # longest prompt + output
    max_running_requests: int
    max_queued_requests: int | None = None
    priority_scheduling: bool = False
    default_priority_value: int | None = None
    page_size: int
    chunked_prefill_size: int | None
    overlap: bool
    dp_size: int = 1
    explain: dict[str, str] = {}


class RayOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Replicas in a Ray cluster. A rank takes so many of a node's CPUs, and a GPU if it computes on one."""

    cpus_per_rank: int = 1


class ControllerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The controller of replicas; scheduler is what each of their schedulers would be alone."""

    ipc: IpcNames
    scheduler: SchedulerConfig
    layout: Layout
    dp_size: int
    load_balance_method: str = "round_robin"
    restart_budget: int = 3  # of each replica, within an hour
    ray: RayOptions | None = None  # None: the replicas run on this machine
    log_level: str = "info"


class DetokenizerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The detokenizer process."""

    ipc: IpcNames
    tokenizer_path: str
    log_level: str = "info"


class TokenizerManagerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The tokenizer manager, in the process of the HTTP server or of the Engine's user."""

    ipc: IpcNames
    model_path: str  # as the user gave it
    served_model_name: str
    served_aliases: list[str] = []  # further names of the model
    tokenizer_path: str
    chat_template: str | None = None  # path of a jinja file, None: the tokenizer's own
    weight_version: str = "default"  # of the weights that are loaded now
    first_weight_version: str = ""  # of those that new processes load, once others were loaded
    incremental_streaming_output: bool = False
    allow_auto_truncate: bool = False
    abort_on_priority_when_disabled: bool = False
    preferred_sampling_params: str = "{}"
    grammar_backend: str = "xgrammar"  # tried first; "none": requests with a grammar are refused
    grammar_compile_timeout: float = 10.0  # seconds
    grammar_compile_memory: int = 1 << 30  # bytes
    grammar_cache_bytes: int = 256 << 20  # of compiled grammars, in this process and in the scheduler each
    reasoning_parser: str | None = None  # a name of REASONING_MARKS
    tool_call_parser: str | None = None  # a name of TOOL_PARSERS, None: by the chat template
    max_top_logprobs: int = 20
    return_hidden_states_mode: Literal["last", "full"] | None = None  # most that a request may ask for
    log_requests: bool = False
    log_requests_level: int = 1
    log_requests_format: str = "text"
    random_seed: int | None = None  # seeds requests that bring no seed of their own
    max_sessions: int = 1024
    streaming_sessions: bool = True  # the scheduler has a prefix cache that can hold KV between turns
