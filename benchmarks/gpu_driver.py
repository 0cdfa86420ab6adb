"""A scheduler of a few lines over a real runner, for gpu_check: rows, shuffled pages, chunks, and steps launched one ahead."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from banyan.model_executor.model_runner import ModelRunner
from banyan.model_executor.step import TOP_K_ALL, ForwardMode, RunnerConfig, SamplingInput, StepHandle, StepInput

SHAPES = {  # hidden, inner, layers, query heads, KV heads, vocabulary
    "tiny": (32, 48, 2, 4, 2, 128),
    "smollm2": (576, 1536, 30, 9, 3, 49152),
    "1b": (2048, 8192, 16, 32, 8, 128256),
}
MAX_ROWS, PIPELINE = 256, 2


def random_model(folder: str, shape: str) -> str:
    """A folder with the config of a Llama of that shape, to be loaded with random weights."""
    hidden, inner, layers, heads, kv_heads, vocabulary = SHAPES[shape]
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 16384,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "hidden_act": "silu",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    (Path(folder) / "config.json").write_text(json.dumps(config))
    return folder


def weight_bytes(shape: str) -> tuple[int, int]:
    """(bytes of the weights that a step reads, bytes of KV per token), both in 16 bits."""
    hidden, inner, layers, heads, kv_heads, vocabulary = SHAPES[shape]
    dim = hidden // heads
    layer = hidden * dim * (heads + 2 * kv_heads) + hidden * hidden + 3 * hidden * inner
    return 2 * (layers * layer + vocabulary * hidden), 2 * 2 * layers * kv_heads * dim


class Driver:
    """Runs requests on one runner. before_decode and after_decode are called around each launch of a decode step."""

    def __init__(self, model: str, *, dry: bool, page_size: int = 16, tokens: int | None = 0, **config: Any) -> None:
        """tokens: of the pool; None: as many as the runner finds room for, 0: enough for what is measured."""
        width = 512 if dry else 16384
        if tokens == 0:
            tokens = 4096 if dry else 400_000
        self.runner = ModelRunner(
            RunnerConfig(
                model_path=model,
                load_format="dummy",
                device="cpu" if dry else "cuda",
                max_total_tokens=None if tokens is None else tokens // page_size * page_size,
                page_size=page_size,
                **config,
            )
        )
        self.page, self.vocabulary = page_size, self.runner.info.vocab_size
        self.table = np.zeros((MAX_ROWS + 1, width), np.int32)
        self.runner.init_cache(self.runner.max_cache_tokens(), self.table)
        self.before_decode: Callable[[], None] = lambda: None
        self.after_decode: Callable[[], None] = lambda: None
        self.launch_seconds = 0.0
        self._reset()

    def __enter__(self) -> Driver:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.runner.close()

    def _reset(self) -> None:
        num_pages = self.runner.max_cache_tokens() // self.page
        self._pages = (np.random.default_rng(1).permutation(num_pages) + 1).tolist()
        self.lens = np.zeros(MAX_ROWS + 1, np.int64)

    def _extend(self, row: int, count: int) -> np.ndarray:
        """Slots of the next tokens of a row."""
        start = int(self.lens[row])
        at = np.arange(start, start + count)
        for page in range(-(-start // self.page), -(-(start + count) // self.page)):
            begin = page * self.page
            self.table[row, begin : begin + self.page] = self._pages.pop() * self.page + np.arange(self.page)
        self.lens[row] = start + count
        return self.table[row, at]

    def launch(self, parts: list[tuple[int, list[int], bool]], temperature: float = 0.0) -> StepHandle:
        """One step of (row, its new ids, whether it samples)."""
        locs = np.concatenate([self._extend(row, len(ids)) for row, ids, _ in parts])
        rows = np.array([row for row, *_ in parts], np.int32)
        index = np.flatnonzero([samples for *_, samples in parts]).astype(np.int32)
        n, seq_lens = len(index), self.lens[rows].astype(np.int32)
        sampling = SamplingInput(
            np.full(n, temperature, np.float32),
            np.full(n, 0.95, np.float32),
            np.full(n, TOP_K_ALL, np.int32),
            np.zeros(n, np.float32),
            np.arange(n, dtype=np.int64),
            seq_lens[index].astype(np.int64),
        )
        extend = np.array([len(ids) for _, ids, _ in parts], np.int32)
        return self.runner.launch(
            StepInput(
                mode=ForwardMode.DECODE if (extend == 1).all() else ForwardMode.EXTEND,
                rows=rows,
                seq_lens=seq_lens,
                extend_lens=extend,
                input_ids=np.array([token for _, ids, _ in parts for token in ids], np.int64),
                out_cache_loc=locs.astype(np.int32),
                sample_index=index,
                sampling=sampling,
            )
        )

    def prefill(self, lens: list[int], chunk: int | None = None, temperature: float = 0.0) -> list[int]:
        """Compute prompts in rows 1, 2, ...; the first token of each."""
        self._reset()
        rng, first = np.random.default_rng(2), []
        for row, length in enumerate(lens, 1):
            prompt = rng.integers(3, self.vocabulary, length).tolist()
            step = chunk or length
            handles = [
                self.launch([(row, prompt[at : at + step], at + step >= length)], temperature) for at in range(0, length, step)
            ]
            first.append(int([handle.wait() for handle in handles][-1].next_ids[0]))
        return first

    def generate(
        self, lens: list[int], num: int, *, chunk: int | None = None, pipelined: bool = False, temperature: float = 0.0
    ) -> list[list[int]]:
        """Ids of each request: its prompt's, then ``num`` decode steps."""
        outputs = [[token] for token in self.prefill(lens, chunk, temperature)]
        for ids in self._decode(len(lens), num, pipelined=pipelined, temperature=temperature):
            for output, token in zip(outputs, ids, strict=True):
                output.append(int(token))
        return outputs

    def _decode(self, size: int, num: int, *, pipelined: bool, temperature: float = 0.0) -> list[np.ndarray]:
        """What each step samples. Inputs are placeholders, which the runner resolves to what the step before sampled."""
        found, pending, spent = [], [], []
        for _ in range(num):
            start = time.perf_counter()
            self.before_decode()
            pending.append(self.launch([(row, [-row], True) for row in range(1, size + 1)], temperature))
            self.after_decode()
            spent.append(time.perf_counter() - start)
            if len(pending) >= (PIPELINE if pipelined else 1):
                found.append(pending.pop(0).wait().next_ids)
        self.launch_seconds = statistics.median(spent)
        return found + [handle.wait().next_ids for handle in pending]

    def decode_seconds(self, size: int, context: int, num: int, *, pipelined: bool = True) -> float:
        """Seconds of a decode step of ``size`` requests that hold ``context`` tokens each."""
        self.prefill([context] * size)
        self._decode(size, 3, pipelined=pipelined)
        start = time.perf_counter()
        self._decode(size, num, pipelined=pipelined)
        return (time.perf_counter() - start) / num

    def prefill_seconds(self, length: int, repeats: int) -> float:
        """Median seconds of one prompt."""
        found = []
        for _ in range(repeats + 1):
            start = time.perf_counter()
            self.prefill([length])
            found.append(time.perf_counter() - start)
        return statistics.median(found[1:])
