"""The GPU's proof: its CPU part here, all of it where there is a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import gpu_check
import pytest
import torch

import banyan

SCRIPT = Path(banyan.__file__).parent / "benchmarks" / "gpu_check.py"


def run(*arguments: str, timeout: float) -> dict:
    done = subprocess.run([sys.executable, SCRIPT, *arguments], capture_output=True, text=True, timeout=timeout)
    report = json.loads(done.stdout)
    assert done.returncode == int(not all(section["ok"] for section in report.values())), done.stderr
    return report


def test_the_matrix_holds_on_a_cpu():
    report = run("--dry-run", "--only", "matrix", timeout=150)
    assert report["matrix"]["ok"], report
    assert report["matrix"]["runs"] == 8 and report["matrix"]["distinct_tokens"] > 5


@pytest.mark.nightly
def test_every_section_runs_dry():
    report = run("--dry-run", timeout=170)
    assert all(section["ok"] for section in report.values()), report
    assert report["speed"]["prefill"]["tok_s"] > 0 and report["overlap"]["launch_ms"] > 0


def test_a_section_that_fails_does_not_stop_the_others(monkeypatch):
    monkeypatch.setitem(gpu_check.SECTIONS, "limits", 1)
    monkeypatch.setitem(gpu_check.SECTIONS, "broken", 60)
    monkeypatch.setattr(gpu_check, "_run_section", fail_or_run(gpu_check._run_section))
    report = gpu_check.run_sections(["limits", "broken", "kernels"], ["--dry-run"])
    assert [section["ok"] for section in report.values()] == [False, False, True]
    assert "no end after" in report["limits"]["error"] and "exit status" in report["broken"]["error"]


def test_what_does_not_fit_into_the_total_is_not_run(monkeypatch):
    monkeypatch.setattr(gpu_check, "TOTAL", 0)
    report = gpu_check.run_sections(["limits", "kernels"], ["--dry-run"])
    assert [section["error"] for section in report.values()] == ["no time left"] * 2


def test_the_table_has_a_line_for_each_section_and_each_number():
    checks = {"good": {"ok": True, "worst": 0.1}, "bad": {"ok": False, "worst": 9.5}}
    report = {
        "kernels": {"ok": False, "seconds": 3.1, "error": "exit status 1", "checks": checks},
        "speed": {"ok": True, "seconds": 80.0, "decode": {"32 x 1024": {"ms": 4.25, "memory_limit_ms": 1.5}}},
    }
    lines = gpu_check.table(report).splitlines()
    assert [line.split() for line in lines[1:3]] == [["kernels", "FAILED", "3.1", "exit", "status", "1"], ["speed", "ok", "80.0"]]
    numbers = {line[:70].strip(): line[70:].strip() for line in lines[3:]}
    assert numbers == {
        "kernels: checks: bad: worst": "9.5",
        "speed: decode: 32 x 1024: ms": "4.25",
        "speed: decode: 32 x 1024: memory_limit_ms": "1.5",
    }


def fail_or_run(original):
    def call(name, extra, env, limit):
        if name == "broken":
            return original("kernels", ["--no-such-option"], env, 60)
        return original(name, extra, env, limit)

    return call


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("section", ["environment", "kernels", "matrix", "syncs", "memory", "overlap"])
def test_a_section_holds_on_a_gpu(section):
    report = run("--only", section, timeout=170)
    assert report[section]["ok"], report
