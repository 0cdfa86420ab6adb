"""What a forward step is told and what it returns, as host arrays; and the seam that every runner implements.

The scheduler fills a StepInput (numpy), a Runner turns it into tensors on its device, runs the model, samples and hands back
a StepOutput. Nothing here imports torch, so that scheduling is tested without it.

Legend: B requests of the step, T tokens computed in the step, S requests that sample a token in the step, V vocabulary.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
import numpy as np

from ..layers.hidden_input import EmbedSpan as EmbedSpan
from ..layers.hidden_input import HiddenSpan as HiddenSpan
from ..layers.logprob_input import LogprobRequest as LogprobRequest
from ..layers.rank_spec import SINGLE as SINGLE
from ..layers.rank_spec import RankSpec as RankSpec
from ..layers.sampling_input import FAILED as FAILED
from ..layers.sampling_input import NO_CHOICE as NO_CHOICE
from ..layers.sampling_input import TOP_K_ALL as TOP_K_ALL
from ..layers.sampling_input import RowControls as RowControls
from ..layers.sampling_input import SamplingInput as SamplingInput


class ForwardMode(enum.IntEnum):
    """Kind of a forward step."""

    EXTEND = 1  # prompts (or chunks of them)
    DECODE = 2  # one token per request
    MIXED = 3  # both in one batch


@dataclass(slots=True)
class StepInput:
    """One forward step.

    Request b computes extend_lens[b] tokens, at positions [seq_lens[b] - extend_lens[b], seq_lens[b]); the KV of the tokens before
    that is already in the slots that req_to_token names. Its tokens are consecutive in input_ids and out_cache_loc, in the order
    of the requests. A negative input id -r stands for the token that the step before sampled for row r.

    ``stop`` may be set to 1 while the step is under way: nobody will read its results, nor the KV that it writes. A runner may then
    leave out the rest of it.
    """

    mode: ForwardMode
    rows: np.ndarray  # int32 [B], row of each request in req_to_token (row 0 is never used)
    seq_lens: np.ndarray  # int32 [B], length of the KV after this step
    extend_lens: np.ndarray  # int32 [B], all ones in DECODE
    input_ids: np.ndarray  # int64 [T]
    out_cache_loc: np.ndarray  # int32 [T], slot that each token's K and V go to
    sample_index: np.ndarray  # int32 [S], ascending indices into B of the requests whose last token's logits are sampled
    sampling: SamplingInput
    rewrites: np.ndarray | None = None  # int64 [rows + 1], how often cells before a step's own were written; None: not known
    controls: dict[int, RowControls | None] = field(default_factory=dict)  # of rows whose owner is new; None: drop the old one's
    prompt_logprobs: list[LogprobRequest] = field(default_factory=list)
    sampled_logprobs: list[LogprobRequest] = field(default_factory=list)
    embeds: list[EmbedSpan] = field(default_factory=list)
    hidden: list[HiddenSpan] = field(default_factory=list)
    stop: np.ndarray = field(default_factory=lambda: np.zeros(1, np.int32))


@dataclass(slots=True)
class StepOutput:
    """Results of one step on the host."""

    next_ids: np.ndarray  # int64 [S]; FAILED or NO_CHOICE where that request fails, the others go on
    elapsed: float = 0.0  # seconds that the step took on the device
    graph: bool = False  # the step was replayed from a recording: CUDA graphs, or the CPU graph
    logprob_values: np.ndarray | None = None  # these two for unpack_logprobs: of prompt_logprobs, then of sampled_logprobs
    logprob_ids: np.ndarray | None = None
    hidden: np.ndarray | None = None  # for split_hidden
    given_up: bool = False  # a part of the step was left out, because nobody wants its results; next_ids mean nothing

    @classmethod
    def of(cls, arrays: Sequence[np.ndarray]) -> StepOutput:
        """From next_ids, or these and the two arrays of log-probabilities, or these and the hidden states."""
        more: list[np.ndarray | None] = [*arrays[1:], None, None, None]
        return cls(arrays[0], logprob_values=more[0], logprob_ids=more[1], hidden=more[2])


def timed_step(call: Callable[[], Sequence[np.ndarray]]) -> StepOutput:
    """Run a step on the host; ``call`` returns the ids that it samples, and log-probabilities if there are any."""
    start = time.perf_counter()
    output = StepOutput.of(call())
    output.elapsed = time.perf_counter() - start
    return output


class FatalStepError(RuntimeError):
    """A step failed on this rank but maybe not on the others, so that no later step of theirs would fit together."""


class StepHandle(Protocol):
    """A step under way."""

    def done(self) -> bool:
        """True once wait would not block."""

    def wait(self) -> StepOutput:
        """Block until the step is over. Raises what the step raised."""


class RunnerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """All that a runner is built from. model_path is a local folder or .gguf file."""

    model_path: str
    load_format: str = "auto"  # auto | safetensors | gguf | dummy | oracle
    dtype: str = "auto"  # auto | bfloat16 | float16 | float32
    device: str = "auto"  # auto | cpu | cuda
    quantization: str | None = None  # int8 | int4 | fp8 | gguf
    context_length: int | None = None
    attention_backend: str | None = None
    kv_cache_dtype: str = "auto"  # auto | float32 | float16 | bfloat16 | int8 | fp8_e4m3 | fp8_e5m2
    prefill_attention_backend: str | None = None  # these to prefill_cuda_graph_max_tokens: of a CUDA device
    decode_attention_backend: str | None = None
    sampling_backend: str | None = None  # triton | pytorch
    disable_cuda_graph: bool = False
    cuda_graph_max_bs: int | None = None
    cuda_graph_bs: str | None = None  # sizes, with commas between
    enable_torch_compile: bool = False
    torch_compile_max_bs: int | None = None
    disable_prefill_cuda_graph: bool = False
    prefill_cuda_graph_max_tokens: int | None = None
    weight_cache_bytes: int = 0  # that packed weights kept in the user's cache folder may take, of all models; 0: none are
    mem_fraction_static: float | None = None
    max_total_tokens: int | None = None
    max_running_requests: int | None = None
    chunked_prefill_size: int | None = None
    page_size: int = 1
    random_seed: int = 0
    json_model_override_args: str = "{}"
    logit_processors: dict[str, str] = {}  # name -> "module:Class"
    enable_deterministic_inference: bool = False  # the bits of a result depend on its request alone
    overlap: bool = True  # False: launch runs the step before it returns
    ranks: RankSpec = SINGLE  # the part of the model that this runner computes


class ModelMemory(msgspec.Struct, frozen=True):
    """What one rank's part of a model takes, in bytes."""

    weights: int = 0
    kv_token: int = 0  # of one token


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the other processes need to know of the model."""

    model_type: str
    architectures: list[str]
    vocab_size: int
    context_len: int
    eos_token_ids: list[int]
    bos_token_id: int | None
    hidden_size: int = 0
    dtype: str
    device: str
    attention_backend: str
    load_format: str
    logit_processors: list[str] = []  # names that a request may use
    stages: int = 1  # of a pipeline
    memory: ModelMemory = ModelMemory()
    explain: dict[str, str] = {}  # derived value -> why it is so


class ProfileSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Which steps are profiled, and where the trace goes. num_steps None: until it is stopped."""

    folder: str
    name: str = ""
    prefix: str = ""
    activities: tuple[str, ...] = ("CPU", "GPU")
    start_step: int = 0
    num_steps: int | None = None
    with_stack: bool = False
    record_shapes: bool = False


class GroupSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A group in which a trainer (rank 0, which listens at address:port) hands weights to the ranks from rank_offset on.

    timeout: seconds within which all must have come, and within which each tensor must.
    """

    name: str
    address: str
    port: int
    rank_offset: int
    world_size: int
    backend: str
    timeout: float


class TensorSpec(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A tensor of a checkpoint that is about to be broadcast."""

    name: str
    dtype: str
    shape: list[int]


class Runner(Protocol):
    """Runs forward steps in the order of their launch."""

    info: ModelInfo

    def max_cache_tokens(self) -> int:
        """Slots that fit into the memory left for KV (or config.max_total_tokens), a multiple of the page size."""

    def init_cache(self, num_slots: int, req_to_token: np.ndarray) -> None:
        """Allocate KV for slots [0, num_slots + page_size); page 0 is scratch. req_to_token is int32 [rows + 1, width], read at
        each step; on CPU the array itself is read, without a copy."""

    def launch(self, step: StepInput) -> StepHandle:
        """Enqueue one step. The arrays of ``step`` belong to the runner from here on."""

    def update_weights(self, path: str, load_format: str, *, partial: bool) -> None:
        """Load other weights of the same shapes, between two steps: a checkpoint, or (partial) the tensors in the folder's
        model.safetensors alone. Raises ValueError or OSError, and then nothing has changed."""

    def join_group(self, spec: GroupSpec) -> None:
        """Meet a trainer; on any thread. Raises ValueError or RuntimeError."""

    def leave_group(self, name: str) -> None:
        """Leave a group. Raises ValueError if there is none of this name."""

    def receive_weights(self, group: str, tensors: Sequence[TensorSpec], folder: str) -> str:
        """Receive tensors that a trainer broadcasts, between two steps; the folder, within ``folder``, that update_weights takes as
        a partial update. Raises ValueError, OSError or RuntimeError."""

    def read_weight(self, name: str, limit: int) -> list[float]:
        """The first values of a tensor by its name in the checkpoint. Raises ValueError if there is none."""

    def release_memory(self, tags: list[str]) -> None:
        """Free the memory of "weights" or "kv_cache" until resume_memory; no step may be launched before that."""

    def resume_memory(self, tags: list[str]) -> None:
        """Allocate again what was released: the same weights, and KV that is empty."""

    def start_profile(self, spec: ProfileSpec) -> None:
        """Begin a profile. Raises ValueError while one is under way, OSError for a folder that cannot be written."""

    def stop_profile(self) -> str:
        """End the profile; the path of its trace. Raises ValueError if there is none."""

    def close(self) -> None:
        """Stop worker threads and free the pools. Idempotent."""
