"""The native library of this process: loaded once through ctypes, or the reason why there is none.

BANYAN_CPU_KERNELS=0 turns it off; BANYAN_CPU_ISA forces a level (see build.py).
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
from ctypes import POINTER, c_char_p, c_double, c_float, c_int32, c_int64, c_uint64, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch  # first: the library must find its OpenMP loaded, two of them fight for the cores

from ...sampling_input import SamplingInput
from .build import BuildError, build, choose_level

log = logging.getLogger(__name__)

ABI = 1
# Name -> (result, arguments) of every function of kernels.h that Python calls. Pointers to data are integers.
PROTOTYPES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "bny_abi": (c_int32, ()),
    "bny_isa": (c_char_p, ()),
    "bny_read_memory": (c_uint64, (c_void_p, c_int64)),
    "bny_peak_flops": (c_double, (c_int64, c_void_p)),
    "bny_linear_bytes": (c_int64, (c_int32, c_int64, c_int64)),
    "bny_pack_f32": (None, (c_int32, c_int64, c_int64, c_void_p, c_int64, c_void_p)),
    "bny_pack_bf16": (None, (c_int64, c_int64, c_void_p, c_int64, c_void_p)),
    "bny_pack_gguf": (None, (c_int32, c_int64, c_int64, c_void_p, c_void_p)),
    "bny_unpack": (None, (c_void_p, c_void_p)),
    "bny_linear_scratch": (c_int64, (c_void_p, c_int64)),
    "bny_linear": (None, (c_void_p, c_void_p, c_int64, c_void_p, c_int64, c_int64, c_void_p)),
    "bny_attention": (None, (c_void_p, c_void_p, c_void_p, c_int64, c_void_p, c_int64)),
    "bny_kv_write": (None, (c_void_p, c_void_p, c_void_p, c_int64, c_void_p, c_int64)),
    "bny_check_slots": (c_int64, (c_void_p, c_int64)),
    "bny_embed": (None, (c_void_p, c_int32, c_void_p, c_int64, c_int64, c_float, c_void_p, c_int64)),
    "bny_norm": (None, (c_void_p, c_int64, c_void_p, c_float, c_void_p, c_int64, c_int64, c_int64)),
    "bny_add_norm": (None, (c_void_p, c_int64, c_void_p, c_int64, c_void_p, c_float, c_void_p, c_int64, c_int64, c_int64)),
    "bny_act_mul": (None, (c_int32, c_void_p, c_int64, c_void_p, c_int64, c_int64, c_int64)),
    "bny_rope_write": (None, (c_void_p, c_void_p, c_void_p, c_int64, *[c_void_p] * 5, c_float)),
    "bny_mask": (None, (c_void_p, c_int64, c_void_p, c_int64, c_void_p, c_int64, c_int64)),
    "bny_sample": (None, (c_void_p, c_void_p, c_int64, c_void_p, c_int64, c_int64)),
    "bny_run": (c_int64, (c_void_p, c_void_p, c_void_p, c_void_p)),
}


class LinearStruct(ctypes.Structure):
    """bny_linear_t."""


LinearStruct._fields_ = [
    ("kind", c_int32),
    ("reserved", c_int32),
    ("n", c_int64),
    ("k", c_int64),
    ("data", c_void_p),
    ("bias", POINTER(c_float)),
    ("next", POINTER(LinearStruct)),
]


class SamplingStruct(ctypes.Structure):
    """bny_sampling. Keeps the arrays that it points to."""

    _fields_ = [(name, c_void_p) for name in ("temperature", "top_p", "min_p", "top_k", "seed", "position")]

    def __init__(self, sampling: SamplingInput) -> None:
        self.arrays: list[np.ndarray] = [
            *(np.ascontiguousarray(array, np.float32) for array in (sampling.temperatures, sampling.top_ps, sampling.min_ps)),
            np.ascontiguousarray(sampling.top_ks, np.int32),
            *(np.ascontiguousarray(array, np.int64) for array in (sampling.seeds, sampling.positions)),
        ]
        super().__init__(*(array.ctypes.data for array in self.arrays))


@dataclass(frozen=True, slots=True)
class Native:
    """The library in use. ``lib`` has the functions of kernels.h as attributes, typed."""

    lib: ctypes.CDLL
    isa: str
    path: Path
    why: str

    def choose(self, logits_SV: torch.Tensor, sampling: SamplingInput) -> torch.Tensor:
        """int64 [S]: what each row of float32 logits samples, greedily or not, as sampler.sample does behind bans and masks.

        Raises ValueError for logits that are not rows of float32 on the CPU, or parameters of another number of rows.
        """
        if logits_SV.dtype is not torch.float32 or logits_SV.device.type != "cpu" or logits_SV.stride(1) != 1:
            raise ValueError("logits must be rows of float32 on the CPU")
        num_rows, vocab_size = logits_SV.shape
        params = SamplingStruct(sampling)
        if any(len(array) != num_rows for array in params.arrays):
            raise ValueError(f"sampling parameters must be of {num_rows} rows, as the logits are")
        ids = torch.empty(num_rows, dtype=torch.int64)
        row = logits_SV.stride(0)
        self.lib.bny_sample(ctypes.byref(params), logits_SV.data_ptr(), row, ids.data_ptr(), num_rows, vocab_size)
        return ids


@dataclass(frozen=True, slots=True)
class NotNative:
    """There is none; ``why`` is one line."""

    why: str


@functools.cache
def native_kernels() -> Native | NotNative:
    """Build if need be and load, once per process; logs one line where the library cannot be had.

    Raises ValueError where BANYAN_CPU_ISA asks for what the CPU lacks.
    """
    if os.environ.get("BANYAN_CPU_KERNELS", "1") == "0":
        return NotNative("off: BANYAN_CPU_KERNELS is 0")
    level, why = choose_level()
    try:
        return load(level, why)
    except BuildError as error:
        log.warning("No native CPU kernels, torch computes instead: %s", error)
        return NotNative(f"off: {error}")


@functools.cache
def load(level: str, why: str = "as given") -> Native:
    """The library of a level. Raises BuildError."""
    built = build(level)
    if built.seconds is not None:
        log.info("Native CPU kernels for %s built in %.1f s: %s", level, built.seconds, built.path)
    try:
        lib = ctypes.CDLL(str(built.path))
    except OSError as error:
        raise BuildError(f"{built.path} does not load: {error}") from None
    for name, (result, arguments) in PROTOTYPES.items():
        function = getattr(lib, name)
        function.restype, function.argtypes = result, list(arguments)
    if lib.bny_abi() != ABI or lib.bny_isa().decode() != level:
        raise BuildError(f"{built.path} is not the library that was asked for")
    return Native(lib, level, built.path, f"{level} ({why}), {built.path}")
