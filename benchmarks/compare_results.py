"""What a comparison of engines came to: kept by engine and load, so that runs of a few loads add up to one table."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from compare_workloads import FIGURES, WORKLOADS

TARGETS = {  # ours beside the best of the others, by precision: at most
    "bf16": {
        "W1 time per token": 0.8,
        "W1 time to first token": 0.9,
        "W2 total": 0.85,
        "W3 total": 0.75,
        "W4 total": 0.75,
        "W5 worst gap": 0.35,
    },
    "int8": {
        "W1 time per token": 0.75,
        "W1 time to first token": 0.9,
        "W2 total": 0.8,
        "W3 total": 0.75,
        "W4 total": 0.7,
        "W5 worst gap": 0.35,
    },
    "int4": {"W1 time per token": 0.9, "W2 total": 0.9},
}
OURS = "banyan"
START, START_FIGURE = "start", "start to first token"
MEMORY, SAME_IDS = "peak memory, GB", "W1 ids equal to ours, of 384"
FAILED = "failed"
LONGEST = 160  # characters of a failure's reason in a page


class Measured(msgspec.Struct):
    """What one engine came to in one load (or in being started), over the rounds of the newest run that had it."""

    figures: dict[str, list[float]] = {}
    outputs: list[list[int]] = []  # of W1
    peak: float = 0.0  # most bytes of memory up to its end
    failure: str | None = None
    run: str = ""  # commit, time and load average
    note: str | None = None  # what was not as everywhere else


Results = dict[str, dict[str, Measured]]  # by engine, and by load or START


def read_results(path: Path) -> Results:
    """What earlier runs left there; nothing if there is no file."""
    return msgspec.json.decode(path.read_bytes(), type=Results) if path.exists() else {}


def write_results(path: Path, results: Results) -> None:
    """Keep them for later runs."""
    draft = path.with_name(path.name + ".draft")
    draft.write_bytes(msgspec.json.encode(results))
    draft.replace(path)


def in_order(results: Results, engines: Sequence[str]) -> Results:
    """Engines and loads in the order of tables, engines without a result left out."""
    loads = [START, *WORKLOADS]
    return {name: {load: results[name][load] for load in loads if load in results[name]} for name in engines if results.get(name)}


def rows(results: Results, precision: str) -> list[list[str]]:
    """A row per figure: a cell per engine, ours beside the best of the others, the target."""
    figures = {START_FIGURE: START} | {figure: load for load, names in FIGURES.items() for figure in names}
    lines = [_row(results, figure, load, TARGETS[precision].get(figure)) for figure, load in figures.items()]
    lines.insert(1, _memory_row(results))
    ours = results.get(OURS, {}).get("W1", Measured()).outputs
    if ours:
        same = [_same(ours, loads.get("W1", Measured()).outputs) for loads in results.values()]
        lines.append([SAME_IDS, *same, "-", "-"])
    return [line for line in lines if any(cell != "-" for cell in line[1 : len(results) + 1])]


def notes(results: Results) -> list[str]:
    """Lines under the table: what failed and why, what was done differently, and which run each cell comes from."""
    lines = []
    runs: dict[str, dict[str, list[str]]] = {}
    for engine, loads in results.items():
        for load, measured in loads.items():
            if measured.failure is not None:
                lines.append(f"{engine}, {load}: {_shortened(measured.failure)}")
            if measured.note is not None and load == START:
                lines.append(f"{engine}: {measured.note}")
            if load != START:
                runs.setdefault(measured.run, {}).setdefault(engine, []).append(load)
    for run, engines in runs.items():
        lines.append(f"{run}: " + "; ".join(f"{engine} {' '.join(loads)}" for engine, loads in engines.items()))
    return lines


def summary(results: Results) -> dict[str, Any]:
    """The results as JSON, without token ids."""
    plain: dict[str, dict[str, dict[str, Any]]] = msgspec.to_builtins(results)
    return {
        engine: {load: {k: v for k, v in each.items() if k != "outputs"} for load, each in loads.items()}
        for engine, loads in plain.items()
    }


def _row(results: Results, figure: str, load: str, target: float | None) -> list[str]:
    found = {engine: _values(loads, load, figure) for engine, loads in results.items()}
    medians = {engine: statistics.median(values) for engine, values in found.items() if values}
    others = [value for engine, value in medians.items() if engine != OURS]
    ratio = f"{medians[OURS] / min(others):.2f}" if OURS in medians and others else "-"
    unit = "ms" if figure == "W1 time per token" else "s"
    cells = [_cell(values, unit) if values else _missing(results[engine], load) for engine, values in found.items()]
    return [f"{figure}, {unit}", *cells, ratio, "-" if target is None else f"{target:.2f}"]


def _values(loads: Mapping[str, Measured], load: str, figure: str) -> list[float]:
    return loads[load].figures.get(figure, []) if load in loads else []


def _memory_row(results: Results) -> list[str]:
    peaks = {engine: max((measured.peak for measured in loads.values()), default=0.0) / 1e9 for engine, loads in results.items()}
    others = [peak for engine, peak in peaks.items() if engine != OURS and peak]
    ratio = f"{peaks[OURS] / min(others):.2f}" if peaks.get(OURS) and others else "-"
    return [MEMORY, *(f"{peak:.2f}" if peak else "-" for peak in peaks.values()), ratio, "-"]


def _missing(loads: Mapping[str, Measured], load: str) -> str:
    return FAILED if any(name in loads and loads[name].failure is not None for name in (load, START)) else "-"


def _cell(values: Sequence[float], unit: str) -> str:
    scaled = [value * 1e3 if unit == "ms" else value for value in values]
    spread = f" ({min(scaled):.2f}-{max(scaled):.2f})" if len(scaled) > 1 else ""
    return f"{statistics.median(scaled):.2f}{spread}"


def _same(ours: list[list[int]], theirs: list[list[int]]) -> str:
    """Tokens of W1 up to the first difference of each output: greedy ids part where two logits tie within the rounding."""
    if not theirs:
        return "-"
    count = 0
    for a, b in zip(ours, theirs, strict=True):
        count += next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return str(count)


def _shortened(reason: str) -> str:
    """The first and the last line of a reason, as one, without the name of anybody's home."""
    lines = [line.strip() for line in reason.replace(str(Path.home()), "~").splitlines() if line.strip()]
    text = " ... ".join(dict.fromkeys((lines[0], lines[-1]))) if lines else "?"
    return text if len(text) <= LONGEST else text[: LONGEST - 3] + "..."
