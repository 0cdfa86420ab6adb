"""Signatures of the GPU libraries' functions that we call, read from unpacked wheels: nothing is imported, no GPU needed.

    python tests/support/gpu_signatures.py FOLDER > tests/support/gpu_signatures.json

FOLDER holds the packages flashinfer and sgl_kernel (pip install --no-deps --target FOLDER flashinfer-python sglang-kernel).
"""

from __future__ import annotations

import ast
import inspect
import json
import sys
from pathlib import Path
from typing import Any

# our name of a call -> (file, qualified name). FlashInfer's decode plan hands all it gets to _plan_impl, which has the parameters.
CALLS = {
    "flashinfer.BatchDecodeWithPagedKVCacheWrapper.__init__": (
        "flashinfer/decode.py",
        "BatchDecodeWithPagedKVCacheWrapper.__init__",
    ),
    "flashinfer.BatchDecodeWithPagedKVCacheWrapper.plan": ("flashinfer/decode.py", "BatchDecodeWithPagedKVCacheWrapper._plan_impl"),
    "flashinfer.BatchDecodeWithPagedKVCacheWrapper.run": ("flashinfer/decode.py", "BatchDecodeWithPagedKVCacheWrapper.run"),
    "flashinfer.BatchPrefillWithPagedKVCacheWrapper.__init__": (
        "flashinfer/prefill.py",
        "BatchPrefillWithPagedKVCacheWrapper.__init__",
    ),
    "flashinfer.BatchPrefillWithPagedKVCacheWrapper.plan": ("flashinfer/prefill.py", "BatchPrefillWithPagedKVCacheWrapper.plan"),
    "flashinfer.BatchPrefillWithPagedKVCacheWrapper.run": ("flashinfer/prefill.py", "BatchPrefillWithPagedKVCacheWrapper.run"),
    "flashinfer.BatchPrefillWithRaggedKVCacheWrapper.__init__": (
        "flashinfer/prefill.py",
        "BatchPrefillWithRaggedKVCacheWrapper.__init__",
    ),
    "flashinfer.BatchPrefillWithRaggedKVCacheWrapper.plan": ("flashinfer/prefill.py", "BatchPrefillWithRaggedKVCacheWrapper.plan"),
    "flashinfer.BatchPrefillWithRaggedKVCacheWrapper.run": ("flashinfer/prefill.py", "BatchPrefillWithRaggedKVCacheWrapper.run"),
    "flashinfer.merge_state": ("flashinfer/cascade.py", "merge_state"),
    "sgl_kernel.flash_attn.flash_attn_with_kvcache": ("sgl_kernel/flash_attn.py", "flash_attn_with_kvcache"),
    "sgl_kernel.rmsnorm": ("sgl_kernel/elementwise.py", "rmsnorm"),
    "sgl_kernel.gemma_rmsnorm": ("sgl_kernel/elementwise.py", "gemma_rmsnorm"),
    "sgl_kernel.silu_and_mul": ("sgl_kernel/elementwise.py", "silu_and_mul"),
    "sgl_kernel.gelu_tanh_and_mul": ("sgl_kernel/elementwise.py", "gelu_tanh_and_mul"),
    "sgl_kernel.gelu_and_mul": ("sgl_kernel/elementwise.py", "gelu_and_mul"),
    "sgl_kernel.fp8_scaled_mm": ("sgl_kernel/gemm.py", "fp8_scaled_mm"),
    "sgl_kernel.int8_scaled_mm": ("sgl_kernel/gemm.py", "int8_scaled_mm"),
}
RECORDED = Path(__file__).with_suffix(".json")


def read(folder: Path) -> dict[str, list[list[Any]]]:
    """Call -> its parameters as [name, kind, whether it has a default]. Raises KeyError for a function that is not there."""
    return {call: _parameters(folder / file, name) for call, (file, name) in CALLS.items()}


def _parameters(file: Path, qualified: str) -> list[list[Any]]:
    body: list[ast.stmt] = ast.parse(file.read_text()).body
    *outer, name = qualified.split(".")
    for part in outer:
        (body,) = [node.body for node in body if isinstance(node, ast.ClassDef) and node.name == part]
    found = [node for node in body if isinstance(node, ast.FunctionDef) and node.name == name]
    if not found:
        raise KeyError(f"{file} has no {qualified}")
    args = found[-1].args  # the last: overloads come before
    kinds = inspect.Parameter
    positional = [*args.posonlyargs, *args.args]
    first_default = len(positional) - len(args.defaults)
    out: list[list[Any]] = []
    for i, arg in enumerate(positional):
        kind = kinds.POSITIONAL_ONLY if i < len(args.posonlyargs) else kinds.POSITIONAL_OR_KEYWORD
        out.append([arg.arg, kind.value, i >= first_default])
    if args.vararg:
        out.append([args.vararg.arg, kinds.VAR_POSITIONAL.value, False])
    out += [[a.arg, kinds.KEYWORD_ONLY.value, d is not None] for a, d in zip(args.kwonlyargs, args.kw_defaults, strict=True)]
    if args.kwarg:
        out.append([args.kwarg.arg, kinds.VAR_KEYWORD.value, False])
    return out


def recorded() -> dict[str, inspect.Signature]:
    """Call -> signature, of the versions that pyproject's extra ``cuda`` pins."""
    signatures = {}
    for call, parameters in json.loads(RECORDED.read_text()).items():
        made = []
        for name, kind, has_default in parameters:
            default = None if has_default else inspect.Parameter.empty
            made.append(inspect.Parameter(name, inspect._ParameterKind(kind), default=default))
        signatures[call] = inspect.Signature(made)
    return signatures


if __name__ == "__main__":
    lines = [f"{json.dumps(call)}: {json.dumps(parameters)}" for call, parameters in read(Path(sys.argv[1])).items()]
    print("{\n" + ",\n".join(lines) + "\n}")
