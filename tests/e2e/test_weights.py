"""Weights that change, memory given back and profiles, over the real processes and a tiny random model."""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save
from tiny_weights import NAME, PARAMS, PROMPT, ids_and_cached, run, save_model

from banyan import Engine, RequestError


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    first, second = (save_model(tmp_path_factory.mktemp(name), seed) for seed, name in enumerate("ab"))
    return first, second


@pytest.fixture(scope="module")
def shared(folders: tuple[str, str]) -> Iterator[Engine]:
    with Engine(model_path=folders[0], max_total_tokens=2048, strict=True) as engine:
        yield engine


@pytest.fixture
def engine(shared: Engine, folders: tuple[str, str]) -> Iterator[Engine]:
    """The first weights, whatever the test before did."""
    shared.update_weights_from_disk(folders[0], weight_version="default")
    yield shared
    state = shared.get_server_info()["internal_states"][0]
    assert state["memory_balanced"]
    assert not state["paused"]


def tensors(folder: str) -> dict[str, np.ndarray]:
    return dict(load_file(Path(folder) / "model.safetensors"))


def test_from_disk_and_back(engine: Engine, folders: tuple[str, str]) -> None:
    first, _ = ids_and_cached(engine)
    assert ids_and_cached(engine) == (first, 39)
    assert engine.update_weights_from_disk(folders[1], weight_version="b") == (True, "Weights updated.")
    second, cached = ids_and_cached(engine)
    assert (second != first, cached) == (True, 0)
    assert run(engine)["meta_info"]["weight_version"] == "b"
    assert engine.get_model_info()["weight_version"] == "b"
    assert engine.update_weights_from_disk(folders[0], weight_version="c", flush_cache=False)[0]
    assert ids_and_cached(engine) == (first, 0), "the KV of another version is not found, even if it is there"
    assert engine.update_weights_from_disk(folders[1], weight_version="b", flush_cache=False)[0]
    assert ids_and_cached(engine) == (second, 39), "and is found again with its version"


def test_from_tensors(engine: Engine, folders: tuple[str, str]) -> None:
    first, _ = ids_and_cached(engine)
    other = tensors(folders[1])
    engine.update_weights_from_disk(folders[1])
    second, _ = ids_and_cached(engine)
    engine.update_weights_from_disk(folders[0])
    half = len(other) // 2
    assert engine.update_weights_from_tensor(dict(list(other.items())[:half]))[0]
    assert engine.update_weights_from_tensor([(name, torch.tensor(other[name])) for name in list(other)[half:]])[0]
    assert ids_and_cached(engine) == (second, 0)
    assert engine.update_weights_from_tensor(save(tensors(folders[0])))[0]
    assert ids_and_cached(engine) == (first, 0)


@pytest.mark.parametrize(
    ("given", "word"),
    [
        (b"", "safetensors"),
        (b"\x80\x05" + b"pickle" * 20, "safetensors"),
        ((1 << 62).to_bytes(8, "little") + b"{}", "safetensors"),
        ({"model.no.such": np.zeros(3, np.float32)}, "no place"),
        ({NAME: np.zeros((3, 3), np.float32)}, "shape"),
    ],
)
def test_what_does_not_fit_changes_nothing(engine: Engine, given: Any, word: str) -> None:
    before, _ = ids_and_cached(engine)
    success, message = engine.update_weights_from_tensor(given, weight_version="bad")
    assert not success
    assert word in message
    assert ids_and_cached(engine) == (before, 39)
    assert engine.get_model_info()["weight_version"] == "default"


def test_bad_places_are_refused(engine: Engine, folders: tuple[str, str], tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="no folder or file"):
        engine.update_weights_from_disk("/no/such/model")
    assert not engine.update_weights_from_disk(str(tmp_path))[0]
    assert len(run(engine)["output_ids"]) == 12


def test_weights_by_name(engine: Engine, folders: tuple[str, str]) -> None:
    expected = tensors(folders[0])[NAME].ravel()
    assert engine.get_weights_by_name(NAME, 7) == pytest.approx(expected[:7].tolist())
    assert len(engine.get_weights_by_name(NAME, 1000)) == expected.size
    with pytest.raises(RequestError, match="no tensor"):
        engine.get_weights_by_name("x")


def test_an_update_waits_for_who_runs_and_aborts_them_if_asked(engine: Engine, folders: tuple[str, str]) -> None:
    stream = engine.generate(input_ids=PROMPT, sampling_params={**PARAMS, "max_new_tokens": 200}, stream=True)
    next(stream)
    assert engine.update_weights_from_disk(folders[1])[0]
    assert list(stream)[-1]["meta_info"]["finish_reason"] == {"type": "length", "length": 200}
    stream = engine.generate(input_ids=PROMPT, sampling_params={**PARAMS, "max_new_tokens": 1900}, stream=True)
    next(stream)
    assert engine.update_weights_from_disk(folders[0], abort_all_requests=True)[0]
    assert list(stream)[-1]["meta_info"]["finish_reason"]["type"] == "abort"


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_an_update_during_a_pause(engine: Engine, folders: tuple[str, str], mode: str) -> None:
    """Retracted requests go on with the new weights; what keeps KV of the old ones makes a flush an error, never a death."""
    stream = engine.generate(input_ids=PROMPT, sampling_params={**PARAMS, "max_new_tokens": 400}, stream=True)
    next(stream)
    engine.pause_generation(mode)
    success, message = engine.update_weights_from_disk(folders[1], weight_version="b")
    assert success == (mode == "retract"), message
    assert mode == "retract" or "retract" in message
    assert engine.flush_cache().success == (mode == "retract")
    assert engine.update_weights_from_disk(folders[1], weight_version="b", flush_cache=False)[0]
    engine.continue_generation()
    assert list(stream)[-1]["meta_info"]["finish_reason"] == {"type": "length", "length": 400}


@pytest.mark.parametrize("tags", [None, ["kv_cache"], ["weights"]])
def test_released_memory(engine: Engine, tags: Any) -> None:
    before, _ = ids_and_cached(engine)
    engine.release_memory_occupation(tags)
    with pytest.raises(RequestError, match="released"):
        raise RequestError(engine.continue_generation().message)
    assert not engine.update_weights_from_disk(engine.tokenizer_manager.config.model_path)[0]
    found: list[Any] = []
    waiting = threading.Thread(target=lambda: found.append(run(engine)))
    waiting.start()
    waiting.join(0.3)
    assert not found
    engine.resume_memory_occupation(tags)
    waiting.join(30)
    assert found[0]["output_ids"] == before
    assert found[0]["meta_info"]["cached_tokens"] == 0


def test_memory_that_is_in_use_is_not_released(engine: Engine) -> None:
    stream = engine.generate(input_ids=PROMPT, sampling_params={**PARAMS, "max_new_tokens": 1000}, stream=True)
    next(stream)
    with pytest.raises(RequestError, match="hold KV"):
        engine.release_memory_occupation()
    stream.close()
    assert len(run(engine)["output_ids"]) == 12


NO_GPU = [] if torch.cuda.is_available() else [{"activities": ["GPU"]}]


def test_profile(engine: Engine, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="no profile"):
        engine.stop_profile()
    engine.start_profile(output_dir=str(tmp_path / "traces"), profile_prefix="p", profile_id="7", num_steps=3)
    with pytest.raises(RequestError, match="under way"):
        engine.start_profile(output_dir=str(tmp_path))
    assert len(run(engine)["output_ids"]) == 12
    path = engine.stop_profile()
    assert Path(path).name.startswith("p-7-")
    events = json.loads(gzip.decompress(Path(path).read_bytes()))["traceEvents"]
    assert any(str(event.get("name")).startswith("aten::") for event in events)
    for bad in ({"profile_prefix": "../x"}, {"num_steps": 0}, {"activities": ["RPD"]}, {"activities": []}, *NO_GPU):
        with pytest.raises(RequestError):
            engine.start_profile(output_dir=str(tmp_path), **bad)
    engine.start_profile(output_dir=str(tmp_path / "gone"), num_steps=2, profile_id="x")
    (tmp_path / "gone").rmdir()
    assert len(run(engine)["output_ids"]) == 12, "a trace that cannot be written fails no request"
    with pytest.raises(RequestError):
        engine.stop_profile()


def test_scores_and_chat(engine: Engine) -> None:
    found = engine.score(PROMPT, [[5], [6, 7]], [10, 11], apply_softmax=True)
    assert [sum(row) for row in found.scores] == pytest.approx([1, 1])
    assert found.prompt_tokens == 2 * len(PROMPT) + 3
    probed = engine.generate(
        input_ids=[*PROMPT, 5],
        sampling_params={"max_new_tokens": 1, "temperature": 0},
        return_logprob=True,
        token_ids_logprob=[10, 11],
    )
    values = np.exp([entry[0] for entry in probed["meta_info"]["output_token_ids_logprobs"][0]])
    assert engine.score(PROMPT, [[5]], [10, 11]).scores[0] == pytest.approx(values.tolist(), rel=1e-4)
    assert engine.score([5], [PROMPT], [10], item_first=True).scores == engine.score(PROMPT, [[5]], [10]).scores
    with pytest.raises(RequestError):
        engine.chat([{"role": "user", "content": "hi"}])
