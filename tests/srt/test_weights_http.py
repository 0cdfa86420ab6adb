"""The routes for weights, memory and profiles: what they send on, and what they refuse."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save

from banyan.managers.io_struct import ControlReply, MemoryReq, ProfileReq, ReadWeightReq, UpdateWeightsReq

BLOB = save({"x": np.zeros(3, np.float32)})
TEXT = base64.b64encode(BLOB).decode()


def post(served: Any, path: str, **body: Any) -> Any:
    return served.client.post(path, json=body)


def test_from_disk(served: Any, tmp_path: Path) -> None:
    reply = post(served, "/update_weights_from_disk", model_path=str(tmp_path), weight_version="v2", abort_all_requests=True)
    assert (reply.status_code, reply.json()) == (200, {"success": True, "message": "Done.", "values": []})
    (message,) = served.manager.controls
    assert isinstance(message, UpdateWeightsReq)
    assert (message.path, message.partial, message.flush_cache, message.abort_all) == (str(tmp_path), False, True, True)
    assert served.client.get("/model_info").json()["weight_version"] == "v2"
    assert post(served, "/v1/completions", prompt="a").json()["metadata"]["weight_version"] == "v2"


def test_from_tensors_in_both_forms(served: Any) -> None:
    seen: list[bytes] = []
    control = served.manager.control

    async def reading(make: Any) -> ControlReply:
        seen.append((Path(make(1).path) / "model.safetensors").read_bytes())
        return await control(make)

    served.manager.control = reading
    assert post(served, "/update_weights_from_tensor", serialized_named_tensors=[TEXT, TEXT], flush_cache=False).status_code == 200
    raw = {"content-type": "application/octet-stream"}
    query = {"weight_version": "v3", "flush_cache": "false"}
    assert served.client.post("/update_weights_from_tensor", content=BLOB, headers=raw, params=query).status_code == 200
    assert seen == [BLOB] * 3
    assert [message.flush_cache for message in served.manager.controls] == [False] * 3
    assert served.manager.controls[-1].weight_version == "v3"


def test_a_failed_update_is_a_400_and_leaves_no_file(served: Any) -> None:
    served.manager.control_reply = ControlReply(call_id=7, success=False, message="no place at 0x7f00deadbeef")
    reply = post(served, "/update_weights_from_tensor", serialized_named_tensors=[TEXT], weight_version="v9")
    assert (reply.status_code, reply.json()) == (400, {"success": False, "message": "no place at 0x..."})
    assert not Path(served.manager.controls[0].path).exists()
    assert served.client.get("/model_info").json()["weight_version"] == "default"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/update_weights_from_disk", {}, "model_path"),
        ("/update_weights_from_disk", {"model_path": "/no/such"}, "model_path"),
        ("/update_weights_from_disk", {"model_path": "/", "load_format": "pickle"}, "load_format"),
        ("/update_weights_from_tensor", {}, "serialized_named_tensors"),
        ("/update_weights_from_tensor", {"serialized_named_tensors": []}, "serialized_named_tensors"),
        ("/update_weights_from_tensor", {"serialized_named_tensors": ["%%"]}, "serialized_named_tensors"),
        ("/update_weights_from_tensor", {"serialized_named_tensors": [TEXT], "load_format": "flattened_bucket"}, "load_format"),
        ("/update_weights_from_distributed", {"names": []}, "names"),
        ("/init_weights_update_group", {}, "master_address"),
        ("/update_weight_version", {}, "new_version"),
        ("/get_weights_by_name", {}, "name"),
        ("/get_weights_by_name", {"name": "x", "truncate_size": 0}, "truncate_size"),
        ("/release_memory_occupation", {"tags": ["x"]}, "tags"),
        ("/start_profile", {"profile_prefix": "../../x"}, "profile_prefix"),
        ("/start_profile", {"num_steps": "x"}, "num_steps"),
        ("/start_profile", {"num_steps": 0}, "num_steps"),
    ],
)
def test_bad_bodies(served: Any, path: str, body: Any, param: str | None) -> None:
    reply = post(served, path, **body)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == param
    assert served.manager.controls == []


def test_memory_and_names(served: Any) -> None:
    assert served.client.post("/release_memory_occupation").json() is None
    assert post(served, "/resume_memory_occupation", tags=["kv_cache", "cuda_graph"]).json() is None
    assert served.client.get("/resume_memory_occupation").status_code == 200
    served.manager.control_reply = ControlReply(call_id=7, state={"values": [1.5, 2.0]})
    assert post(served, "/get_weights_by_name", name="x", truncate_size=2).json() == [1.5, 2.0]
    release, resume, all_again, read = served.manager.controls
    assert release == MemoryReq(call_id=7, release=True, tags=["kv_cache", "weights"])
    assert resume == MemoryReq(call_id=7, release=False, tags=["kv_cache"])
    assert all_again.tags == ["weights", "kv_cache"]
    assert read == ReadWeightReq(call_id=7, name="x", limit=2)
    served.manager.control_reply = ControlReply(call_id=7, success=False, message="in use")
    assert post(served, "/release_memory_occupation").json()["error"]["message"] == "in use"


def test_profile(served: Any, tmp_path: Path) -> None:
    sent = {"output_dir": str(tmp_path), "num_steps": "5", "activities": ["CPU", "GPU"], "profile_by_stage": False}
    assert post(served, "/start_profile", **sent, profile_stages=None).text == "Start profiling.\n"
    assert served.client.get("/start_profile").status_code == 200
    served.manager.control_reply = ControlReply(call_id=7, message="/t/x.json.gz")
    assert "/t/x.json.gz" in served.client.post("/stop_profile", json={}).text
    first, _, last = served.manager.controls
    assert (first.spec.folder, first.spec.num_steps) == (str(tmp_path), 5)
    assert last == ProfileReq(call_id=7)
