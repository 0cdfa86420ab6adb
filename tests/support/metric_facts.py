"""What dashboards and gateways expect of /metrics, name by name: kind, labels, bounds of buckets. From the interface fact sheet.

LEFT_OUT has the names of the sheet that are not served; docs/operations.md tells why of each.
"""

from __future__ import annotations

REQUEST = {"model_name", "engine_type"}
SCHEDULER = REQUEST | {"tp_rank", "pp_rank", "moe_ep_rank"}
VLLM = {"model_name", "engine"}

TTFT = [0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8, 10, 20, 40, 60, 80, 100, 200, 400]
E2E = [*TTFT, 600, 1200, 1800, 2400]
ITL = [
    *[0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.03, 0.035, 0.04, 0.06, 0.08],
    *[0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8],
]

GAUGES: dict[str, set[str]] = {
    **{
        f"sglang:{name}": SCHEDULER
        for name in (
            *("num_running_reqs", "num_queue_reqs", "token_usage", "num_used_tokens", "kv_available_tokens", "kv_evictable_tokens"),
            *(
                "kv_used_tokens",
                "max_total_num_tokens",
                "page_size",
                "num_pages",
                "context_len",
                "gen_throughput",
                "cache_hit_rate",
            ),
            *("utilization", "new_token_ratio", "num_paused_reqs", "num_retracted_reqs", "num_grammar_queue_reqs"),
            *("decode_sum_seq_lens", "is_cuda_graph", "full_token_usage", "weight_memory_usage_gb", "kv_cache_memory_usage_gb"),
        )
    },
    "sglang:startup_time_seconds": REQUEST | {"phase"},
    "sglang:http_requests_active": {"endpoint", "method"},
    "sglang:routing_keys_active": set(),
    "sglang:weight_load_duration_seconds": SCHEDULER | {"source"},
    "sglang:cache_config_info": SCHEDULER | {"page_size", "num_pages"},
    "vllm:engine_sleep_state": VLLM | {"sleep_state"},
    "vllm:num_requests_running": VLLM,
    "vllm:num_requests_waiting": VLLM,
    "vllm:num_requests_waiting_by_reason": VLLM | {"reason"},
    "vllm:kv_cache_usage_perc": VLLM,
    "vllm:cache_config_info": VLLM | {"block_size", "num_gpu_blocks"},
}
COUNTERS: dict[str, set[str]] = {
    "sglang:prompt_tokens": REQUEST | {"is_streaming"},
    "sglang:generation_tokens": REQUEST | {"is_streaming"},
    "sglang:cached_tokens": REQUEST | {"cache_source"},
    "sglang:num_requests": REQUEST | {"is_streaming"},
    "sglang:num_aborted_requests": REQUEST,
    "sglang:num_so_requests": REQUEST,
    "sglang:num_grammar": REQUEST,
    "sglang:num_grammar_cache_hit": REQUEST,
    "sglang:num_grammar_aborted": REQUEST,
    "sglang:num_grammar_timeout": REQUEST,
    "sglang:num_retracted_requests": SCHEDULER,
    "sglang:num_retracted_input_tokens": SCHEDULER,
    "sglang:num_retracted_output_tokens": SCHEDULER,
    "sglang:realtime_tokens": SCHEDULER | {"mode"},
    "sglang:evicted_tokens": SCHEDULER,
    "sglang:forward_execution_seconds": SCHEDULER | {"category"},
    "sglang:cuda_graph_passes": SCHEDULER | {"mode"},
    "sglang:scheduler_process_cpu_seconds": SCHEDULER,
    "sglang:scheduler_idle_seconds": SCHEDULER,
    "sglang:process_cpu_seconds": SCHEDULER | {"component"},
    "sglang:http_requests": {"endpoint", "method"},
    "sglang:http_responses": {"endpoint", "status_code", "method"},
    "vllm:prompt_tokens": VLLM,
    "vllm:generation_tokens": VLLM,
    "vllm:prompt_tokens_cached": VLLM,
    "vllm:prompt_tokens_by_source": VLLM | {"source"},
    "vllm:request_success": VLLM | {"finished_reason"},
    "vllm:num_preemptions": VLLM,
    "vllm:admission_rejections": VLLM | {"reason"},
    "vllm:prefix_cache_queries": VLLM,
    "vllm:prefix_cache_hits": VLLM,
}
# name -> (labels beside le, bounds; None: only that there are some)
HISTOGRAMS: dict[str, tuple[set[str], list[float] | None]] = {
    "sglang:time_to_first_token_seconds": (REQUEST | {"is_streaming"}, TTFT),
    "sglang:inter_token_latency_seconds": (REQUEST, ITL),
    "sglang:e2e_request_latency_seconds": (REQUEST | {"is_streaming"}, E2E),
    "sglang:request_time_per_output_token_seconds": (REQUEST, None),
    "sglang:queue_time_seconds": (REQUEST, None),
    "sglang:per_stage_req_latency_seconds": (REQUEST | {"stage"}, [round(0.001 * 1.62**step, 9) for step in range(30)]),
    "sglang:prompt_tokens_histogram": (REQUEST, None),
    "sglang:uncached_prompt_tokens_histogram": (REQUEST, None),
    "sglang:generation_tokens_histogram": (REQUEST, None),
    "sglang:grammar_compilation_time_seconds": (REQUEST, None),
    "sglang:eviction_duration_seconds": (SCHEDULER, None),
    "vllm:iteration_tokens_total": (VLLM, None),
    **{
        f"vllm:{name}": (VLLM, None)
        for name in (
            *("time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds"),
            *("request_time_per_output_token_seconds", "request_queue_time_seconds", "request_prefill_time_seconds"),
            *("request_decode_time_seconds", "request_inference_time_seconds", "request_prompt_tokens"),
            *("request_generation_tokens", "request_prefill_kv_computed_tokens", "request_params_n", "request_params_max_tokens"),
            "request_num_preemptions",
        )
    },
}
EDGES = {  # the smallest and the largest bound, where the sheet gives no more
    "sglang:queue_time_seconds": (0.0, 3000.0),
    "sglang:prompt_tokens_histogram": (100.0, 1.1e6),
    "sglang:generation_tokens_histogram": (100.0, 1.1e6),
}
LABEL_VALUES = {
    ("sglang:realtime_tokens", "mode"): {"prefill_compute", "prefill_cache", "decode"},
    ("sglang:num_running_reqs", "engine_type"): {"unified"},
    ("sglang:cached_tokens", "cache_source"): {"device"},
    ("sglang:num_requests", "is_streaming"): {"true", "false"},
    ("sglang:cuda_graph_passes", "mode"): {"prefill_cuda_graph", "prefill_none", "decode_cuda_graph", "decode_none"},
    ("sglang:weight_load_duration_seconds", "source"): {"tensor"},
    ("vllm:engine_sleep_state", "sleep_state"): {"awake", "weights_offloaded", "discard_all"},
    ("vllm:prompt_tokens_by_source", "source"): {"local_compute", "local_cache_hit"},
}

LEFT_OUT = {
    *("sglang:swa_token_usage", "sglang:mamba_usage"),
    *("sglang:spec_accept_length", "sglang:spec_accept_rate", "sglang:spec_verify_calls_total", "sglang:spec_num_steps"),
    *("sglang:lora_pool_slots_used", "sglang:lora_pool_slots_total", "sglang:lora_pool_utilization"),
    *("sglang:load_back_tokens_total", "sglang:load_back_duration_seconds", "sglang:hicache_host_used_tokens"),
    *("sglang:hicache_host_total_tokens", "sglang:grammar_tree_traversal_time_avg", "sglang:grammar_tree_traversal_time_max"),
    *("sglang:grammar_ebnf_size", "sglang:grammar_schema_count", "sglang:num_prefill_bootstrap_queue_reqs"),
    *("sglang:num_prefill_inflight_queue_reqs", "sglang:num_decode_prealloc_queue_reqs", "sglang:num_decode_transfer_queue_reqs"),
    *("sglang:num_bootstrap_failed_reqs_total", "sglang:num_transfer_failed_reqs_total", "sglang:num_prefill_retries_total"),
    *("sglang:kv_transfer_speed_gb_s", "sglang:kv_transfer_latency_ms", "sglang:kv_transfer_total_mb"),
    *("sglang:kv_transfer_bootstrap_ms", "sglang:kv_transfer_alloc_ms", "sglang:startup_cuda_graph_time_seconds"),
    *("sglang:graph_memory_usage_gb", "sglang:startup_available_gpu_memory_gb", "sglang:estimated_flops_per_gpu_total"),
    *("sglang:estimated_read_bytes_per_gpu_total", "sglang:estimated_write_bytes_per_gpu_total", "sglang:fwd_occupancy"),
    *("sglang:eplb_balancedness", "sglang:scheduler_stage_seconds_total"),
    *("vllm:lora_requests_info", "vllm:request_max_num_generation_tokens", "vllm:mm_cache_queries", "vllm:mm_cache_hits"),
    *("vllm:corrupted_requests", "http_requests_total"),
}  # and the families that begin with LEFT_OUT_FAMILIES
LEFT_OUT_FAMILIES = {
    *("vllm:kv_block_", "vllm:external_prefix_cache_", "vllm:spec_decode_", "vllm:nixl_", "vllm:estimated_"),
    *("sglang:dp_attention_", "sglang:prealloc_", "sglang:storage_prefetch_", "sglang:decode_deferred_kv_"),
}
