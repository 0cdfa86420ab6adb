"""Two network namespaces as two machines with a rank each: they serve, and a cable that is pulled ends both in bounded time."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from server import until
from tiny_tokenizers import byte_level_folder

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(os.geteuid() != 0 or shutil.which("ip") is None, reason="network namespaces need root and iproute2"),
]
NAMES = (f"bn-a-{os.getpid()}", f"bn-b-{os.getpid()}")
ASK = """
import json, sys, urllib.request
body = json.dumps({"input_ids": list(range(5, 30)), "sampling_params": {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}})
request = urllib.request.Request("http://127.0.0.1:30000/generate", body.encode(), {"content-type": "application/json"})
print(json.dumps(json.loads(urllib.request.urlopen(request, timeout=60).read())["output_ids"]))
"""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def inside(name: str, *words: str) -> list[str]:
    return ["ip", "netns", "exec", name, *words]


@pytest.fixture
def machines() -> Iterator[tuple[str, str]]:
    first, second = NAMES
    made = []
    try:
        for name in NAMES:
            ip("netns", "add", name)
            made.append(name)
        ip("link", "add", "bnv0", "netns", first, "type", "veth", "peer", "name", "bnv1", "netns", second)
        for name, link, address in ((first, "bnv0", "10.77.0.1/24"), (second, "bnv1", "10.77.0.2/24")):
            for words in (("addr", "add", address, "dev", link), ("link", "set", link, "up"), ("link", "set", "lo", "up")):
                subprocess.run(inside(name, "ip", *words), check=True, capture_output=True)
        yield NAMES
    finally:
        for name in made:
            ip("netns", "del", name)


@pytest.fixture
def model(tmp_path: Path) -> str:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(vocab_size=512, max_position_embeddings=256, bos_token_id=1, eos_token_id=2, **sizes)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    byte_level_folder(tmp_path / "model")
    return str(tmp_path / "model")


@pytest.mark.parametrize("shape", ["--tp-size", "--pp-size"])
def test_two_machines_serve_and_end_when_the_cable_is_pulled(
    machines: tuple[str, str], model: str, tmp_path: Path, shape: str
) -> None:
    command = [sys.executable, "-m", "banyan", "serve", "--model-path", model, "--dtype", "float32", shape, "2", "--nnodes", "2"]
    command += ["--dist-init-addr", "10.77.0.1:7100", "--max-total-tokens", "512", "--check-decisions", "--dist-timeout", "12"]
    environment = {**os.environ, "BANYAN_DIST_TOKEN": "a secret of this test", "OMP_NUM_THREADS": "1"}
    logs = [tmp_path / f"log{rank}" for rank in (0, 1)]
    processes: list[Any] = []
    try:
        for rank, name in enumerate(machines):
            with logs[rank].open("w") as log:
                line = inside(name, *command, "--node-rank", str(rank))
                processes.append(subprocess.Popen(line, stdout=log, stderr=log, env=environment))
        until(lambda: "ready to roll" in logs[0].read_text() or processes[0].poll() is not None, 150)
        answer = subprocess.run(inside(machines[0], sys.executable, "-c", ASK), capture_output=True, text=True, timeout=90)
        assert answer.returncode == 0, answer.stderr + logs[0].read_text()
        assert len(json.loads(answer.stdout)) == 8
        subprocess.run(inside(machines[0], "ip", "link", "set", "bnv0", "down"), check=True)
        pulled = time.monotonic()
        statuses = [process.wait(60) for process in processes]
        assert time.monotonic() - pulled < 30
        assert all(statuses), "both end with an error"
        assert "rank 1 gave no sign of life for" in logs[0].read_text()
        assert "rank 0 gave no sign of life for" in logs[1].read_text()
    finally:
        for process in processes:
            process.kill()
            process.wait()
