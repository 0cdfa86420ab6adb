"""The tools of the command line: top's arithmetic, check's findings, completion, and bodies of the operators' routes."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from banyan.managers.processes import stacks
from banyan.srt import cli
from banyan.srt.check import check, report
from banyan.srt.completion import SHELLS, script
from banyan.srt.server_args import ServerArgs
from banyan.srt.top import parse, quantile, screen, total

BEFORE = """# HELP sglang:x text
sglang:num_running_reqs{model_name="a \\"b\\""} 3.0
sglang:inter_token_latency_seconds_bucket{le="0.01"} 5.0
sglang:inter_token_latency_seconds_bucket{le="0.1"} 5.0
sglang:inter_token_latency_seconds_bucket{le="+Inf"} 5.0
sglang:num_requests_total{is_streaming="true"} 10.0
"""
NOW = """sglang:num_running_reqs{model_name="a \\"b\\""} 4.0
sglang:inter_token_latency_seconds_bucket{le="0.01"} 5.0
sglang:inter_token_latency_seconds_bucket{le="0.1"} 14.0
sglang:inter_token_latency_seconds_bucket{le="+Inf"} 15.0
sglang:num_requests_total{is_streaming="true"} 12.0
sglang:num_requests_total{is_streaming="false"} 4.0
"""
NAME = "sglang:inter_token_latency_seconds_bucket"


def test_quantiles_are_of_what_came_between_two_readings() -> None:
    before, now = parse(BEFORE), parse(NOW)
    assert quantile(before, now, NAME, 0.5) == 0.1
    assert quantile(before, now, NAME, 0.99) == float("inf")
    assert quantile(now, now, NAME, 0.2) == 0.01  # one reading: since the start
    assert quantile(before, now, "sglang:nothing", 0.5) is None


def test_a_screen_shows_gauges_and_rates() -> None:
    before, now = parse(BEFORE), parse(NOW)
    assert total(now, "sglang:num_requests_total") == 16
    shown = screen("http://x", before, now, 2.0)
    assert "running       4" in shown
    assert "requests/s    3.00" in shown
    assert "<=100 ms" in shown


def test_top_and_dump_say_that_no_server_answers(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    for argv in (["top", "--once", "--url", url], ["dump", "--url", url]):
        assert cli.main(argv) == 1
        assert capsys.readouterr().err.startswith(f"banyan: error: no server answers at {url}")


def levels(**options: object) -> dict[str, str]:
    return {finding.topic: finding.level for finding in check(ServerArgs.from_kwargs(options))}


def test_check_finds_what_a_start_would_meet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert levels(model_path=str(tmp_path), port=0)["model"] == "error"  # no weights
    (tmp_path / "model.safetensors").write_bytes(b"0" * 1000)
    found = levels(model_path=str(tmp_path), port=0)
    assert (found["model"], found["port"]) == ("ok", "ok")
    assert "network" not in found
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert levels(model_path=str(tmp_path), port=port)["port"] == "error"
        assert cli.main(["check", "--model-path", str(tmp_path), "--port", str(port)]) == 1
        assert "is in use" in capsys.readouterr().out
    assert levels(model_path=str(tmp_path), port=0, host="0.0.0.0")["network"] == "warning"


def test_check_looks_for_a_compiler_and_a_place_to_keep_things(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    args = ServerArgs.from_kwargs({"model_path": str(tmp_path), "port": 0})
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("BANYAN_CACHE", "/dev/null/cache")
    found = {finding.topic: finding for finding in check(args)}
    assert found["compiler"].level == "warning"
    assert "CXX names no-such-compiler" in found["compiler"].text
    assert (found["cache"].level, found["cache"].text.split()[0]) == ("warning", "/dev/null")
    monkeypatch.setenv("CXX", sys.executable)
    monkeypatch.setenv("BANYAN_CACHE", str(tmp_path / "not yet"))
    found = {finding.topic: finding for finding in check(args)}
    assert found["compiler"].level == "ok"
    assert "GB free" in found["cache"].text
    assert not (tmp_path / "not yet").exists()


def test_check_sees_too_many_threads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "4096")
    findings = check(ServerArgs.from_kwargs({"model_path": str(tmp_path), "port": 0}))
    assert "OMP_NUM_THREADS=4096" in report(findings)
    assert {finding.topic: finding.level for finding in findings}["threads"] == "warning"


@pytest.mark.parametrize("shell", SHELLS)
def test_completion_knows_commands_options_and_choices(shell: str) -> None:
    text = script(cli.make_parser(), shell)
    for word in ("serve", "dump", "completion", "schedule-policy", "hrrn"):
        assert word in text, word


def test_bash_completes() -> None:
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("no bash")
    code = script(cli.make_parser(), "bash") + (
        "COMP_WORDS=(banyan serve --schedule-policy h); COMP_CWORD=3; _banyan; echo ${COMPREPLY[@]}\n"
        "COMP_WORDS=(banyan se); COMP_CWORD=1; _banyan; echo ${COMPREPLY[@]}\n"
        "COMP_WORDS=(banyan serve --log-req); COMP_CWORD=2; _banyan; echo ${COMPREPLY[@]}\n"
    )
    done = subprocess.run([bash, "-c", code], capture_output=True, text=True, timeout=20, check=True)
    policy, command, options = done.stdout.splitlines()
    assert (policy, command) == ("hrrn", "serve")
    assert options.split() == ["--log-requests", "--log-requests-level", "--log-requests-format"]


def test_stacks_of_a_process_that_has_no_handler_are_not_asked_for(tmp_path: Path) -> None:
    child = subprocess.Popen(["sleep", "30"])
    try:
        assert stacks.collect(str(tmp_path), {"child": child.pid}) == {"child": ""}
        assert child.poll() is None
    finally:
        child.kill()
        child.wait()
