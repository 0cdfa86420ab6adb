"""Which attention backend a start takes: plain rules over what the device, the model and the installation are."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

from .registry import attention_backend

LIBRARIES = {"triton": "triton", "flashinfer": "flashinfer", "fa3": "sgl_kernel"}  # backend -> what must be installed
FLASHINFER_DIMS = (64, 128, 256)
FA3_MAX_DIM = 256


@dataclass(frozen=True, kw_only=True)
class AttentionNeeds:
    """What the choice depends on."""

    device: str  # cpu | cuda
    capability: tuple[int, int] | None  # of a CUDA device
    installed: frozenset[str]  # of LIBRARIES' values
    head_dim: int
    kv_bytes: int  # of one element of K or V
    model_bytes: int  # of one element of an activation


@dataclass(frozen=True)
class AttentionChoice:
    """The names, and the reason for each."""

    prefill: str
    decode: str
    why: dict[str, str]


def installed_libraries() -> frozenset[str]:
    """The packages of LIBRARIES that could be imported; none is."""
    return frozenset(name for name in LIBRARIES.values() if importlib.util.find_spec(name) is not None)


def choose_attention(
    needs: AttentionNeeds, *, both: str | None = None, prefill: str | None = None, decode: str | None = None, cpu: str
) -> AttentionChoice:
    """Names as given (that of a phase before that of both), else the best that fits. cpu: the default of CPUs.

    Raises ValueError for an unknown name, and for a given one that cannot work here, with the reason.
    """
    best, best_why = _best(needs, cpu)
    names, why = [], {}
    for phase, given in (("prefill", prefill), ("decode", decode)):
        name = given or both
        if name is not None:
            attention_backend(name)
            obstacle = why_not(name, needs)
            if obstacle:
                raise ValueError(f"attention backend {name}: {obstacle}")
        names.append(name or best)
        why[phase] = "as given" if name else best_why
    return AttentionChoice(names[0], names[1], why)


def describe(choice: AttentionChoice) -> str:
    """For --explain."""
    if (choice.prefill, choice.why["prefill"]) == (choice.decode, choice.why["decode"]):
        return f"{choice.decode} ({choice.why['decode']})"
    return f"prefill {choice.prefill} ({choice.why['prefill']}), decode {choice.decode} ({choice.why['decode']})"


def why_not(name: str, needs: AttentionNeeds) -> str | None:
    """What keeps a backend from working here, None where nothing does."""
    if name not in LIBRARIES:
        return None
    if needs.device != "cuda" or needs.capability is None:
        return "it needs a CUDA device"
    if LIBRARIES[name] not in needs.installed:
        return f"{LIBRARIES[name]} is not installed"
    if name == "triton":
        return None
    if needs.model_bytes != 2:
        return "it computes in float16 and bfloat16 only"
    if name == "fa3":
        if needs.capability[0] not in (8, 9):
            return f"FlashAttention 3 runs on compute capability 8.x and 9.x, not {_dotted(needs.capability)}"
        return None if needs.head_dim <= FA3_MAX_DIM else f"it takes head dims up to {FA3_MAX_DIM}, not {needs.head_dim}"
    if needs.capability < (8, 0):
        return f"FlashInfer runs from compute capability 8.0 on, not {_dotted(needs.capability)}"
    return None if needs.head_dim in FLASHINFER_DIMS else f"it takes head dims {FLASHINFER_DIMS}, not {needs.head_dim}"


def _best(needs: AttentionNeeds, cpu: str) -> tuple[str, str]:
    if needs.device != "cuda" or needs.capability is None:
        return cpu, f"default of {needs.device}"
    order = ("fa3", "flashinfer", "triton") if needs.capability[0] == 9 and needs.kv_bytes == 2 else ("flashinfer", "triton")
    obstacles: list[str] = []
    for name in order:
        obstacle = why_not(name, needs)
        if obstacle is None:
            return name, "; ".join([f"best for compute capability {_dotted(needs.capability)}", *obstacles])
        obstacles.append(f"not {name}: {obstacle}")
    return "torch_native", "; ".join(["nothing faster fits", *obstacles])


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"
