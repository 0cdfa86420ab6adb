"""A real Prometheus scrapes a server under load, and every query of the dashboard returns data."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from server import Server, oracle_folder, until

import banyan

DEPLOY = Path(banyan.__file__).parent / "deploy"
QUIET = ("class",)  # there is nothing to see where nothing fails


def queries() -> list[str]:
    dashboard = json.loads((DEPLOY / "grafana" / "dashboard.json").read_text())
    return [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]


@pytest.fixture
def prometheus(tmp_path: Path) -> Iterator[tuple[Server, str]]:
    binary = shutil.which("prometheus")
    if binary is None:
        pytest.skip("prometheus is not installed")
    server = Server(oracle_folder(tmp_path / "model"), tmp_path / "run", "--enable-metrics", "--max-total-tokens", "600")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    config = (DEPLOY / "prometheus.yml").read_text().replace("banyan:30000", f"127.0.0.1:{server.port}").replace("5s", "1s")
    (tmp_path / "prometheus.yml").write_text(config)
    command = [binary, f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data"]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen([*command, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log)
    try:
        server.wait_ready()
        yield server, f"http://127.0.0.1:{port}"
        server.terminate()
    finally:
        process.kill()
        process.wait()
        server.close()


def ask(url: str, query: str) -> list[Any]:
    query = query.replace("$__rate_interval", "30s").replace("$model_name", ".*")
    try:
        reply = httpx.get(f"{url}/api/v1/query", params={"query": query})
    except httpx.TransportError:
        return []
    body = reply.json()
    assert body["status"] == "success", (query, body)
    return [item for item in body["data"]["result"] if item["value"][1] != "NaN"]


@pytest.mark.nightly
def test_every_query_of_the_dashboard_returns_data(prometheus: tuple[Server, str]) -> None:
    server, url = prometheus
    for number in range(30):
        text = f"some words that are long enough to be evicted, number {number % 5} " * 4
        server.generate(text=text, sampling_params={"max_new_tokens": 30, "ignore_eos": True})
        time.sleep(0.2)
    server.post({"text": "a", "timeout": 0.001, "sampling_params": {"max_new_tokens": 500, "ignore_eos": True}})
    until(lambda: ask(url, "sglang:num_requests_total > 29"))
    time.sleep(3)
    assert len(queries()) > 20
    missing = [query for query in queries() if not ask(url, query) and not any(word in query for word in QUIET)]
    assert missing == []
    (used,) = ask(url, "histogram_quantile(0.5, sum by (le) (rate(vllm:inter_token_latency_seconds_bucket[30s])))")
    assert 0 < float(used["value"][1]) < 1
