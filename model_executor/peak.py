"""What the largest step takes besides weights and KV: measured by one over a pool of its own, before the real pool is made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch

from ..layers.attention.attention import bind_attention
from ..layers.attention.base import AttentionBackend
from ..layers.forward_batch import ForwardBatch
from ..mem_cache.kv_pool import KVPool
from ..mem_cache.sizing import ceil_page
from .memory import GPU_CHUNK, Peak
from .model_config import ModelConfig
from .models.blocks import DecoderModel
from .step import RunnerConfig

UNCHUNKED = 16384  # tokens of the largest step where prompts are not split
SAMPLED_ROWS = 256  # of it, whose logits are computed


class Meter(Protocol):
    """Counts memory of a device."""

    def start(self) -> None:
        """Count from here on."""

    def stop(self) -> int:
        """The most bytes since start, beyond those that were taken then."""


class CudaMeter:
    """What the caching allocator took from the device, so that fragments count as well."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._before = device, 0

    def start(self) -> None:
        """As Meter.start."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)
        self._before = torch.cuda.memory_reserved(self._device)

    def stop(self) -> int:
        """As Meter.stop. Gives back what the step left."""
        torch.cuda.synchronize(self._device)
        peak = torch.cuda.max_memory_reserved(self._device) - self._before
        torch.cuda.empty_cache()
        return peak


def largest_step(config: RunnerConfig) -> int:
    """Tokens of it."""
    chunk = GPU_CHUNK if config.chunked_prefill_size is None else config.chunked_prefill_size
    return chunk if chunk > 0 else UNCHUNKED


def measure_peak(
    model: DecoderModel,
    make_backend: Callable[[KVPool], AttentionBackend],
    *,
    config: RunnerConfig,
    shape: ModelConfig,
    kv_dtype: torch.dtype,
    compute: torch.dtype,
    device: torch.device,
    meter: Meter,
) -> Peak:
    """Run prompts of as many tokens as a step may have, through this rank's part of the model, whose shape is given, and the logits
    of many rows. The model's attention is bound to nothing afterwards that lives. Raises ValueError where that does not fit."""
    num_tokens = largest_step(config)
    try:
        pool = KVPool(
            num_slots=ceil_page(num_tokens, config.page_size),
            page_size=config.page_size,
            num_layers=shape.num_hidden_layers,
            num_kv_heads=shape.num_key_value_heads,
            head_dim=shape.head_dim,
            dtype=kv_dtype,
            device=device,
            compute_dtype=compute,
        )
        batch = prompts(num_tokens, shape.context_len, config.page_size, device)
        received = (
            None if model.embed_tokens is not None else torch.zeros((num_tokens, shape.hidden_size), dtype=compute, device=device)
        )
        meter.start()
        _run(model, make_backend(pool), batch, received)
        return Peak(meter.stop(), num_tokens)
    except torch.OutOfMemoryError as error:
        raise ValueError(
            f"a step of {num_tokens} tokens does not fit into memory; a lower chunked_prefill_size may: {error}"
        ) from None


def _run(model: DecoderModel, backend: AttentionBackend, batch: ForwardBatch, received: torch.Tensor | None) -> None:
    """In a function of its own: its tensors are gone when it returns."""
    bind_attention(model, backend)
    backend.plan(batch)
    hidden = model.hidden_states(batch, received)
    if model.head is not None:
        model.logits(hidden[:SAMPLED_ROWS]).clone()


def prompts(num_tokens: int, context_len: int, page_size: int, device: torch.device) -> ForwardBatch:
    """A step of prompts without cached prefixes, each as long as the context allows, over the slots behind the scratch page."""
    lens = np.full(-(-num_tokens // context_len), context_len, np.int64)
    lens[-1] = num_tokens - lens[:-1].sum()
    rows, starts = len(lens), np.cumsum(lens) - lens
    slots = torch.arange(page_size, page_size + num_tokens, device=device)
    table = torch.zeros((rows + 1, int(lens.max())), dtype=torch.int32, device=device)
    for row, (start, length) in enumerate(zip(starts.tolist(), lens.tolist(), strict=True), 1):
        table[row, :length] = slots[start : start + length]
    lengths = torch.from_numpy(lens).to(device)
    return ForwardBatch(
        input_ids=torch.zeros(num_tokens, dtype=torch.int64, device=device),
        positions=torch.from_numpy(np.arange(num_tokens) - np.repeat(starts, lens)).to(device),
        rows=torch.arange(1, rows + 1, device=device),
        seq_lens=lengths,
        extend_lens=lengths,
        prefix_lens=torch.zeros_like(lengths),
        out_cache_loc=slots,
        req_to_token=table,
        sample_tokens=torch.from_numpy(starts + lens - 1).to(device),
        seq_lens_host=lens,
        extend_lens_host=lens,
        prefix_lens_host=np.zeros_like(lens),
    )
