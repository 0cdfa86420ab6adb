"""Every option of the server and of Engine: one table that drives the command line, Engine's keywords and --explain.

Names and defaults follow SGLang's. An option stands here only if it does something.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from ..managers.errors import StartError
from ..managers.reasoning.marks import REASONING_MARKS
from ..managers.tool_parsers.registry import TOOL_PARSERS

if TYPE_CHECKING:
    from ..managers.config import ControllerConfig, DetokenizerConfig, Layout, SchedulerConfig, TokenizerManagerConfig
    from ..managers.ipc import IpcNames

LogLevel = Literal["debug", "info", "warning", "error", "critical"]
Positive = Annotated[int, Meta(ge=1)]
NotNegative = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(gt=0)]
Milliseconds = Annotated[float, Meta(ge=0)]
Share = Annotated[float, Meta(gt=0, le=1)]


class ServerArgs(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """What a user may set. None means that the value is derived at start; --explain tells to what and why.

    Build it with ``from_kwargs`` or ``from_namespace``: these validate and raise StartError.
    """

    # Model
    model_path: Annotated[
        str,
        Meta(
            description="Model to serve: an alias (smollm2, gemma3-270m), a folder in HF layout, a .gguf file or a hub id",
            extra={"aliases": ["--model"]},
        ),
    ] = "smollm2"
    tokenizer_path: Annotated[str | None, Meta(description="Folder or file of the tokenizer, if it is not the model's")] = None
    load_format: Annotated[
        Literal["auto", "safetensors", "gguf", "dummy", "oracle"],
        Meta(description="Format of the weights; dummy: random weights, oracle: no model, a token is a hash of its context"),
    ] = "auto"
    dtype: Annotated[
        Literal["auto", "half", "float16", "bfloat16", "float", "float32"],
        Meta(description="Type of weights and activations; auto: the model's own where the device is fast with it"),
    ] = "auto"
    quantization: Annotated[
        Literal["int8", "int4", "fp8", "gguf"] | None,
        Meta(
            description="Weights in fewer bits: int8 per channel, int4 in groups of 32, fp8 per channel (CUDA only), or a GGUF "
            "file's blocks as they are (CPU only); unset: weights of the dtype"
        ),
    ] = None
    weight_cache_bytes: Annotated[
        NotNegative,
        Meta(
            description="Bytes of packed weights, of all models together, that are kept in the user's cache folder: the next start "
            "maps them, and servers on one machine share them; 0: none"
        ),
    ] = 8 << 30
    device: Annotated[Literal["auto", "cpu", "cuda"], Meta(description="Where the model runs; auto: cuda if there is one")] = "auto"
    context_length: Annotated[Positive | None, Meta(description="Longest prompt plus output, if not the model's own limit")] = None
    revision: Annotated[str | None, Meta(description="Branch, tag or commit of a model from the hub")] = None
    download_dir: Annotated[str | None, Meta(description="Folder for downloaded models, if not the user's cache folder")] = None
    json_model_override_args: Annotated[str, Meta(description="JSON object laid over the model's config")] = "{}"

    # HTTP
    host: Annotated[str, Meta(description="Address to listen on")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="Port to listen on; 0: any free one")] = 30000
    api_key: Annotated[
        str | None, Meta(description="Key that requests must bring; unset: none is asked for", extra={"env": "BANYAN_API_KEY"})
    ] = None
    admin_api_key: Annotated[
        str | None,
        Meta(
            description="Key of the routes that control the server, which --api-key opens no longer then",
            extra={"env": "BANYAN_ADMIN_API_KEY"},
        ),
    ] = None
    served_model_name: Annotated[
        str | None, Meta(description="Name in /v1/models and in replies, if not the model path; further names behind commas")
    ] = None
    chat_template: Annotated[str | None, Meta(description="Jinja file used instead of the tokenizer's chat template")] = None
    weight_version: Annotated[str, Meta(description="Version of the weights, told in every reply and part of the cache key")] = (
        "default"
    )
    skip_server_warmup: Annotated[bool, Meta(description="Be ready without the warm-up request")] = False
    stream_interval: Annotated[
        Positive, Meta(description="A stream writes after tokens 1, s+1, 2s+1, ...; a request may override it")
    ] = 1
    incremental_streaming_output: Annotated[
        bool, Meta(description="/generate streams send only what is new instead of everything so far")
    ] = False
    allow_auto_truncate: Annotated[bool, Meta(description="Cut prompts that are too long instead of refusing them")] = False
    preferred_sampling_params: Annotated[str, Meta(description="JSON object of sampling parameters laid under every request's")] = (
        "{}"
    )
    logit_processors: Annotated[
        str, Meta(description='JSON object of the logit processors that requests may name: {"name": "module:Class"}')
    ] = "{}"
    max_top_logprobs: Annotated[NotNegative, Meta(description="Most alternatives per token that a request may ask for")] = 20
    enable_return_hidden_states: Annotated[
        bool, Meta(description="Requests may ask for the hidden states of their tokens: --return-hidden-states-mode full")
    ] = False
    return_hidden_states_mode: Annotated[
        Literal["last", "full"] | None,
        Meta(description="Requests may ask for the hidden state of the newest token (last), or for those of all tokens too (full)"),
    ] = None

    # Structured output and thinking
    grammar_backend: Annotated[
        Literal["xgrammar", "llguidance", "outlines", "none"],
        Meta(description="Library that is tried first for a grammar; none: requests with a grammar are refused"),
    ] = "xgrammar"
    grammar_compile_timeout: Annotated[
        Seconds, Meta(description="Seconds that compiling one grammar may take; one that takes longer is refused with 400")
    ] = 10.0
    grammar_compile_memory: Annotated[
        Positive, Meta(description="Bytes that compiling one grammar may take; one that takes more is refused with 400")
    ] = 1 << 30
    grammar_mask_timeout: Annotated[
        Seconds,
        Meta(
            description="Seconds of processor time to find what a grammar allows next; what takes longer ends its request with 400"
        ),
    ] = 0.5
    grammar_cache_bytes: Annotated[
        NotNegative, Meta(description="Bytes of compiled grammars that are kept, the least recently used ones go first")
    ] = 256 << 20
    disable_jump_forward: Annotated[
        bool,
        Meta(description="Sample token by token even where a grammar leaves one way only, instead of computing it in one step"),
    ] = False
    reasoning_parser: Annotated[
        str | None,
        Meta(description="How the model marks its thinking: grammars begin behind it, and it may have a budget"),
    ] = None
    tool_call_parser: Annotated[
        str | None,
        Meta(description="How the model writes calls of tools; unset: as its chat template does, if that is known"),
    ] = None

    # Memory and scheduling
    mem_fraction_static: Annotated[Share | None, Meta(description="Share of the device's memory for weights and KV cache")] = None
    max_total_tokens: Annotated[Positive | None, Meta(description="Tokens the KV cache holds, if not what memory allows")] = None
    max_running_requests: Annotated[Positive | None, Meta(description="Requests that run at the same time")] = None
    chunked_prefill_size: Annotated[
        int | None, Meta(description="Most prompt tokens of one prefill step; longer prompts are split; -1: never split")
    ] = None
    max_prefill_tokens: Annotated[Positive, Meta(description="Most prompt tokens of one prefill batch")] = 16384
    page_size: Annotated[
        int, Meta(ge=1, le=1024, description="Tokens per page of the KV cache; prefixes are shared in whole pages")
    ] = 1
    prefill_max_requests: Annotated[Positive | None, Meta(description="Most requests of one prefill batch")] = None
    shared_prefix_min: Annotated[
        Positive | None,
        Meta(
            description="Tokens beyond what is cached that a waiting request must share with a prompt that is about to be computed "
            "to wait a step for them; by default 4 on a CPU, 32 on a GPU"
        ),
    ] = None
    enable_mixed_chunk: Annotated[bool, Meta(description="Decode in the same step as prefill, so that streams never pause")] = False
    prefill_decode_interval: Annotated[
        NotNegative, Meta(description="Decode steps between two prefill steps while anything decodes")
    ] = 0
    target_itl_ms: Annotated[
        Milliseconds | None,
        Meta(
            description="Inter-token latency that streams should keep while prompts are computed beside them; implies mixed "
            "chunks. Unset: 250 or 4 decode steps, whichever is longer, on a CPU; 0: none, prompts go first"
        ),
    ] = None
    schedule_policy: Annotated[
        Literal["fcfs", "lpm", "dfs-weight", "lof", "random", "routing-key", "hrrn", "shortest-prefill-first", "priority"],
        Meta(
            description="Order of the waiting queue: by arrival, longest cached prefix first, depth first through the cached tree, "
            "longest output first, random by seed, the routing keys that run first, highest response ratio next, fewest tokens to "
            "compute first, or by priority"
        ),
    ] = "fcfs"
    max_wait_steps: Annotated[
        Positive, Meta(description="Scheduling passes after which a waiting request goes first, whatever policy and priority say")
    ] = 4096
    enable_priority_scheduling: Annotated[
        bool, Meta(description="Serve higher priorities first, and the policy's order among equals")
    ] = False
    schedule_low_priority_values_first: Annotated[bool, Meta(description="A lower number is a higher priority")] = False
    default_priority_value: Annotated[
        int | None, Meta(description="Priority of requests that bring none; unset: below all others")
    ] = None
    priority_scheduling_preemption_threshold: Annotated[
        NotNegative, Meta(description="A waiting request displaces running ones whose priority is lower by more than this")
    ] = 10
    disable_priority_preemption: Annotated[bool, Meta(description="Priorities order the queue but displace nothing that runs")] = (
        False
    )
    abort_on_priority_when_disabled: Annotated[
        bool, Meta(description="Refuse requests that bring a priority if there is no priority scheduling, instead of ignoring it")
    ] = False
    max_queued_requests: Annotated[
        NotNegative | None,
        Meta(description="Requests that may wait besides those that run; more are refused with 503 at once; unset: no limit"),
    ] = None
    request_queue_timeout: Annotated[
        Seconds | None,
        Meta(
            description="Seconds after which a request that never ran is ended with 503",
            extra={"env": "SGLANG_REQ_WAITING_TIMEOUT"},
        ),
    ] = None
    request_running_timeout: Annotated[
        Seconds | None,
        Meta(
            description="Seconds after its first start at which a request is ended with 503",
            extra={"env": "SGLANG_REQ_RUNNING_TIMEOUT"},
        ),
    ] = None
    schedule_conservativeness: Annotated[
        float, Meta(gt=0, description="Above 1 admits fewer requests and retracts less, below 1 the reverse")
    ] = 1.0
    disable_radix_cache: Annotated[bool, Meta(description="Forget the KV of a request when it ends")] = False
    radix_eviction_policy: Annotated[
        Literal["lru", "mru", "fifo", "lfu", "slru", "priority"],
        Meta(description="Which cached prefix goes first when memory is short"),
    ] = "lru"
    max_sessions: Annotated[Positive, Meta(description="Sessions (/open_session) that may be open at the same time")] = 1024
    session_hold_fraction: Annotated[
        float, Meta(ge=0, le=1, description="Share of the KV cache that streaming sessions may keep between their turns")
    ] = 0.5
    pin_budget_fraction: Annotated[float, Meta(ge=0, le=1, description="Share of the KV cache that cache hints may pin")] = 0.25
    disable_overlap_schedule: Annotated[
        bool | None,
        Meta(description="Do not schedule the next step while the device works; unset: it is scheduled then, on every device"),
    ] = None

    # Kernels
    attention_backend: Annotated[str | None, Meta(description="Attention implementation, if not the best for the device")] = None
    kv_cache_dtype: Annotated[
        Literal["auto", "float32", "float16", "bfloat16", "int8", "fp8_e4m3", "fp8_e5m2"],
        Meta(
            description="Type of the KV cache; auto: that of the weights; int8: with a scale for each token and head, CPU only; "
            "fp8_e4m3, fp8_e5m2: without scales, GPU only"
        ),
    ] = "auto"
    enable_deterministic_inference: Annotated[
        bool,
        Meta(
            description="Greedy and seeded outputs are the same to the bit whatever the batch, the chunks, the cache and "
            "retractions; slower; on device cpu"
        ),
    ] = False
    prefill_attention_backend: Annotated[
        str | None, Meta(description="Attention implementation of steps with prompts, if not that of all (CUDA only)")
    ] = None
    decode_attention_backend: Annotated[
        str | None, Meta(description="Attention implementation of decode steps, if not that of all (CUDA only)")
    ] = None
    sampling_backend: Annotated[
        Literal["triton", "pytorch"] | None, Meta(description="What samples on a GPU; unset: triton where it is installed")
    ] = None
    disable_cuda_graph: Annotated[bool, Meta(description="Launch every kernel of a decode step by itself")] = False
    cuda_graph_max_bs: Annotated[
        Positive | None, Meta(description="Most requests of a decode step that is recorded as a CUDA graph; unset: by GPU memory")
    ] = None
    cuda_graph_bs: Annotated[
        str | None, Meta(description="Sizes of decode steps that are recorded as CUDA graphs, with commas between")
    ] = None
    enable_torch_compile: Annotated[
        bool, Meta(description="Compile what lies between two layers' attention with torch.compile; the first steps take minutes")
    ] = False
    torch_compile_max_bs: Annotated[
        Positive | None, Meta(description="Most tokens of a step that runs compiled (with --enable-torch-compile); unset: 32")
    ] = None
    disable_prefill_cuda_graph: Annotated[
        bool,
        Meta(
            description="Launch every kernel of a step with prompts by itself",
            extra={"aliases": ["--disable-piecewise-cuda-graph"]},
        ),
    ] = False
    prefill_cuda_graph_max_tokens: Annotated[
        Positive | None,
        Meta(
            description="Most tokens of a step with prompts that is recorded as CUDA graphs, one for what lies between two layers' "
            "attention; unset: 2048, or the size of chunks if that is less",
            extra={"aliases": ["--piecewise-cuda-graph-max-tokens"]},
        ),
    ] = None
    random_seed: Annotated[int | None, Meta(description="Seed of requests that bring none; unset: a fresh one at each start")] = (
        None
    )

    # Many ranks
    tp_size: Annotated[
        Positive,
        Meta(
            description="Ranks that compute each layer together, each with its part of the heads, the MLP and the vocabulary",
            extra={"aliases": ["--tensor-parallel-size", "--tp"]},
        ),
    ] = 1
    pp_size: Annotated[
        Positive,
        Meta(
            description="Stages that the layers are divided among, each with --tp-size ranks",
            extra={"aliases": ["--pipeline-parallel-size", "--pp"]},
        ),
    ] = 1
    dp_size: Annotated[
        Positive,
        Meta(
            description="Replicas of the model, each with --tp-size x --pp-size ranks and a cache of its own",
            extra={"aliases": ["--data-parallel-size", "--dp"]},
        ),
    ] = 1
    load_balance_method: Annotated[
        Literal["round_robin", "total_requests", "total_tokens", "cache_aware", "follow_bootstrap_room"],
        Meta(
            description="Which replica gets a request: the next, that with the fewest requests or tokens to do, that with the "
            "least to do, the part of the prompt that it must compute included, or that which bootstrap_room modulo --dp-size names"
        ),
    ] = "round_robin"
    nnodes: Annotated[Positive, Meta(description="Machines that the ranks are divided among; serve is started on each")] = 1
    node_rank: Annotated[NotNegative, Meta(description="Number of this machine; the one with 0 takes the requests")] = 0
    dist_init_addr: Annotated[
        str | None,
        Meta(
            description="host:port at which the ranks of several machines meet, on the machine with rank 0; uses two more ports",
            extra={"aliases": ["--nccl-init-addr"]},
        ),
    ] = None
    dist_token: Annotated[
        str | None,
        Meta(
            description="Secret that the schedulers of several machines prove to each other, the same on all",
            extra={"env": "BANYAN_DIST_TOKEN"},
        ),
    ] = None
    dist_timeout: Annotated[
        Seconds, Meta(description="Seconds without a sign of life after which a rank counts as lost and its group ends")
    ] = 15.0
    use_ray: Annotated[
        bool, Meta(description="Place the replicas in the Ray cluster that this machine belongs to, or that of RAY_ADDRESS")
    ] = False
    ray_cpus_per_rank: Annotated[Positive, Meta(description="CPUs of a Ray node, and threads on a CPU, that each rank takes")] = 1
    check_decisions: Annotated[
        bool, Meta(description="Compare every decision of every rank with rank 0's, and end at the first difference")
    ] = False

    # Logs and checks
    log_level: Annotated[LogLevel, Meta(description="Level of the log of all processes")] = "info"
    log_level_http: Annotated[LogLevel | None, Meta(description="Level of the log of HTTP requests; unset: warning")] = None
    record_decisions: Annotated[
        str | None,
        Meta(description="Write every decision of the scheduler to this file, for `banyan replay`; no text, no true token ids"),
    ] = None
    record_prompts: Annotated[bool, Meta(description="Records and crash dumps hold prompts, outputs and names as they are")] = False
    crash_dump_folder: Annotated[
        str | None, Meta(description="Folder for the last 200 turns of a scheduler that dies; unset: none are written")
    ] = None
    log_requests: Annotated[bool, Meta(description="Log one line per request when it ends")] = False
    log_requests_level: Annotated[
        int,
        Meta(ge=0, le=3, description="0: id, counts and times; 1: sampling parameters too; 2: texts, cut short; 3: whole texts"),
    ] = 1
    log_requests_format: Annotated[Literal["text", "json"], Meta(description="Form of these lines")] = "text"
    enable_metrics: Annotated[bool, Meta(description="Serve metrics for Prometheus at /metrics")] = False
    enable_trace: Annotated[bool, Meta(description="Send OpenTelemetry spans of requests; needs the extra otel")] = False
    otlp_traces_endpoint: Annotated[str, Meta(description="Where --enable-trace sends spans, over OTLP with HTTP")] = (
        "http://localhost:4318/v1/traces"
    )
    decode_log_interval: Annotated[Positive, Meta(description="Decode steps between two log lines")] = 40
    restart_budget: Annotated[
        NotNegative,
        Meta(description="Times within an hour that the engine's processes are started again when one dies; 0: a death is the end"),
    ] = 3
    watchdog_timeout: Annotated[
        Seconds,
        Meta(description="Seconds of silence, or of one forward pass, after which the scheduler is killed; the stacks are logged"),
    ] = 300.0
    strict: Annotated[bool, Meta(description="A breach of the KV slot invariant ends the server instead of being repaired")] = False

    @classmethod
    def from_kwargs(cls, values: Mapping[str, Any]) -> ServerArgs:
        """Validate keyword values. Raises TypeError for an unknown name, StartError for a bad value."""
        for name in values:
            if name not in cls.__struct_fields__:
                close = difflib.get_close_matches(name, cls.__struct_fields__, n=1)
                hint = f"; did you mean {close[0]!r}?" if close else ""
                raise TypeError(f"unknown option {name!r}{hint}")
        given = _from_environment()
        given |= {name: os.fspath(value) if isinstance(value, os.PathLike) else value for name, value in values.items()}
        try:
            args = msgspec.convert(given, cls, strict=True)
        except msgspec.ValidationError as error:
            raise StartError(_readable(str(error), given)) from None
        args._check()
        return args

    @classmethod
    def from_namespace(cls, namespace: argparse.Namespace) -> ServerArgs:
        """The options of a parsed command line (see ``add_arguments``)."""
        return cls.from_kwargs({name: value for name, value in vars(namespace).items() if name in cls.__struct_fields__})

    def _check(self) -> None:
        for name in ("model_path", "api_key", "admin_api_key"):
            if getattr(self, name) == "":
                raise StartError(f"{flag(name)} must not be empty.")
        for name in ("json_model_override_args", "preferred_sampling_params"):
            _json_object(flag(name), getattr(self, name))
        _check_processors(self.logit_processors)
        size = self.chunked_prefill_size
        if size is not None and size != -1 and size < self.page_size:
            raise StartError(f"--chunked-prefill-size must be -1 (off) or at least the page size {self.page_size}, got {size}.")
        for name in ("max_total_tokens", "max_prefill_tokens"):
            value = getattr(self, name)
            if value is not None and value < self.page_size:
                raise StartError(f"{flag(name)} must be at least the page size {self.page_size}, got {value}.")
        self._check_places()

    def _check_places(self) -> None:
        for name, known in (("reasoning_parser", REASONING_MARKS), ("tool_call_parser", TOOL_PARSERS)):
            value = getattr(self, name)
            if value is not None and value not in known:
                raise StartError(f"{flag(name)}: unknown parser {value!r}; known are {', '.join(sorted(known))}.")
        if self.chat_template is not None and not os.path.isfile(self.chat_template):
            raise StartError(f"--chat-template: no file {self.chat_template!r}.")
        if self.tokenizer_path is not None and not os.path.exists(self.tokenizer_path):
            raise StartError(f"--tokenizer-path: no file or folder {self.tokenizer_path!r}.")

        if self.nnodes == 1 and self.node_rank:
            raise StartError(f"--node-rank {self.node_rank} needs --nnodes above {self.node_rank}.")
        if self.nnodes > 1:
            if self.dp_size > 1:
                raise StartError("--dp-size above 1 needs --nnodes 1: replicas of several machines are servers of their own.")
            self.layout().check_sizes()
            if self.use_ray:
                raise StartError("--use-ray finds the machines itself: it does not go with --nnodes.")

    def layout(self) -> Layout:
        """How the ranks are laid out."""
        from ..managers.config import Layout

        return Layout(
            tp_size=self.tp_size,
            pp_size=self.pp_size,
            nnodes=self.nnodes,
            node_rank=self.node_rank,
            address=self.dist_init_addr or "",
            token=(self.dist_token or "") if self.nnodes > 1 else "",
            timeout=self.dist_timeout,
            check=self.check_decisions,
        )

    @property
    def restarts(self) -> int:
        """Times that the engine may start its processes again: of several machines none can start those of the others."""
        return self.restart_budget if self.nnodes == 1 else 0

    @property
    def served_name(self) -> str:
        """The model's name towards clients."""
        return self.served_names[0]

    @property
    def served_names(self) -> list[str]:
        """All names, the one in replies first."""
        names = [name.strip() for name in (self.served_model_name or "").split(",")]
        return [name for name in dict.fromkeys(names) if name] or [self.model_path]

    def scheduler_config(self, ipc: IpcNames, local_model_path: str) -> SchedulerConfig:
        """Config of the scheduler process; local_model_path is the folder or file that model_path was resolved to."""
        from ..managers.config import RunnerConfig, SchedulerConfig

        runner = RunnerConfig(
            model_path=local_model_path,
            load_format=self.load_format,
            dtype={"half": "float16", "float": "float32"}.get(self.dtype, self.dtype),
            device=self.device,
            quantization=self.quantization,
            weight_cache_bytes=self.weight_cache_bytes,
            context_length=self.context_length,
            attention_backend=self.attention_backend,
            kv_cache_dtype=self.kv_cache_dtype,
            prefill_attention_backend=self.prefill_attention_backend,
            decode_attention_backend=self.decode_attention_backend,
            sampling_backend=self.sampling_backend,
            disable_cuda_graph=self.disable_cuda_graph,
            cuda_graph_max_bs=self.cuda_graph_max_bs,
            cuda_graph_bs=self.cuda_graph_bs,
            enable_torch_compile=self.enable_torch_compile,
            torch_compile_max_bs=self.torch_compile_max_bs,
            disable_prefill_cuda_graph=self.disable_prefill_cuda_graph,
            prefill_cuda_graph_max_tokens=self.prefill_cuda_graph_max_tokens,
            mem_fraction_static=self.mem_fraction_static,
            max_total_tokens=self.max_total_tokens,
            max_running_requests=self.max_running_requests,
            chunked_prefill_size=self.chunked_prefill_size,
            page_size=self.page_size,
            random_seed=self.random_seed or 0,
            json_model_override_args=self.json_model_override_args,
            logit_processors=json.loads(self.logit_processors),
            enable_deterministic_inference=self.enable_deterministic_inference,
            overlap=not self.disable_overlap_schedule,
        )
        return SchedulerConfig(
            ipc=ipc,
            runner=runner,
            tokenizer_path=self.tokenizer_path or local_model_path,
            max_running_requests=self.max_running_requests,
            chunked_prefill_size=self.chunked_prefill_size,
            max_prefill_tokens=self.max_prefill_tokens,
            prefill_max_requests=self.prefill_max_requests,
            enable_mixed_chunk=self.enable_mixed_chunk,
            prefill_decode_interval=self.prefill_decode_interval,
            shared_prefix_min=self.shared_prefix_min,
            target_itl_ms=self.target_itl_ms,
            enable_priority_scheduling=self.enable_priority_scheduling,
            schedule_low_priority_values_first=self.schedule_low_priority_values_first,
            default_priority_value=self.default_priority_value,
            priority_scheduling_preemption_threshold=self.priority_scheduling_preemption_threshold,
            disable_priority_preemption=self.disable_priority_preemption,
            max_wait_steps=self.max_wait_steps,
            max_queued_requests=self.max_queued_requests,
            request_queue_timeout=self.request_queue_timeout,
            request_running_timeout=self.request_running_timeout,
            schedule_policy=self.schedule_policy,
            schedule_conservativeness=self.schedule_conservativeness,
            disable_radix_cache=self.disable_radix_cache,
            session_hold_fraction=self.session_hold_fraction,
            radix_eviction_policy=self.radix_eviction_policy,
            pin_budget_fraction=self.pin_budget_fraction,
            grammar_mask_timeout=self.grammar_mask_timeout,
            disable_jump_forward=self.disable_jump_forward,
            disable_overlap_schedule=self.disable_overlap_schedule,
            weight_version=self.weight_version,
            decode_log_interval=self.decode_log_interval,
            strict=self.strict,
            record_decisions=self.record_decisions,
            record_prompts=self.record_prompts,
            crash_dump_folder=self.crash_dump_folder,
            log_level=self.log_level,
        )

    def controller_config(self, ipc: IpcNames, local_model_path: str) -> ControllerConfig:
        """Config of the controller of replicas."""
        from ..managers.config import ControllerConfig, RayOptions

        return ControllerConfig(
            ipc=ipc,
            scheduler=self.scheduler_config(ipc, local_model_path),
            layout=self.layout(),
            dp_size=self.dp_size,
            load_balance_method=self.load_balance_method,
            restart_budget=self.restart_budget,
            ray=RayOptions(cpus_per_rank=self.ray_cpus_per_rank) if self.use_ray else None,
            log_level=self.log_level,
        )

    def detokenizer_config(self, ipc: IpcNames, local_model_path: str) -> DetokenizerConfig:
        """Config of the detokenizer process."""
        from ..managers.config import DetokenizerConfig

        return DetokenizerConfig(ipc=ipc, tokenizer_path=self.tokenizer_path or local_model_path, log_level=self.log_level)

    def tokenizer_manager_config(self, ipc: IpcNames, local_model_path: str) -> TokenizerManagerConfig:
        """Config of the tokenizer manager. --stream-interval travels as a preferred sampling parameter."""
        from ..managers.config import TokenizerManagerConfig

        preferred = json.loads(self.preferred_sampling_params)
        if self.stream_interval != 1:
            preferred.setdefault("stream_interval", self.stream_interval)
        return TokenizerManagerConfig(
            ipc=ipc,
            model_path=self.model_path,
            served_model_name=self.served_name,
            served_aliases=self.served_names[1:],
            tokenizer_path=self.tokenizer_path or local_model_path,
            chat_template=self.chat_template,
            weight_version=self.weight_version,
            incremental_streaming_output=self.incremental_streaming_output,
            allow_auto_truncate=self.allow_auto_truncate,
            abort_on_priority_when_disabled=self.abort_on_priority_when_disabled,
            preferred_sampling_params=json.dumps(preferred),
            grammar_backend=self.grammar_backend,
            grammar_compile_timeout=self.grammar_compile_timeout,
            grammar_compile_memory=self.grammar_compile_memory,
            grammar_cache_bytes=self.grammar_cache_bytes,
            reasoning_parser=self.reasoning_parser,
            tool_call_parser=self.tool_call_parser,
            max_top_logprobs=self.max_top_logprobs,
            return_hidden_states_mode=self.return_hidden_states_mode or ("full" if self.enable_return_hidden_states else None),
            log_requests=self.log_requests,
            log_requests_level=self.log_requests_level,
            log_requests_format=self.log_requests_format,
            max_sessions=self.max_sessions,
            streaming_sessions=not self.disable_radix_cache,
            random_seed=self.random_seed,
        )


class Option(NamedTuple):
    """One row of the table that ServerArgs' annotations are."""

    name: str
    kind: type  # str, int, float or bool
    default: Any
    optional: bool  # None is allowed
    choices: tuple[str, ...] | None
    aliases: tuple[str, ...]
    help: str
    env: str | None  # environment variable that is its default; -1 there means unset


def options() -> list[Option]:
    """The table, in the order of the fields."""
    hints = get_type_hints(ServerArgs, include_extras=True)
    defaults = dict(
        zip(ServerArgs.__struct_fields__[-len(ServerArgs.__struct_defaults__) :], ServerArgs.__struct_defaults__, strict=True)
    )
    return [_option(name, hints[name], defaults[name]) for name in ServerArgs.__struct_fields__]


def _option(name: str, hint: Any, default: Any) -> Option:
    meta = hint.__metadata__[-1]
    kind = _bare(hint)
    optional = type(None) in get_args(kind)
    if optional:
        (kind,) = [_bare(member) for member in get_args(kind) if member is not type(None)]
    choices = get_args(kind) if get_origin(kind) is Literal else None
    aliases = tuple((meta.extra or {}).get("aliases", ()))
    env = (meta.extra or {}).get("env")
    text = f"{meta.description}; also {env}" if env else meta.description
    return Option(name, str if choices else kind, default, optional, choices, aliases, text, env)


def _from_environment() -> dict[str, Any]:
    values = {}
    for option in options():
        text = os.environ.get(option.env) if option.env else None
        if text is None:
            continue
        try:
            value = option.kind(text)
        except ValueError:
            raise StartError(f"{option.env}: {option.kind.__name__} expected, got {text!r}.") from None
        if value != -1:
            values[option.name] = value
    return values


def _bare(hint: Any) -> Any:
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


def flag(name: str) -> str:
    """The option's spelling on the command line."""
    return "--" + name.replace("_", "-")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add every option to a parser. Options that are not given leave no trace in the namespace."""
    for option in options():
        default = "derived at start" if option.default is None else option.default
        text = f"{option.help} (default: {default})".replace("%", "%%")
        names = [flag(option.name), *option.aliases]
        common: dict[str, Any] = {"dest": option.name, "default": argparse.SUPPRESS, "help": text}
        if option.kind is bool:
            action = argparse.BooleanOptionalAction if option.optional else "store_true"
            parser.add_argument(*names, action=action, **common)
        else:
            metavar = None if option.choices else option.kind.__name__.upper()
            parser.add_argument(*names, type=option.kind, choices=option.choices, metavar=metavar, **common)


def _readable(message: str, given: Mapping[str, Any]) -> str:
    """msgspec's error as one line that names the option: ``--port: expected `int` <= 65535, got 70000.``"""
    found = re.fullmatch(r"(.*) - at `\$\.(\w+).*`", message)
    if found is None:
        return message
    reason, name = found.groups()
    if reason.startswith("Invalid enum value"):
        (choices,) = [option.choices for option in options() if option.name == name]
        reason = f"one of {', '.join(choices or ())} is expected"
    return f"{flag(name)}: {reason[0].lower()}{reason[1:]}, got {given.get(name)!r}."


def _check_processors(text: str) -> None:
    _json_object("--logit-processors", text)
    for name, place in json.loads(text).items():
        if not name or not isinstance(place, str) or not re.fullmatch(r"[\w.]+:\w+", place):
            raise StartError(f'--logit-processors: a name must lead to "module:Class", got {name!r}: {place!r}.')


def _json_object(name: str, text: str) -> None:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise StartError(f"{name} must be a JSON object: {error}.") from None
    if not isinstance(value, dict):
        raise StartError(f"{name} must be a JSON object, got {text!r}.")
