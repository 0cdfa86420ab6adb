"""The CPU graph: the ops of all layers, recorded once from a model's modules and replayed in one native call per step, for any
number of requests and tokens. What a module does is written down here a second time, as data, so only modules known here are
recorded: ``why_not`` names the first that is not, and such a model is computed module by module.

The call holds no lock of Python's, so the scheduler runs beside it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import c_double, c_float, c_int32, c_int64, c_void_p
from typing import Any

import torch

from ..layers.attention.cpu import CpuBackend
from ..layers.embedding import Embedding
from ..layers.forward_batch import ForwardBatch
from ..layers.hidden import lay_embeds
from ..layers.kernels.cpu.library import Native
from ..layers.kernels.cpu.packed import PackedLinear, aligned
from ..layers.linear import Linear, MergedLinear
from ..layers.norm import GemmaRMSNorm, RMSNorm
from ..layers.rotary import RotaryEmbedding
from .models.blocks import DecoderLayer, DecoderModel, GatedMLP, SelfAttention
from .models.gemma3 import Gemma3DecoderLayer

ACTS = {"silu": 0, "gelu_pytorch_tanh": 1, "gelu": 2}
_EMBED, _NORM, _ADD_NORM, _LINEAR, _ROPE_WRITE, _ATTENTION, _ACT_MUL = range(7)
KINDS = ("embed", "norm", "add_norm", "linear", "rope_write", "attention", "act_mul")
_TABLE_TYPES = {torch.float32: 0, torch.bfloat16: 1}


class OpStruct(ctypes.Structure):
    """bny_op."""

    _fields_ = (
        ("kind", c_int32),
        ("type", c_int32),
        ("src", c_int32),
        ("dst", c_int32),
        ("sum", c_int32),
        ("number", c_float),
        ("p", c_void_p * 5),
    )


class ProgramStruct(ctypes.Structure):
    """bny_program."""

    _fields_ = (
        ("ops", c_void_p),
        ("widths", c_void_p),
        ("buffers", c_void_p),
        ("scratch", c_void_p),
        ("seconds", c_void_p),
        ("stop", c_void_p),
        ("num_ops", c_int64),
        ("vocab_size", c_int64),
        ("num_positions", c_int64),
    )


def why_not(model: DecoderModel, hidden_act: str) -> str | None:
    """What of a loaded model cannot be recorded; None if all of it can."""
    table = model.embed_tokens
    if type(table) is not Embedding or table.weight.dtype not in _TABLE_TYPES or type(model.norm) not in (RMSNorm, GemmaRMSNorm):
        return "the model is one of several parts, or its embedding is of another kind"
    if model.group.size > 1:
        return "ranks sum up between layers"
    if hidden_act not in ACTS:
        return f"the activation {hidden_act}"
    known = {DecoderLayer, Gemma3DecoderLayer, SelfAttention, GatedMLP, Linear, MergedLinear, RMSNorm, GemmaRMSNorm}
    for layer in _layers(model):
        parts = (layer, layer.self_attn, layer.mlp, *layer.self_attn.children(), *layer.mlp.children(), *_norms(layer))
        for part in parts:
            if type(part) not in known and part is not layer.self_attn.attention:
                return f"a layer of type {type(part).__name__}"
            if isinstance(part, Linear) and part.packed is None:
                return "linears that are not packed"
    return None


def _layers(model: DecoderModel) -> list[DecoderLayer]:
    return [layer for layer in model.layers if isinstance(layer, DecoderLayer)]


def _norms(layer: DecoderLayer) -> list[RMSNorm]:
    return [part for part in layer.children() if isinstance(part, RMSNorm)]


class CpuGraph:
    """Computes what DecoderModel.hidden_states does, in float32. Its model, backend and pool stay as they are while it lives."""

    def __init__(self, model: DecoderModel, backend: CpuBackend, native: Native, *, hidden_act: str) -> None:
        """model: one for which ``why_not`` is None."""
        self._lib, self._backend = native.lib, backend
        self._tape = _Tape()
        result = _record(self._tape, model, backend, hidden_act)
        self._embed_tokens, self._first = model.embed_tokens, self._tape.buffers["x"]
        self._result = self._tape.buffers[result]
        self._ops = (OpStruct * len(self._tape.ops))(*self._tape.ops)
        self._widths = (c_int64 * len(self._tape.widths))(*self._tape.widths)
        self._memory: list[torch.Tensor] = []
        self._addresses = (c_void_p * len(self._widths))()
        self._scratch = aligned(0)
        self._capacity = 0
        self._program = ProgramStruct(
            ops=ctypes.addressof(self._ops),
            widths=ctypes.addressof(self._widths),
            buffers=ctypes.addressof(self._addresses),
            num_ops=len(self._ops),
            vocab_size=self._tape.vocab_size,
            num_positions=self._tape.num_positions,
        )

    def hidden_states(self, batch: ForwardBatch) -> torch.Tensor:
        """float32 [T, hidden] of a step that the backend has planned, valid until the next call; anything if it is given up."""
        num_tokens = len(batch.input_ids)
        if not (batch.input_ids.dtype == batch.positions.dtype == torch.int64 and len(batch.positions) == num_tokens):
            raise ValueError("input_ids and positions must be int64 and of one length")
        if num_tokens > self._capacity:
            self._grow(num_tokens)
        self._program.stop = None if batch.stop is None else batch.stop.ctypes.data
        step = self._backend.step.struct
        if step.num_tokens != num_tokens:
            raise ValueError(f"{step.num_tokens} tokens were planned, {num_tokens} are given")
        program, at = ctypes.byref(self._embedded(batch) if batch.embeds else self._program), ctypes.byref(step)
        found = self._lib.bny_run(program, at, batch.input_ids.data_ptr(), batch.positions.data_ptr())
        if found >= 0:
            raise IndexError(f"token {found} of the step is outside the vocabulary, or its position beyond the longest context")
        width = self._widths[self._result]
        return self._memory[self._result][: num_tokens * width].view(num_tokens, width)

    def _embedded(self, batch: ForwardBatch) -> ProgramStruct:
        """The program behind its first op, whose result is written here: some tokens come as embeddings."""
        table = self._embed_tokens
        if table is None:
            raise RuntimeError("a model without an embedding was recorded")
        num_tokens, width = len(batch.input_ids), self._widths[self._first]
        x = self._memory[self._first][: num_tokens * width].view(num_tokens, width)
        x.copy_(table.weight[batch.input_ids])
        lay_embeds(x if table.scale is None else x.mul_(table.scale), batch.embeds)
        rest = ProgramStruct.from_buffer_copy(self._program)
        rest.ops += ctypes.sizeof(OpStruct)
        rest.num_ops -= 1
        if rest.seconds:
            rest.seconds += ctypes.sizeof(c_double)
        return rest

    def profile(self, run: Callable[[], Any]) -> dict[str, float]:
        """Seconds by kind of op that the steps which ``run`` makes spend in kernels."""
        seconds = (c_double * len(self._ops))()
        self._program.seconds = ctypes.addressof(seconds)
        try:
            run()
        finally:
            self._program.seconds = None
        totals = dict.fromkeys(KINDS, 0.0)
        for op, spent in zip(self._ops, seconds, strict=True):
            totals[KINDS[op.kind]] += spent
        return totals

    def _grow(self, num_tokens: int) -> None:
        """Room for a step of so many tokens; doubling, so that growing chunks do not grow it each time."""
        capacity = max(num_tokens, min(2 * self._capacity, num_tokens + 1024))
        self._memory.clear()
        self._memory += [torch.empty(capacity * width, dtype=torch.float32) for width in self._widths]
        for i, memory in enumerate(self._memory):
            self._addresses[i] = memory.data_ptr()
        need = max(int(self._lib.bny_linear_scratch(linear.address, capacity)) for linear in self._tape.linears)
        self._scratch = aligned(need)
        self._program.scratch = self._scratch.data_ptr()
        self._capacity = capacity


class _Tape:
    """Ops over named buffers, and whatever their pointers point to."""

    def __init__(self) -> None:
        self.ops: list[OpStruct] = []
        self.buffers: dict[str, int] = {}
        self.widths: list[int] = []
        self.linears: list[PackedLinear] = []
        self.vocab_size = self.num_positions = 0
        self._alive: list[Any] = []

    def buffer(self, name: str, width: int) -> str:
        """A buffer of so many floats per token."""
        self.buffers[name] = len(self.widths)
        self.widths.append(width)
        return name

    def op(self, kind: int, src: str, dst: str, *points: Any, total: str = "", type_: int = 0, number: float = 0.0) -> None:
        """points: tensors, structs or None."""
        pointers = (c_void_p * 5)(*[_address(point) for point in points])
        self._alive += points
        at = self.buffers
        self.ops.append(OpStruct(kind=kind, type=type_, src=at[src], dst=at[dst], sum=at[total or dst], number=number, p=pointers))

    def linear(self, src: str, dst: str, linear: Linear) -> None:
        if linear.packed is None:
            raise ValueError("a linear that is not packed cannot be recorded")
        self.linears.append(linear.packed)
        self.op(_LINEAR, src, dst, linear.packed)

    def norm(self, src: str, dst: str, norm: RMSNorm, total: str = "") -> None:
        """With ``total``: add src to it first, and norm the sum."""
        kind = _ADD_NORM if total else _NORM
        self.op(kind, src, dst, _norm_weight(norm), total=total, number=norm.eps)


def _address(point: Any) -> int | None:
    if isinstance(point, torch.Tensor):
        return point.data_ptr()
    if isinstance(point, PackedLinear):
        return point.address
    return None if point is None else ctypes.addressof(point)


def _norm_weight(norm: RMSNorm) -> torch.Tensor:
    weight = norm.weight.detach().float().contiguous()
    return 1.0 + weight if isinstance(norm, GemmaRMSNorm) else weight


def _record(tape: _Tape, model: DecoderModel, backend: CpuBackend, hidden_act: str) -> str:
    """Returns the buffer that holds the result."""
    table = model.embed_tokens
    if table is None or model.norm is None:
        raise ValueError("a part of a model cannot be recorded")
    hidden = table.weight.shape[1]
    x, h, delta = (tape.buffer(name, hidden) for name in ("x", "h", "delta"))
    layers = _layers(model)
    first = layers[0]
    tape.buffer("qkv", first.self_attn.qkv_proj.sizes[0] + 2 * first.self_attn.qkv_proj.sizes[1])
    tape.buffer("attention", first.self_attn.qkv_proj.sizes[0])
    tape.buffer("gate_up", sum(first.mlp.gate_up_proj.sizes))
    tape.buffer("act", first.mlp.gate_up_proj.sizes[0])
    tape.vocab_size, tape.num_positions = table.weight.shape[0], model.rope.cos.shape[0]
    tables = _tables(model.rope)
    local = tables if model.local_rope is None else _tables(model.local_rope)

    scale = 1.0 if table.scale is None else table.scale
    tape.op(_EMBED, x, x, table.weight.detach(), type_=_TABLE_TYPES[table.weight.dtype], number=scale)
    tape.norm(x, h, first.input_layernorm)
    following = [*(layer.input_layernorm for layer in layers[1:]), model.norm]
    for layer, is_local, norm in zip(layers, model.layer_is_local, following, strict=True):
        _record_attention(tape, layer.self_attn, local if is_local else tables, backend)
        if isinstance(layer, Gemma3DecoderLayer):
            tape.norm(delta, delta, layer.post_attention_layernorm)
            tape.norm(delta, h, layer.pre_feedforward_layernorm, total=x)
        else:
            tape.norm(delta, h, layer.post_attention_layernorm, total=x)
        tape.linear(h, "gate_up", layer.mlp.gate_up_proj)
        tape.op(_ACT_MUL, "gate_up", "act", type_=ACTS[hidden_act])
        tape.linear("act", delta, layer.mlp.down_proj)
        if isinstance(layer, Gemma3DecoderLayer):
            tape.norm(delta, delta, layer.post_feedforward_layernorm)
        tape.norm(delta, h, norm, total=x)
    return h


def _record_attention(tape: _Tape, module: SelfAttention, tables: tuple[torch.Tensor, torch.Tensor], backend: CpuBackend) -> None:
    kv = backend.layer(module.attention.spec)
    q_norm, k_norm = (None if norm is None else _norm_weight(norm) for norm in (module.q_norm, module.k_norm))
    eps = 0.0 if module.q_norm is None else module.q_norm.eps
    tape.linear("h", "qkv", module.qkv_proj)
    tape.op(_ROPE_WRITE, "qkv", "qkv", kv, *tables, q_norm, k_norm, number=eps)
    tape.op(_ATTENTION, "qkv", "attention", kv)
    tape.linear("attention", "delta", module.o_proj)


def _tables(rope: RotaryEmbedding) -> tuple[torch.Tensor, torch.Tensor]:
    return rope.cos.float().contiguous(), rope.sin.float().contiguous()
