"""The dtype of a model's weights."""

from __future__ import annotations

import torch

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_CPU_FLAGS = {"bfloat16": ("avx512_bf16", "amx_bf16"), "float16": ("avx512_fp16", "amx_fp16")}


def choose_dtype(wanted: str, saved: str, device: torch.device, *, native: bool = False) -> tuple[torch.dtype, str]:
    """(dtype of the weights, "its name (why)"). auto is the checkpoint's dtype where the hardware multiplies in it, else float32.

    ``native`` says that the native CPU kernels multiply, which take bfloat16 weights on every CPU and compute in float32.
    Raises ValueError for an unknown name.
    """
    if wanted != "auto":
        if wanted not in DTYPES:
            raise ValueError(f"unknown dtype {wanted!r}; known are auto, {', '.join(DTYPES)}")
        return DTYPES[wanted], f"{wanted} (as given)"
    if native and saved == "bfloat16":
        return torch.bfloat16, "bfloat16 (auto: the checkpoint's; the native kernels compute with it in float32)"
    if saved == "float32" or multiplies(saved, device):
        return DTYPES[saved], f"{saved} (auto: the checkpoint's)"
    return torch.float32, f"float32 (auto: the checkpoint's {saved} is not multiplied by this {device.type})"


def multiplies(dtype: str, device: torch.device) -> bool:
    """Whether the hardware has instructions that multiply matrices of bfloat16 or float16."""
    if device.type == "cuda":
        return dtype == "float16" or torch.cuda.is_bf16_supported(including_emulation=False)
    flags = torch.cpu.get_capabilities()
    return any(flags.get(flag, False) for flag in _CPU_FLAGS[dtype])
