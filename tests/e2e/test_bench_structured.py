"""benchmarks/bench_structured.py over the token oracle: both tables, on a page and as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import bench_structured
import pytest
from server import oracle_folder


@pytest.mark.timeout(300)
def test_both_tables_are_printed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, found = tmp_path / "page.md", tmp_path / "found.json"
    page.write_text("before\n<!-- bench_structured: begin -->\n<!-- bench_structured: end -->\nafter\n")
    options = ["--streams", "1,2", "--gain-streams", "1", "--rounds", "1", "--tokens", "12"]
    model = ["--model-path", oracle_folder(tmp_path / "model"), "--load-format", "oracle"]
    assert bench_structured.main([*model, *options, "--write", str(page), "--json", str(found)]) == 0
    result = json.loads(found.read_text())["result"]
    assert list(result) == ["banyan, 1 streams", "banyan, 2 streams", "fixed keys, 1 streams"]
    for name in list(result)[:2]:
        free, constrained = result[name]["free_itl_ms"], result[name]["json_itl_ms"]
        assert free > 0 and constrained > 0
    assert result["fixed keys, 1 streams"]["gain"] > 0
    written, printed = page.read_text(), capsys.readouterr().out
    for name in result:
        assert f"| {name}" in written and f"| {name}" in printed
    assert written.startswith("before\n") and written.endswith("after\n") and "machine:" in written
