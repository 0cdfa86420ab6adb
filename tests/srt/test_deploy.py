"""What lies in deploy/ names routes, options and metrics that exist."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes_validate import ValidationError, validate

import banyan
from banyan.srt import metric_names as metrics
from banyan.srt.cli import make_parser
from banyan.srt.routes import ROUTES, Access

DEPLOY = Path(banyan.__file__).parent / "deploy"
MADE = ("banyan:ready", "banyan:num_live_requests", "banyan:restarts_total", "banyan:request_errors_total")
COMPUTED = ("sglang:realtime_tokens_total", "sglang:forward_execution_seconds_total", "sglang:process_cpu_seconds_total")


def test_the_probes_are_public_routes() -> None:
    deployment, service = yaml.safe_load_all((DEPLOY / "kubernetes" / "banyan.yaml").read_text())
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    paths = {name: container[name]["httpGet"]["path"] for name in ("startupProbe", "livenessProbe", "readinessProbe")}
    assert paths == {"startupProbe": "/startupz", "livenessProbe": "/livez", "readinessProbe": "/readyz"}
    assert {ROUTES[path] for path in paths.values()} == {Access.PUBLIC}
    assert service["spec"]["ports"][0]["targetPort"] == container["ports"][0]["name"]
    assert deployment["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] > 70  # the drain and the processes' end


def manifests() -> list[dict[str, Any]]:
    """Everything that Kubernetes itself checks; of a LeaderWorkerSet, which it does not know, the templates of its pods."""
    found: list[dict[str, Any]] = []
    for path in sorted((DEPLOY / "kubernetes").glob("*.yaml")):
        for one in yaml.safe_load_all(path.read_text()):
            if one["kind"] != "LeaderWorkerSet":
                found.append(one)
                continue
            assert set(one["spec"]) == {"replicas", "leaderWorkerTemplate"}
            group = one["spec"]["leaderWorkerTemplate"]
            assert set(group) == {"size", "restartPolicy", "leaderTemplate", "workerTemplate"}
            for role in ("leaderTemplate", "workerTemplate"):
                found.append({"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": role}, "template": group[role]})
    return found


@pytest.mark.parametrize("version", ["1.29", "1.37"])
def test_kubernetes_takes_the_manifests(version: str) -> None:
    assert [one["kind"] for one in manifests()] == ["Deployment", "Service", "PodTemplate", "PodTemplate", "Service"]
    for one in manifests():
        validate(one, version, strict=True)
    wrong = manifests()[0]
    wrong["spec"]["template"]["spec"]["containers"][0]["livenessProbe"]["failureTreshold"] = 3
    with pytest.raises(ValidationError):
        validate(wrong, version, strict=True)


def test_both_ranks_of_a_group_are_started_alike() -> None:
    leader, worker = (one["template"]["spec"]["containers"][0] for one in manifests() if one["kind"] == "PodTemplate")
    assert leader["args"] == worker["args"] and leader["env"] == worker["env"]
    numbers = {"$(LWS_GROUP_SIZE)": "2", "$(LWS_WORKER_INDEX)": "1", "$(LWS_LEADER_ADDRESS)": "leader"}
    args = [re.sub(r"\$\(\w+\)", lambda match: numbers[match[0]], arg) for arg in leader["args"]]
    assert make_parser().parse_args(args).run is not None


def commands() -> dict[str, list[str]]:
    deployment = next(iter(yaml.safe_load_all((DEPLOY / "kubernetes" / "banyan.yaml").read_text())))
    compose: Any = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    (image,) = re.findall(r"^CMD (\[.*\])$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    return {
        "kubernetes": deployment["spec"]["template"]["spec"]["containers"][0]["args"],
        "compose": compose["services"]["banyan"]["command"],
        "image": json.loads(image),
        "systemd": shlex.split(
            re.findall(r"^ExecStart=\S+ (.*) \$OPTIONS$", (DEPLOY / "banyan.service").read_text(), re.MULTILINE)[0]
        ),
    }


@pytest.mark.parametrize("name", ["kubernetes", "compose", "image", "systemd"])
def test_command_lines_are_ones_that_banyan_takes(name: str) -> None:
    assert make_parser().parse_args(commands()[name]).run is not None


def test_the_dashboard_asks_for_metrics_that_exist() -> None:
    text = (DEPLOY / "grafana" / "dashboard.json").read_text()
    known = {f"sglang:{name}" for name in metrics.GAUGES} | {f"banyan:{name}" for name in metrics.OWN_GAUGES}
    known |= {f"{name}_total" for name in metrics.TOTALS} | {f"sglang:{name}_total" for name in metrics.COUNTERS}
    known |= {f"sglang:{name}_{part}" for name in metrics.HISTOGRAMS for part in ("bucket", "sum", "count")}
    used = set(re.findall(r"\b(?:sglang|vllm|banyan):\w+", text))
    assert used
    assert used - known - {*MADE, *COMPUTED} == set()
