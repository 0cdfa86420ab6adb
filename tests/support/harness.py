"""A scheduler in the test's own process, turned by hand, over the token oracle or a real model."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from banyan.managers.config import RunnerConfig, SchedulerConfig
from banyan.managers.event_loop import NormalLoop, OverlapLoop
from banyan.managers.faults import Faults
from banyan.managers.invariants import check_memory
from banyan.managers.io_struct import FinishReason, GenerateReq, RowHidden, RowLogprobs, TokenOutput, pack_ids, unpack_ids
from banyan.managers.ipc import IpcNames
from banyan.managers.req import Req
from banyan.managers.sampling_params import SamplingParams
from banyan.managers.scheduler_process import build_memory, build_scheduler
from banyan.mem_cache.radix_cache import RadixCache
from banyan.model_executor.factory import create_runner
from banyan.model_executor.step import Runner

VOCAB = 512
EOS = 2
SCRIPT = VOCAB - 1
IPC = IpcNames(directory="", scheduler="", detokenizer="", tokenizer="")
TOKENIZER: Any = SimpleNamespace(eos_token_ids=[])
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": VOCAB,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "eos_token_id": EOS,
    "bos_token_id": 1,
    "torch_dtype": "float32",
}


class Harness:
    """A scheduler, its loop and what it sent."""

    def __init__(
        self,
        model_path: Path | str,
        *,
        overlap: bool,
        page_size: int,
        faults: dict[str, float] | None = None,
        load_format: str = "oracle",
        runner: Runner | None = None,
        **options: Any,
    ) -> None:
        """options are SchedulerConfig's; ``total`` is the number of slots. A given runner is used again with a fresh cache."""
        runner_config = RunnerConfig(
            model_path=str(model_path),
            load_format=load_format,
            dtype=options.pop("dtype", "auto"),
            page_size=page_size,
            overlap=overlap,
            max_total_tokens=(total := options.pop("total", 2048)),
            logit_processors=options.pop("logit_processors", {}),
            attention_backend=options.pop("attention_backend", None),
            enable_deterministic_inference=options.pop("enable_deterministic_inference", False),
        )
        config = SchedulerConfig(ipc=IPC, runner=runner_config, tokenizer_path="", **{"max_running_requests": 8, **options})
        self.runner: Any = runner or create_runner(runner_config)
        self.runner.max_cache_tokens = lambda: total
        self.info, self.memory = build_memory(config, self.runner, TOKENIZER)
        self.scheduler = build_scheduler(config, self.info, self.memory, self.runner, self._take)
        self.scheduler.faults = Faults(faults)
        self.loop = (OverlapLoop if overlap else NormalLoop)(self.scheduler, lambda idle: None)
        self.ids: dict[str, list[int]] = {}
        self.reasons: dict[str, FinishReason] = {}
        self.cached: dict[str, int] = {}
        self.logprobs: dict[str, RowLogprobs] = {}
        self.hidden: dict[str, RowHidden] = {}
        self.arrivals = itertools.count()

    def _take(self, output: TokenOutput) -> None:
        ids = iter(unpack_ids(output.token_ids).tolist())
        for row, own in output.logprobs:
            rid = output.rids[row]
            assert len(own.output.values) == 4 * output.num_ids[row], "one value per token"
            assert (own.input is not None) == (rid not in self.logprobs), "the prompt's values travel with the first row only"
            self.logprobs[rid] = self.logprobs[rid].merged(own) if rid in self.logprobs else own
        for row, states in output.hidden:
            rid = output.rids[row]
            self.hidden[rid] = self.hidden[rid].merged(states) if rid in self.hidden else states
        announced = {output.rids[row] for row, _ in output.options}
        for row, rid in enumerate(output.rids):
            assert rid not in self.reasons, "output after the last row"
            assert (rid in announced) == (rid not in self.ids), "options travel with the first row and only there"
            self.ids.setdefault(rid, []).extend(itertools.islice(ids, output.num_ids[row]))
            assert output.completion_tokens[row] == len(self.ids[rid])
            assert 0 <= output.cached_tokens[row] <= output.prompt_tokens[row]
            self.cached[rid] = output.cached_tokens[row]
            if output.finish_reasons[row] is not None:
                self.reasons[rid] = output.finish_reasons[row]
        assert next(ids, None) is None

    def submit(self, rid: str, prompt: list[int], *, stream: bool = False, **options: Any) -> None:
        """options are GenerateReq's fields or sampling parameters."""
        fields = {name: options.pop(name) for name in GenerateReq.__struct_fields__ if name in options}
        message = GenerateReq(
            rid=rid,
            input_ids=pack_ids(prompt),
            sampling_params=SamplingParams.parse({"max_new_tokens": 8, "temperature": 0, **options}, self.info.model.vocab_size),
            stream=stream,
            **fields,
        )
        self.scheduler.add(Req.from_message(message, arrival=next(self.arrivals), weight_version="default", tokenizer=TOKENIZER))

    def abort(self, rid: str) -> bool:
        return self.scheduler.abort(rid, FinishReason(kind="abort", message="test"))

    def turn(self, times: int = 1) -> None:
        for _ in range(times):
            self.loop.turn()
            check_memory(self.memory, strict=True)

    def drain(self, limit: int = 3000) -> None:
        for _ in range(limit):
            self.turn()
            if self.scheduler.is_idle():
                self.turn(2)
                if isinstance(self.memory.cache, RadixCache):
                    self.memory.cache.check()
                return
        raise AssertionError("the scheduler does not come to rest")

    def close(self) -> None:
        self.runner.close()


def expected(prompt: list[int], num_new: int) -> list[int]:
    """What the oracle says of a prompt, computed from its definition."""
    ids = list(prompt)
    for _ in range(num_new):
        digest = sum((token + 1) * pow(0x9E3779B97F4A7C15, i, 2**64) for i, token in enumerate(ids)) % 2**64
        ids.append((digest >> 17) % (VOCAB - 1))
        if ids[-1] == EOS:
            break
    return ids[len(prompt) :]


def prompt_of(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCAB - 1, length).tolist()
