"""What /metrics shows, by name: the tables of srt/metrics.py. Names are SGLang's unless a table says otherwise."""

from __future__ import annotations

from ..managers.stats import EVICTION_BOUNDS, STEP_BOUNDS

# gauges of the scheduler's report, with what they mean; the name is sglang:<name>
GAUGES = {
    "num_running_reqs": "Requests that run",
    "num_queue_reqs": "Requests that wait",
    "num_used_tokens": "KV slots that requests, sessions and pins hold",
    "token_usage": "Share of the KV slots that are held",
    "full_token_usage": "The same: one pool holds the KV of all layers",
    "max_total_num_tokens": "All KV slots",
    "kv_available_tokens": "Free KV slots",
    "kv_evictable_tokens": "KV slots of cached prefixes that nothing holds",
    "kv_used_tokens": "KV slots that are not free",
    "page_size": "KV slots per page",
    "num_pages": "Pages of the KV cache",
    "gen_throughput": "Output tokens per second over the last second",
    "cache_hit_rate": "Share of prompt tokens found in the cache over the last second with prompts",
    "utilization": "Running requests as a share of those that may run",
    "new_token_ratio": "Share of their output limit that requests are admitted with",
    "num_paused_reqs": "Requests that a pause holds",
    "num_retracted_reqs": "Requests that wait because they were retracted",
    "decode_sum_seq_lens": "Tokens that the running requests attend to",
    "is_cuda_graph": "1 if the newest decode step was replayed from a recording; of several replicas the share",
}
OWN_GAUGES = {
    "num_pending_tokens": "Prompt tokens that wait to be computed",
    "num_cached_tokens": "Tokens in the prefix cache",
    "queue_stuck_seconds": "Seconds since anything was admitted while requests wait",
}
# counters of the scheduler's report: the exposed name, the report's name
TOTALS = {
    "sglang:num_retracted_requests": ("num_retracted_requests", "Requests that lost their KV for want of memory"),
    "sglang:num_retracted_input_tokens": ("num_retracted_input_tokens", "Their prompt tokens"),
    "sglang:num_retracted_output_tokens": ("num_retracted_output_tokens", "Their output tokens so far"),
    "sglang:evicted_tokens": ("evicted_tokens", "Tokens that left the prefix cache for want of memory"),
    "sglang:scheduler_process_cpu_seconds": ("process_cpu_seconds", "CPU time of the schedulers"),
    "sglang:scheduler_idle_seconds": ("idle_seconds", "Time that the schedulers slept with nothing to compute"),
    "vllm:num_preemptions": ("num_retracted_requests", "Requests that lost their KV for want of memory"),
    "vllm:prefix_cache_queries": ("cache_query_tokens", "Prompt tokens that were looked up in the prefix cache"),
    "vllm:prefix_cache_hits": ("cache_hit_tokens", "Prompt tokens that were found there"),
}
SAME_GAUGES = {
    "vllm:num_requests_running": ("num_running_reqs", "Requests that run"),
    "vllm:num_requests_waiting": ("num_queue_reqs", "Requests that wait"),
    "vllm:kv_cache_usage_perc": ("token_usage", "Share of the KV slots that are held"),
}
# counters of requests: name, report under vLLM's name too, labels, help
COUNTERS = {
    "prompt_tokens": (True, ("is_streaming",), "Prompt tokens of finished requests"),
    "generation_tokens": (True, ("is_streaming",), "Output tokens of finished requests"),
    "cached_tokens": (False, ("cache_source",), "Prompt tokens of finished requests that were found in a cache"),
    "num_requests": (False, ("is_streaming",), "Requests that ended"),
    "num_aborted_requests": (False, (), "Requests that were aborted"),
    "num_so_requests": (False, (), "Requests with structured output"),
    "num_grammar": (False, (), "Grammars that requests asked for"),
    "num_grammar_cache_hit": (False, (), "Those of them that were compiled already"),
    "num_grammar_aborted": (False, (), "Those of them that were refused"),
    "num_grammar_timeout": (False, (), "Those of them that took too long to compile"),
}
# histograms of requests: labels, vLLM's name or "", help
HISTOGRAMS = {
    "time_to_first_token_seconds": (("is_streaming",), "time_to_first_token_seconds", "From arrival to the first token"),
    "inter_token_latency_seconds": ((), "inter_token_latency_seconds", "Between two tokens"),
    "e2e_request_latency_seconds": (("is_streaming",), "e2e_request_latency_seconds", "From arrival to the end"),
    "queue_time_seconds": ((), "request_queue_time_seconds", "From the scheduler's queue to the first step"),
    "per_stage_req_latency_seconds": (("stage",), "", "In each phase of a request"),
    "prompt_tokens_histogram": ((), "request_prompt_tokens", "Tokens of prompts"),
    "uncached_prompt_tokens_histogram": ((), "request_prefill_kv_computed_tokens", "Tokens of prompts that were computed"),
    "generation_tokens_histogram": ((), "request_generation_tokens", "Tokens of outputs"),
    "request_time_per_output_token_seconds": ((), "request_time_per_output_token_seconds", "Mean time between tokens of a request"),
    "grammar_compilation_time_seconds": ((), "", "Compiling one grammar, with the wait for it"),
}
# histograms that are vLLM's alone
VLLM_HISTOGRAMS = {
    "request_inference_time_seconds": "From the first step to the end",
    "request_params_n": "Outputs that requests ask for",
    "request_params_max_tokens": "Output tokens that requests ask for at most",
    "request_num_preemptions": "Times that a request lost its KV for want of memory",
}
# histograms of the scheduler's report: the exposed name, the report's name, bounds, help
SCHEDULER_HISTOGRAMS = {
    "sglang:eviction_duration_seconds": ("eviction_seconds", EVICTION_BOUNDS, "Making room in the prefix cache"),
    "vllm:iteration_tokens_total": ("step_tokens", STEP_BOUNDS, "Tokens of a forward step"),
}
GRAPH_MODES = ("prefill_cuda_graph", "prefill_none", "decode_cuda_graph", "decode_none")
WEIGHT_SOURCES = ("disk", "tensor", "distributed")
# of each replica that is up, with the label dp_rank; the name is banyan:replica_<name>
REPLICA_GAUGES = {
    "num_running": "Requests that run on a replica",
    "num_waiting": "Requests that wait on a replica",
    "num_used_tokens": "KV slots that requests hold on a replica",
    "gen_throughput": "Output tokens per second of a replica",
    "cache_hit_rate": "Share of all prompt tokens of a replica that were found in its cache",
}
STAGES = {"prefill": "request_prefill_time_seconds", "decode": "request_decode_time_seconds"}
