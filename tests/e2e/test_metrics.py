"""/metrics, the log of requests and the probes of a server over the token oracle."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import metric_facts
import numpy as np
import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from safetensors.numpy import save
from server import Server, oracle_folder, running, until

import banyan
from banyan.managers.log_limit import BURST
from banyan.srt import cli

TABLE = {
    *("sglang:num_running_reqs", "sglang:num_queue_reqs", "sglang:token_usage", "sglang:gen_throughput", "sglang:cache_hit_rate"),
    *("sglang:prompt_tokens_total", "sglang:generation_tokens_total", "sglang:cached_tokens_total", "sglang:num_requests_total"),
    *("sglang:time_to_first_token_seconds_bucket", "sglang:inter_token_latency_seconds_sum", "sglang:queue_time_seconds_count"),
    *("sglang:e2e_request_latency_seconds_bucket", "sglang:realtime_tokens_total", "sglang:evicted_tokens_total"),
    *("sglang:num_retracted_requests_total", "sglang:num_aborted_requests_total", "sglang:max_total_num_tokens"),
    *("sglang:per_stage_req_latency_seconds_bucket", "sglang:http_requests_total", "sglang:http_responses_total"),
    *("sglang:cache_config_info", "sglang:startup_time_seconds", "banyan:queue_stuck_seconds", "banyan:restarts_total"),
    *("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc", "vllm:cache_config_info"),
    *("vllm:prompt_tokens_total", "vllm:request_success_total", "vllm:time_to_first_token_seconds_bucket"),
    *("vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total", "vllm:num_preemptions_total"),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("metrics")
    options = ("--enable-metrics", "--log-requests", "--log-requests-format", "json", "--log-level-http", "info")
    with running(oracle_folder(folder / "model"), folder / "run", *options) as server:
        yield server


def samples(server: Server) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """name -> labels -> value."""
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(server.http.get("/metrics").text):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    return found


def total(server: Server, name: str) -> float:
    return sum(samples(server).get(name, {}).values())


def finished(server: Server) -> list[dict[str, object]]:
    lines = [line.partition("{")[2] for line in server.text().splitlines() if '"request.finished"' in line]
    return [json.loads("{" + line) for line in lines]


def test_what_dashboards_ask_for_is_there_and_counts(server: Server) -> None:
    before = samples(server)
    for _ in range(3):
        server.generate(text="one two three", sampling_params={"max_new_tokens": 5, "ignore_eos": True})
    server.stream(text="four five", sampling_params={"max_new_tokens": 5, "ignore_eos": True})
    after = samples(server)
    assert set(after) >= TABLE
    for name, more in (
        ("sglang:num_requests_total", 4),
        ("sglang:generation_tokens_total", 20),
        ("vllm:generation_tokens_total", 20),
    ):
        assert sum(after[name].values()) - sum(before.get(name, {}).values()) == more, name
    (labels, *_) = after["sglang:time_to_first_token_seconds_count"]
    assert {name for name, _ in labels} == {"model_name", "engine_type", "is_streaming"}
    until(lambda: total(server, "sglang:cached_tokens_total") > 0)
    until(lambda: total(server, "vllm:prefix_cache_hits_total") > 0)


def families(server: Server) -> dict[str, Metric]:
    return {family.name: family for family in text_string_to_metric_families(server.http.get("/metrics").text)}


def test_names_kinds_labels_and_buckets_are_those_that_others_know(server: Server) -> None:
    for _ in range(2):
        server.generate(text="one two three", sampling_params={"max_new_tokens": 5, "ignore_eos": True})
    server.stream(text="four five", sampling_params={"max_new_tokens": 5, "ignore_eos": True})
    tensors = {"content-type": "application/octet-stream"}
    assert server.http.post("/update_weights_from_tensor", content=save({"x": np.zeros(3)}), headers=tensors).status_code == 200
    until(lambda: "sglang:weight_load_duration_seconds" in samples(server))
    until(lambda: "sglang:num_running_reqs" in families(server) and total(server, "sglang:cached_tokens_total") > 0)
    found = families(server)
    for kind, table in (("gauge", metric_facts.GAUGES), ("counter", metric_facts.COUNTERS)):
        for name, labels in table.items():
            assert found[name].type == kind, name
            assert {frozenset(sample.labels) for sample in found[name].samples} == {frozenset(labels)}, name
    for name, (labels, bounds) in metric_facts.HISTOGRAMS.items():
        family = found[name]
        assert family.type == "histogram", name
        buckets = [sample for sample in family.samples if sample.name.endswith("_bucket")]
        assert {frozenset(sample.labels) for sample in buckets} == {frozenset({*labels, "le"})}, name
        told = sorted({float(sample.labels["le"]) for sample in buckets})[:-1]
        assert bounds is None or told == pytest.approx(bounds, rel=1e-5), name
        if name in metric_facts.EDGES:
            assert (told[0], told[-1]) == metric_facts.EDGES[name], name
    for (name, label), values in metric_facts.LABEL_VALUES.items():
        assert {sample.labels[label] for sample in found[name].samples} == values, name
    exposed = {sample.name for family in found.values() for sample in family.samples}
    assert not exposed & metric_facts.LEFT_OUT
    assert not [name for name in exposed if name.startswith(tuple(metric_facts.LEFT_OUT_FAMILIES))]


def test_the_manual_tells_of_every_name_that_is_left_out() -> None:
    manual = (Path(banyan.__file__).parent / "docs" / "operations.md").read_text()
    part = manual.partition("### Names that are not there")[2].partition("\n## ")[0]
    for name in metric_facts.LEFT_OUT | metric_facts.LEFT_OUT_FAMILIES:
        assert name.partition(":")[2] in part if ":" in name else name in part, name


def test_routing_keys_of_the_header_and_the_body_are_counted_while_requests_run(server: Server) -> None:
    def active() -> float:
        return total(server, "sglang:routing_keys_active")

    def ask(own: str | None, header: str) -> int:
        body = {"text": "a", "routing_key": own, "sampling_params": {"max_new_tokens": 2}}
        return httpx.post(server.url + "/generate", json=body, headers={"x-smg-routing-key": header}, timeout=60).status_code

    assert active() == 0
    assert server.post({"mode": "in_place"}, "/pause_generation").status_code == 200
    with ThreadPoolExecutor(5) as pool:
        asked = [pool.submit(ask, *keys) for keys in (("a", ""), (None, "b"), (None, "b"), ("a", "c"), (None, ""))]
        until(lambda: total(server, "banyan:num_live_requests") == 5)
        until(lambda: active() == 2)
        assert server.post({}, "/continue_generation").status_code == 200
        assert [future.result() for future in asked] == [200] * 5
    until(lambda: active() == 0)
    long = server.http.post("/generate", json={"text": "a"}, headers={"x-smg-routing-key": "k" * 5000})
    assert (long.status_code, long.json()["error"]["param"]) == (400, "routing_key")
    until(server.at_rest)


def test_grammars_are_counted(server: Server) -> None:
    before = samples(server)
    schema = {"max_new_tokens": 4, "json_schema": '{"type": "object", "properties": {"n": {"type": "integer"}}}'}
    for _ in range(2):
        server.generate(text="x", sampling_params=schema)
    assert server.post({"text": "x", "sampling_params": {"json_schema": '{"type": "no such type"}'}}).status_code == 400
    after = samples(server)

    def more(name: str) -> float:
        return sum(after[name].values()) - sum(before[name].values())

    assert more("sglang:num_grammar_total") >= 2
    assert more("sglang:num_grammar_cache_hit_total") == 1
    assert more("sglang:grammar_compilation_time_seconds_count") == 1
    assert sum(after["sglang:num_grammar_queue_reqs"].values()) == 0


def test_promtool_accepts_it(server: Server) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed")
    checked = subprocess.run(
        [promtool, "check", "metrics"], input=server.http.get("/metrics").text, capture_output=True, text=True, timeout=30
    )
    assert checked.returncode in (0, 3), checked.stdout + checked.stderr  # 3: advice on names, which are others' here
    assert "error while linting" not in checked.stdout + checked.stderr


def test_one_line_per_request_with_counts_and_times_and_no_text(server: Server) -> None:
    answer = server.generate(text="secret words", sampling_params={"max_new_tokens": 4, "ignore_eos": True})
    rid = answer["meta_info"]["id"]
    until(lambda: any(line["rid"] == rid for line in finished(server)))
    (line,) = [line for line in finished(server) if line["rid"] == rid]
    assert line["completion_tokens"] == 4
    assert {"e2e_s", "ttft_s", "tokenize_s", "queue_s", "prefill_s", "decode_s"} <= set(line)
    assert "secret" not in server.text()


def test_meta_info_tells_the_phases(server: Server) -> None:
    meta = server.generate(text="some words", sampling_params={"max_new_tokens": 4, "ignore_eos": True})["meta_info"]
    phases = [meta[f"{name}_time"] for name in ("tokenize", "queue", "prefill", "decode")]
    assert min(phases) >= 0
    assert sum(phases) <= meta["e2e_latency"] + 0.01
    assert meta["time_to_first_token"] <= meta["e2e_latency"]


def test_the_request_id_is_echoed(server: Server) -> None:
    body = {"text": "a", "sampling_params": {"max_new_tokens": 1}}
    given = server.http.post("/generate", json=body, headers={"x-request-id": "mine-1"})
    assert given.headers["x-request-id"] == "mine-1"
    made = server.http.post("/generate", json=body)
    assert made.headers["x-request-id"] == made.json()["meta_info"]["id"]
    odd = server.http.post("/generate", json=body, headers={"x-request-id": "a b"})
    assert odd.headers["x-request-id"] == odd.json()["meta_info"]["id"]


def test_probes_leave_no_trace_in_log_cache_and_metrics(server: Server) -> None:
    until(server.at_rest)
    before, log, cache = samples(server), len(finished(server)), server.http.get("/radix_cache").json()
    for path in ("/health", "/livez", "/readyz", "/health_generate", "/metrics"):
        assert server.http.get(path).status_code == 200
    assert server.http.get("/radix_cache").json() == cache
    after = samples(server)
    names = [name for name in after if name.startswith(("sglang:num_requests", "sglang:time_to", "vllm:request_success"))]
    assert {name: after[name] for name in names} == {name: before.get(name) for name in names}
    assert len(finished(server)) == log
    assert not [line for line in server.text().splitlines() if "GET /" in line and ("/health" in line or "/metrics" in line)]
    assert "HEALTH_CHECK" not in server.text()


def test_what_clients_can_make_it_warn_of_fills_no_disk(server: Server) -> None:
    """In the process that reads requests, and in the scheduler."""
    for _ in range(3 * BURST):
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
            connection.sendall(b"no such protocol\r\n\r\n")
            assert connection.recv(100).startswith(b"HTTP/1.1 400")
        assert server.http.post("/destroy_weights_update_group", json={"group_name": "none"}).status_code == 400
    lines = server.text().splitlines()
    for text in ("Invalid HTTP request received.", "group none: "):
        assert 1 <= sum(text in line for line in lines) <= 2 * BURST, text


def test_paths_that_clients_make_up_are_no_labels(server: Server) -> None:
    server.http.get("/made/up")
    endpoints = {dict(labels)["endpoint"] for labels in samples(server)["sglang:http_requests_total"]}
    assert "other" in endpoints
    assert "/made/up" not in endpoints


def test_without_the_option_there_is_no_metrics_route(tmp_path: Path) -> None:
    server = Server(oracle_folder(tmp_path / "model"), tmp_path / "run")
    try:
        server.wait_ready()
        assert server.http.get("/metrics").status_code == 404
        server.terminate()
    finally:
        server.close()


def test_the_scheduler_logs_its_batches_in_the_known_form(server: Server) -> None:
    server.generate(text="several words here", sampling_params={"max_new_tokens": 60, "ignore_eos": True})
    until(lambda: "Decode batch, #running-req: 1, #token: " in server.text())
    assert ", #pending-token: 0, cuda graph: False, input throughput (token/s): " in server.text()
    assert ", cuda graph: False, gen throughput (token/s): " in server.text()


def test_top_dump_and_drain_of_a_running_server(server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["top", "--once", "--url", server.url]) == 0
    assert "TTFT" in capsys.readouterr().out
    server.generate(text="a secret", sampling_params={"max_new_tokens": 5, "ignore_eos": True})
    assert cli.main(["dump", "--url", server.url, "--output", str(tmp_path / "dump")]) == 0
    found = {path.name: path.read_text() for path in (tmp_path / "dump").iterdir()}
    assert {"stacks-main.txt", "stacks-scheduler.txt", "stacks-detokenizer.txt", "state.json", "turns.jsonl"} <= set(found)
    assert "event_loop.py" in found["stacks-scheduler.txt"]
    assert "secret" not in "".join(found.values())
    assert json.loads(found["turns.jsonl"].splitlines()[-1])["turn"] > 0
    assert server.http.get("/startupz").status_code == 200
    assert server.http.post("/drain").json() == {"status": "drained", "num_live": 0}
    assert server.http.get("/readyz").json() == {"status": "draining", "reason": "draining"}
    assert server.post({"text": "a"}).status_code == 503
    assert server.http.post("/drain?timeout=-1").status_code == 400
    assert server.http.delete("/drain").json() == {"status": "ready", "num_live": 0}
    assert server.http.get("/readyz").status_code == 200
