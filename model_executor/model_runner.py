"""ModelRunner: the Runner that computes a real model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import msgspec
import numpy as np
import torch

from ..layers.attention.attention import bind_attention
from ..layers.attention.base import AttentionBackend
from ..layers.forward_batch import ForwardBatch
from ..layers.hidden import read_hidden
from ..layers.kernels.cpu.library import Native
from ..layers.kernels.ops import traceable_ops
from ..layers.logit_edits import LogitEdits
from ..layers.logit_processor import load_processors
from ..layers.logprob_input import packed_sizes
from ..layers.logprobs import LogprobReader
from ..layers.parallel import Ranks
from ..layers.sampler import ban, sample
from ..mem_cache.kv_pool import KVPool
from .batch_builder import BatchBuilder
from .compiled import DEFAULT_MAX_TOKENS, CompiledSteps, check_compile
from .determinism import check_model, determined, in_mode
from .device import Device, create_device
from .forward import AttentionPlan, HiddenStates, is_recorded, make_forward, plan_attention, plan_forward
from .future_map import FutureMap
from .gpu_plan import GpuFacts, GpuPlan, plan_gpu, refuse_gpu_options
from .memory import GraphCount, Peak, available_memory, cache_tokens, token_bytes
from .model_config import ModelConfig, ModelConfigError, load_model_config
from .models.blocks import DecoderModel
from .models.registry import model_class
from .packed_file import size_of
from .peak import CudaMeter, measure_peak
from .profiler import StepProfiler
from .shard import Shard
from .stage_handle import BoxHandle, ResultBox, StageHandle
from .step import (
    FatalStepError,
    GroupSpec,
    ModelInfo,
    ModelMemory,
    ProfileSpec,
    RunnerConfig,
    StepHandle,
    StepInput,
    TensorSpec,
)
from .step_graphs import GraphPlan, StepGraphs, record_steps
from .weight_cache import Loaded, WeightCache, packed
from .weight_form import plan_weights
from .weight_groups import WeightGroups
from .weight_sources import WeightSources
from .weights import dummy_weights, load_weights


class _Cache:
    """What exists from init_cache on."""

    def __init__(
        self,
        builder: BatchBuilder,
        backend: AttentionBackend,
        forward: HiddenStates | None,  # None while the weights are released
        future_map: FutureMap,
        edits: LogitEdits,
    ) -> None:
        self.builder, self.backend, self.forward, self.future_map, self.edits = builder, backend, forward, future_map, edits


@dataclass(slots=True)
class _Upkeep:
    """What outlives weights and KV that are released. cache_size: the arguments of init_cache."""

    sources: WeightSources
    profiler: StepProfiler
    groups: WeightGroups
    weight_cache: WeightCache | None = None
    cache_size: tuple[int, np.ndarray] | None = None


class ModelRunner:
    """Implements Runner. Everything that touches tensors runs on the device's forward thread."""

    def __init__(self, config: RunnerConfig) -> None:
        """Load the model. Raises ValueError with one clear line for a config, weights or a machine that do not do."""
        config = self._config = determined(config)
        overrides = _parse_overrides(config.json_model_override_args)
        self._model_config = load_model_config(config.model_path, context_length=config.context_length, overrides=overrides)
        self._shard = Shard(self._model_config, config.ranks)
        self._processors = load_processors(config.logit_processors)
        self._cache: _Cache | None = None
        self._graphs: StepGraphs | None = None
        sources = WeightSources(self._model_config, config.model_path, config.load_format)
        self._upkeep = _Upkeep(sources, StepProfiler(config.ranks.name), WeightGroups(config.ranks))
        self._closed = False
        self._device = create_device(config.device, overlap=config.overlap, ranks=config.ranks)
        try:
            self._plan = plan_weights(config, self._model_config.torch_dtype, self._device.device)
            check_compile(config, native=isinstance(self._plan.native, Native))
            self._attention = self._plan_attention()
            self._ranks = self._device.run(lambda: Ranks(config.ranks, self._device.device))
            free_before_load = available_memory(self._device.device)
            self._upkeep.weight_cache = WeightCache(config, self._shard, self._plan)
            loaded = self._device.run(lambda: self._load(sources))
            self._model: DecoderModel | None = loaded.model
            peak = self._device.run(self._measure_peak)
            num_tokens, pool_why = cache_tokens(
                config,
                self._shard.local,
                dtype=self._attention.kv_dtype,
                device=self._device.device,
                free_before_load=free_before_load,
                mapped=loaded.mapped,
                peak=peak,
                graphs=GraphCount(max(self._attention.graph_sizes, default=0), len(self._attention.prefill_graph_sizes)),
            )
            self._num_tokens = self._ranks.min_over_all(num_tokens)
        except BaseException:
            self._device.close()
            raise
        _, forward_why = plan_forward(self._model, self._plan.native, self._model_config, self._attention.backend)
        if config.enable_torch_compile:
            most = config.torch_compile_max_bs or DEFAULT_MAX_TOKENS
            forward_why = f"compiled between layers' attention for steps of up to {most} tokens"
        explain = self._plan.explain | self._attention.explain | {"pool": pool_why, "forward": forward_why}
        explain["weight_cache"] = loaded.why
        self.info = msgspec.structs.replace(
            _describe(config, self._model_config, self._device, explain),
            memory=ModelMemory(size_of(loaded.model), token_bytes(self._shard.local, self._attention.kv_dtype)),
        )

    def max_cache_tokens(self) -> int:
        return self._num_tokens

    def init_cache(self, num_slots: int, req_to_token: np.ndarray) -> None:
        self._upkeep.cache_size = num_slots, req_to_token
        self._cache = self._device.run(lambda: self._make_cache(num_slots, req_to_token))

    def update_weights(self, path: str, load_format: str, *, partial: bool) -> None:
        sources = self._upkeep.sources.with_overlay(path) if partial else WeightSources(self._model_config, path, load_format)
        self._device.run(lambda: self._replace_model(sources))
        self._upkeep.sources = sources

    def join_group(self, spec: GroupSpec) -> None:
        self._upkeep.groups.join(spec)

    def leave_group(self, name: str) -> None:
        self._upkeep.groups.leave(name)

    def receive_weights(self, group: str, tensors: Sequence[TensorSpec], folder: str) -> str:
        return self._device.run(lambda: self._upkeep.groups.receive(group, tensors, folder, self._device.device))

    def read_weight(self, name: str, limit: int) -> list[float]:
        return self._device.run(lambda: self._upkeep.sources.values(name, limit))

    def release_memory(self, tags: list[str]) -> None:
        self._graphs = None
        if "weights" in tags:
            self._model = None
            if self._cache is not None:
                self._cache.forward = None
        if "kv_cache" in tags:
            self._cache = None

    def resume_memory(self, tags: list[str]) -> None:
        if "weights" in tags:
            self._device.run(lambda: self._replace_model(self._upkeep.sources))
        if "kv_cache" in tags and self._upkeep.cache_size is not None:
            num_slots, req_to_token = self._upkeep.cache_size
            self._cache = self._device.run(lambda: self._make_cache(num_slots, req_to_token))

    def start_profile(self, spec: ProfileSpec) -> None:
        self._device.run(lambda: self._upkeep.profiler.start(spec))

    def stop_profile(self) -> str:
        return self._device.run(self._upkeep.profiler.stop)

    def launch(self, step: StepInput) -> StepHandle:
        if self._closed:
            raise RuntimeError("the runner is closed")
        if not self._shard.is_whole:
            return self._launch_part(step)
        box = ResultBox()
        return BoxHandle(self._device.submit(lambda: in_mode(self._config, lambda: self._run(step, box))), box)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._device.close()
            self._ranks.close()
            self._cache = self._model = self._graphs = None

    # --- on the forward thread ---------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def _load(self, sources: WeightSources) -> Loaded:
        def fill(model: DecoderModel) -> None:
            packer = self._plan.packer(model)
            if sources.load_format == "dummy":
                dummy_weights(model, self._config.random_seed, packer)
            else:
                load_weights(model, sources.tensors(self._shard, keep_blocks=self._plan.keep_blocks), packer)

        cache = self._upkeep.weight_cache if sources.is_checkpoint_of(self._config) else None
        loaded = packed(self._empty_model, fill) if cache is None else cache.load(self._empty_model, fill)
        check_model(self._config, loaded.model)
        loaded.model.eval()
        return loaded

    def _empty_model(self) -> DecoderModel:
        traced = traceable_ops() if self._config.enable_torch_compile else nullcontext()
        with self._device.device, traced:
            make = model_class(self._model_config.architecture)
            return make(self._model_config, self._plan.compute, shard=self._shard, ranks=self._ranks)

    @torch.inference_mode()
    def _measure_peak(self) -> Peak | None:
        """Of a CUDA device whose pool is not given."""
        device, model = self._device.device, self._model
        if device.type == "cpu" or self._config.max_total_tokens is not None or model is None:
            return None
        return measure_peak(
            model,
            self._attention.make_backend,
            config=self._config,
            shape=self._shard.local,
            kv_dtype=self._attention.kv_dtype,
            compute=self._plan.compute,
            device=device,
            meter=CudaMeter(device),
        )

    @torch.inference_mode()
    def _replace_model(self, sources: WeightSources) -> None:
        """Another model in the place of this one, over the same KV. It stands before the old one goes: failures change nothing."""
        model = self._load(sources).model
        if (cache := self._cache) is not None:
            cache.forward = self._bound(model, cache.backend)
            self._graphs = None  # their memory is that of the new ones
            self._graphs = self._record(model, cache.forward, cache.builder.table, cache.backend)
        self._model = model

    def _bound(self, model: DecoderModel, backend: AttentionBackend) -> HiddenStates:
        """A forward of the model over the KV of the backend."""
        bind_attention(model, backend)
        if self._config.enable_torch_compile:
            return CompiledSteps(model, self._config.torch_compile_max_bs or DEFAULT_MAX_TOKENS).hidden_states
        return make_forward(model, self._plan.native, self._model_config, backend)

    @torch.inference_mode()
    def _make_cache(self, num_slots: int, req_to_token: np.ndarray) -> _Cache:
        model = self._shard.local
        pool = KVPool(
            num_slots=num_slots,
            page_size=self._config.page_size,
            num_layers=model.num_hidden_layers,
            num_kv_heads=model.num_key_value_heads,
            head_dim=model.head_dim,
            dtype=self._attention.kv_dtype,
            device=self._device.device,
            compute_dtype=self._plan.compute,
        )
        future_map = FutureMap(req_to_token.shape[0], self._device.device)
        backend = self._attention.make_backend(pool)
        forward = None if self._model is None else self._bound(self._model, backend)
        edits = LogitEdits(model.vocab_size, self._device.device, self._processors)
        builder = BatchBuilder(self._device, req_to_token, future_map, kernel_draws=self._attention.draw is not None)
        self._graphs = self._record(self._model, forward, builder.table, backend)
        return _Cache(builder, backend, forward, future_map, edits)

    def _record(
        self, model: DecoderModel | None, forward: HiddenStates | None, table: torch.Tensor, backend: AttentionBackend
    ) -> StepGraphs | None:
        if model is None or forward is None:
            return None
        attention = self._attention
        plan = GraphPlan(decode_sizes=attention.graph_sizes, prefill_sizes=attention.prefill_graph_sizes, dtype=self._plan.compute)
        return record_steps(model, forward, backend, table, plan=plan)

    def _plan_attention(self) -> AttentionPlan | GpuPlan:
        config, plan, device = self._config, self._plan, self._device.device
        if device.type == "cpu":
            refuse_gpu_options(config)
            return plan_attention(config, plan.native, weights=plan.weights, compute=plan.compute)
        whole = config.ranks.world_size == 1
        return plan_gpu(config, GpuFacts.of(device, head_dim=self._model_config.head_dim, compute=plan.compute, is_whole=whole))

    @torch.inference_mode()
    def _run(self, step: StepInput, box: ResultBox) -> list[torch.Tensor]:
        """Ids that the step samples, int64 [S], and what log-probabilities it is asked for."""
        self._upkeep.profiler.step()
        cache = self._require_cache()
        cache.edits.update(step.controls)  # first: a step that fails must not leave a row its old owner's controls
        batch, (sample_rows, draws) = cache.builder.build(step)
        batch.stop = step.stop if self._may_be_given_up(step) else None
        hidden = self._forward(batch, box)
        if batch.stop is not None and batch.stop[0]:
            box.given_up = True
            return [torch.zeros(len(step.sample_index), dtype=torch.int64)]
        model, reader = self._loaded_model(), LogprobReader()
        reader.read_prompts(step.prompt_logprobs, hidden, model.logits, self._model_config.vocab_size)
        logits = model.logits(hidden.index_select(0, batch.sample_tokens))
        rows = step.rows[step.sample_index]
        cache.edits.apply(rows, logits)
        if step.sampled_logprobs:
            ban(logits, step.sampling)
        logprobs = reader.prepare(step.sampled_logprobs, logits, step.sampling)
        next_ids = self._ranks.tp.broadcast(self._sample(logits, step, draws))  # the first rank's word counts
        reader.read_sampled(step.sampled_logprobs, logprobs, next_ids)
        cache.edits.push(rows, next_ids)
        cache.future_map.publish(sample_rows, next_ids)
        result = [next_ids, *reader.result()] if step.prompt_logprobs or step.sampled_logprobs or step.hidden else [next_ids]
        if step.hidden:
            result.append(read_hidden(hidden, step.hidden))
        if self._config.ranks.pp_size > 1:
            self._ranks.send_result(result)
        return result

    def _may_be_given_up(self, step: StepInput) -> bool:
        """Of several ranks each must do its part, and a CUDA device has the step at once. What tells of more than ids is read."""
        wants_more = step.prompt_logprobs or step.sampled_logprobs or step.hidden
        return self._shard.is_whole and self._device.device.type == "cpu" and not wants_more

    def _sample(self, logits: torch.Tensor, step: StepInput, draws: torch.Tensor | None) -> torch.Tensor:
        kernel = self._attention.draw
        if kernel is None or draws is None:
            native = self._plan.native
            return sample(logits, step.sampling, choose=native.choose if isinstance(native, Native) else None)
        return sample(logits, step.sampling, draw=partial(kernel, params_5S=draws))

    def _launch_part(self, step: StepInput) -> StepHandle:
        """A step of which this rank computes a part. What all ranks refuse alike fails the step, anything else the rank."""
        box = ResultBox()

        def call() -> list[torch.Tensor]:
            if (step.input_ids >= self.info.vocab_size).any():
                raise IndexError("an input id is outside the vocabulary")
            try:
                return self._run(step, box) if self._shard.has_head else self._run_stage(step, box)
            except Exception as error:
                raise FatalStepError(f"{self._config.ranks.name}: {type(error).__name__}: {error}") from error

        handle = self._device.submit(call)
        return BoxHandle(handle, box) if self._shard.has_head else StageHandle(handle, box)

    @torch.inference_mode()
    def _run_stage(self, step: StepInput, box: ResultBox) -> list[torch.Tensor]:
        """The layers of a stage before the last; what is sampled comes back later."""
        self._ranks.send_hidden(self._forward(self._require_cache().builder.build(step)[0], box))
        asked = [*step.prompt_logprobs, *step.sampled_logprobs]
        sizes = packed_sizes(asked) if asked or step.hidden else ()
        told = [sum(span.count for span in step.hidden) * self._model_config.hidden_size] if step.hidden else []
        box.receipt = self._ranks.receive_result([len(step.sample_index), *sizes, *told])
        return [torch.empty(0, dtype=torch.int64)]

    def _forward(self, batch: ForwardBatch, box: ResultBox) -> torch.Tensor:
        """Hidden states of all tokens, [T, hidden]."""
        if self._graphs is not None and not batch.embeds and (recorded := self._graphs.run(batch)) is not None:
            box.graph = True
            return recorded
        cache = self._require_cache()
        cache.backend.plan(batch)
        if cache.forward is None:
            raise RuntimeError("the weights are released")
        if self._config.ranks.is_first_stage:
            box.graph = is_recorded(cache.forward)
            return cache.forward(batch)
        shape = (len(batch.input_ids), self._model_config.hidden_size)
        received = self._ranks.receive_hidden(shape, self._plan.compute, self._device.device)
        return self._loaded_model().hidden_states(batch, received)

    def _require_cache(self) -> _Cache:
        if self._cache is None:
            raise RuntimeError("launch before init_cache")
        return self._cache

    def _loaded_model(self) -> DecoderModel:
        if self._model is None:
            raise RuntimeError("the runner is closed")
        return self._model


def _parse_overrides(text: str) -> dict[str, object]:
    try:
        overrides = json.loads(text)
    except ValueError as error:
        raise ModelConfigError(f"json_model_override_args is not JSON: {error}") from None
    if not isinstance(overrides, dict):
        raise ModelConfigError("json_model_override_args must be a JSON object")
    return overrides


def _describe(config: RunnerConfig, model: ModelConfig, device: Device, explain: dict[str, str]) -> ModelInfo:
    return ModelInfo(
        model_type=model.model_type,
        architectures=[model.architecture],
        vocab_size=model.vocab_size,
        context_len=model.context_len,
        eos_token_ids=list(model.eos_token_ids),
        bos_token_id=model.bos_token_id,
        hidden_size=model.hidden_size,
        dtype=explain["dtype"].split(" ", 1)[0],
        device=device.device.type,
        attention_backend=explain["attention_backend"].split(" ", 1)[0],
        load_format=config.load_format,
        logit_processors=sorted(config.logit_processors),
        stages=config.ranks.pp_size,
        explain=device.explain | explain,
    )
