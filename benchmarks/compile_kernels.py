"""Compile every Triton kernel ahead of time for GPUs that are not here, and print what each program takes.

    python benchmarks/compile_kernels.py
    python benchmarks/compile_kernels.py --capability 90 --kernel attend --json

Needs no GPU: Triton brings ptxas. It catches what the interpreter lets pass: types, shapes, more shared memory than a block has.
A spilled register goes to local memory, hence stack bytes.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from banyan.layers.attention.triton import MAX_SPLITS, MIN_SPLIT, block_sizes
from banyan.layers.kernels.triton import attention, fused, gemm, sampling
from banyan.layers.kernels.triton.launch import SAMPLE_BLOCK

CAPABILITIES = (80, 90, 100)
SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}  # bytes that one block may take (CUDA C++ guide, table of limits)
OPTIONS = ("num_warps", "num_stages")
FP8 = "fp8e4nv"  # Triton's name of torch.float8_e4m3fn
FP8_WIDE = "fp8e5"  # of torch.float8_e5m2
FP8_CAPABILITY = 89  # the first that has it


@dataclass(frozen=True)
class Variant:
    """One specialisation of a kernel. types: Triton's name for each argument that is not a constant, in order."""

    name: str
    kernel: Any
    types: Sequence[str]
    constants: dict[str, Any] = field(default_factory=dict)
    least_capability: int = 80


@dataclass(frozen=True)
class Usage:
    """What one program takes."""

    name: str
    capability: int
    registers: int  # a thread's
    shared: int  # bytes of a block
    stack: int  # bytes of a thread: spilled registers
    warps: int


def attention_variants() -> list[Variant]:
    """Decode with split keys, extend, and what writes the pool."""
    found = []
    for dim, group, dtype, pool in (
        (64, 3, "fp16", "fp16"),
        (80, 1, "bf16", "bf16"),
        (128, 4, "bf16", "bf16"),
        (128, 8, "bf16", FP8),
        (128, 4, "bf16", FP8_WIDE),
        (256, 4, "bf16", "bf16"),
    ):
        for split in (True, False):
            blocks = block_sizes(dim, group, max_extend=1 if split else 4096, elem_size=2)
            types = [f"*{dtype}", f"*{pool}", f"*{pool}", f"*{dtype}", "*fp32", "*fp32", "*i32", *["*i64"] * 4]
            types += ["fp32", "fp32", "i32", "i32", *["i32"] * 7]
            constants = {"GROUP": group, "HEADS": 8 * group, "D": dim, "MAX_SPLITS": MAX_SPLITS, "MIN_SPLIT": MIN_SPLIT}
            constants |= {"SPLIT": split, "CAP": dim == 256, "WINDOW": dim in (80, 256), **blocks}
            kind = "decode" if split else "extend"
            name = f"attend {kind} {dtype} kv {pool} D {dim} G {group}"
            found.append(Variant(name, attention.attend_kernel, types, constants, FP8_CAPABILITY if pool == FP8 else 80))
    found.append(
        Variant(
            "merge D 128",
            attention.merge_kernel,
            ["*fp32", "*fp32", "*bf16", "i32", "i32", "i32"],
            {"HEADS": 32, "D": 128, "BLOCK_D": 128, "num_warps": 2},
        )
    )
    for pool in ("bf16", FP8, FP8_WIDE):
        types = ["*bf16", "*bf16", f"*{pool}", f"*{pool}", "*i64", *["i32"] * 5]
        found.append(
            Variant(
                f"store_kv {pool}",
                attention.store_kv_kernel,
                types,
                {"HEADS": 8, "D": 128, "BLOCK": 1024},
                FP8_CAPABILITY if pool == FP8 else 80,
            )
        )
    return found


def op_variants() -> list[Variant]:
    """Norms, rotary and activations."""
    found = []
    for add in (False, True):
        constants = {"HEADS": 1, "D": 4096, "BLOCK": 4096, "ADD": add, "GEMMA": add, "num_warps": 8}
        types = [*["*bf16"] * 5, "fp32", *["i32"] * 3]
        found.append(Variant(f"rms_norm{' of a sum' if add else ''} D 4096", fused.rms_norm_kernel, types, constants))
    constants = {"HEADS": 40, "R": 64, "BLOCK_H": 16, "BLOCK_R": 64}
    found.append(Variant("rotate D 128", fused.rotate_kernel, [*["*bf16"] * 4, "i32", "i32"], constants))
    for silu in (False, True):
        name = f"gated {'silu' if silu else 'gelu'}"
        found.append(Variant(name, fused.gated_kernel, ["*bf16", "*bf16", "i32", "i32"], {"BLOCK": 1024, "SILU": silu}))
    return found


def product_variants() -> list[Variant]:
    """Products with quantised weights, and sampling."""
    found = []
    for name, dtype in (("int8", "i8"), ("fp8", FP8)):
        for rows in (16, 64):
            constants = {"BLOCK_M": rows, "BLOCK_N": 128, "BLOCK_K": 128, "INTEGER": name == "int8", "BIAS": False, "num_stages": 3}
            types = [f"*{dtype}", f"*{dtype}", "*fp32", "*fp32", "*bf16", "*bf16", *["i32"] * 6]
            least = FP8_CAPABILITY if dtype == FP8 else 80
            found.append(Variant(f"scaled_mm {name} M {rows}", gemm.scaled_mm_kernel, types, constants, least))
        constants = {"LIMIT": 127.0 if name == "int8" else 448.0, "INTEGER": name == "int8", "BLOCK": 16384, "num_warps": 16}
        least = FP8_CAPABILITY if dtype == FP8 else 80
        found.append(
            Variant(f"quantize {name}", gemm.quantize_kernel, ["*bf16", f"*{dtype}", "*fp32", "i32", "i32"], constants, least)
        )
    for group in (32, 128):
        constants = {"GROUP": group, "BLOCK_M": 16, "BLOCK_N": 64, "BIAS": False, "num_stages": 3}
        types = ["*bf16", "*u8", "*fp16", "*fp16", "*bf16", "*bf16", *["i32"] * 5]
        found.append(Variant(f"int4_mm group {group}", gemm.int4_mm_kernel, types, constants))
    types = ["*fp32", "*i64", "*fp64", "*i64", "i32", "i32", "i32"]
    found.append(Variant("sample", sampling.sample_kernel, types, {"BLOCK": SAMPLE_BLOCK, "num_warps": SAMPLE_BLOCK // 256}))
    return found


def variants() -> list[Variant]:
    """All kernels, in the sizes that models have."""
    return attention_variants() + op_variants() + product_variants()


def compile_variant(variant: Variant, capability: int) -> Usage:
    """Compile to machine code. Raises what Triton or ptxas raises."""
    options = {name: value for name, value in variant.constants.items() if name in OPTIONS}
    constants = {name: value for name, value in variant.constants.items() if name not in OPTIONS}
    names = list(variant.kernel.arg_names)
    runtime = [name for name in names if name not in constants]
    if len(runtime) != len(variant.types):
        raise ValueError(f"{variant.name}: {len(variant.types)} types for the arguments {runtime}")
    signature = dict(zip(runtime, variant.types, strict=True)) | dict.fromkeys(constants, "constexpr")
    # as at run time: tensors are aligned, and strides of pools and projections are multiples of 16
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if signature[name][0] in "*i"}
    source = ASTSource(fn=variant.kernel, signature={name: signature[name] for name in names}, constexprs=constants, attrs=aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    registers, stack = _resources(compiled.asm["cubin"])
    return Usage(variant.name, capability, registers, compiled.metadata.shared, stack, compiled.metadata.num_warps)


def _resources(cubin: bytes) -> tuple[int, int]:
    """(registers, stack bytes) of a thread, as cuobjdump tells them."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    if found is None:
        raise RuntimeError(f"cuobjdump printed no resources: {text!r}")
    return int(found[1]), int(found[2])


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile what is asked for; 1 if anything does not compile or does not fit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capability", type=int, action="append", choices=CAPABILITIES, help="(default: all)")
    parser.add_argument("--kernel", default="", help="only kernels whose name begins so")
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    options = parser.parse_args(arguments)
    failed = False
    for variant in variants():
        if not variant.name.startswith(options.kernel):
            continue
        for capability in options.capability or CAPABILITIES:
            if capability < variant.least_capability:
                continue
            usage = compile_variant(variant, capability)
            fits = usage.shared <= SHARED_LIMIT[capability]
            failed |= not fits
            line = f"sm_{capability:<4}{usage.name:44}{usage.registers:4} registers{usage.shared:8} B shared{usage.stack:5} B stack"
            print(json.dumps(asdict(usage)) if options.json else line + ("" if fits else "  DOES NOT FIT"), flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
