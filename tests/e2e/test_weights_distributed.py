"""Weights that a trainer, a process of its own, broadcasts over gloo to the ranks that serve."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.numpy import load_file
from tiny_weights import NAME, ids_and_cached, save_model

from banyan import Engine, RequestError

TRAINER = Path(__file__).with_name("trainer.py")
TIMEOUT = 60.0

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    first, second = (save_model(tmp_path_factory.mktemp(name), seed) for seed, name in enumerate("ab"))
    return first, second


class Trainer:
    """The process and what it is told."""

    def __init__(self, folder: str, world_size: int, name: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        command = [sys.executable, str(TRAINER), str(self.port), str(world_size), name, f"{folder}/model.safetensors"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.tensors = dict(load_file(f"{folder}/model.safetensors"))

    def hears(self, word: str) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline().strip() == word

    def send(self, names: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(names + "\n")
        self.process.stdin.flush()

    def announced(self, names: list[str]) -> dict[str, Any]:
        own = [self.tensors[name] for name in names]
        return {"names": names, "dtypes": [str(t.dtype) for t in own], "shapes": [list(t.shape) for t in own]}

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def trainer(folders: tuple[str, str]) -> Iterator[Callable[..., Trainer]]:
    started: list[Trainer] = []

    def start(world_size: int = 2, name: str = "weight_update_group") -> Trainer:
        started.append(Trainer(folders[1], world_size, name))
        return started[-1]

    yield start
    for one in started:
        one.close()


def meet(engine: Engine, trainer: Trainer, world_size: int = 2, **more: Any) -> None:
    named = {"backend": "gloo", "timeout": TIMEOUT, **more}
    assert engine.init_weights_update_group("127.0.0.1", trainer.port, 1, world_size, **named) == (True, "Done.")
    trainer.hears("met")


def test_a_trainer_hands_over_all_weights(folders: tuple[str, str], trainer: Callable[..., Trainer]) -> None:
    with Engine(model_path=folders[0], max_total_tokens=2048, strict=True) as engine:
        first, _ = ids_and_cached(engine)
        own = trainer()
        meet(engine, own)
        assert engine.init_weights_update_group("127.0.0.1", own.port, 1, 2, backend="gloo")[1].endswith("exists already")

        own.send("*")
        told = engine.update_weights_from_distributed(**own.announced(list(own.tensors)), weight_version="b")
        own.hears("sent")
        assert told == (True, "Weights updated.")
        second, cached = ids_and_cached(engine)
        assert (second != first, cached) == (True, 0)
        assert engine.get_model_info()["weight_version"] == "b"
        assert engine.update_weights_from_disk(folders[1])[0]
        assert ids_and_cached(engine)[0] == second, "the same as from disk"

        # what does not fit is received, so that the trainer goes on, and changes nothing
        for names, shapes, word in (([NAME, "no.such"], None, "no place"), ([NAME], [[8, 8]], None), ([NAME], [[4, 16]], "shape")):
            own.send(" ".join(names))
            given = own.announced([NAME])
            if len(names) > 1:
                given = {"names": names, "dtypes": [*given["dtypes"], "torch.float32"], "shapes": [*given["shapes"], [3]]}
            told = engine.update_weights_from_distributed(**{**given, "shapes": shapes or given["shapes"]}, weight_version="bad")
            own.hears("sent")
            assert told[0] == (word is None), told
            assert word is None or word in told[1]
        assert ids_and_cached(engine)[0] == second

        assert engine.destroy_weights_update_group() == (True, "Done.")
        assert not engine.destroy_weights_update_group()[0]
        assert not engine.update_weights_from_distributed(**own.announced([NAME]))[0]


def test_a_trainer_that_dies_is_an_error_and_no_wait(folders: tuple[str, str], trainer: Callable[..., Trainer]) -> None:
    with Engine(model_path=folders[0], max_total_tokens=2048, strict=True) as engine:
        first, _ = ids_and_cached(engine)
        own = trainer()
        meet(engine, own)
        own.close()
        success, _ = engine.update_weights_from_distributed(**own.announced([NAME]))
        assert not success
        assert not engine.destroy_weights_update_group()[0], "its group is left"
        assert ids_and_cached(engine) == (first, 39)


@pytest.mark.nightly
def test_each_rank_takes_its_part(tmp_path: Path, trainer: Callable[..., Trainer]) -> None:
    """Two stages and a trainer: a group of three."""
    first, second = (save_model(tmp_path / name, seed, num_hidden_layers=2) for seed, name in enumerate("ab"))
    own = Trainer(second, 3, "weight_update_group")
    try:
        with Engine(model_path=first, max_total_tokens=2048, pp_size=2, strict=True) as engine:
            meet(engine, own, 3)
            own.send("*")
            assert engine.update_weights_from_distributed(**own.announced(list(own.tensors)))[0]
            updated, _ = ids_and_cached(engine)
            assert engine.update_weights_from_disk(second)[0]
            assert ids_and_cached(engine)[0] == updated
    finally:
        own.close()


@pytest.mark.nightly
def test_each_replica_takes_all(folders: tuple[str, str], trainer: Callable[..., Trainer]) -> None:
    """Two replicas and a trainer: a group of three. A replica that starts again has what was handed over."""
    with Engine(model_path=folders[0], max_total_tokens=2048, dp_size=2, strict=True) as engine:
        first = [ids_and_cached(engine, data_parallel_rank=replica)[0] for replica in range(2)]
        own = trainer(3)
        meet(engine, own, 3)
        own.send("*")
        assert engine.update_weights_from_distributed(**own.announced(list(own.tensors)), weight_version="b")[0]
        second = [ids_and_cached(engine, data_parallel_rank=replica)[0] for replica in range(2)]
        assert first[0] == first[1] != second[0] == second[1]
        assert engine.destroy_weights_update_group()[0]
        victim = next(each for each in psutil.Process().children(recursive=True) if "scheduler" in each.cmdline())
        victim.kill()
        assert [found[0] for found in map(partial(answered, engine), range(2))] == second
        assert engine.update_weights_from_disk(folders[1])[0]
        assert ids_and_cached(engine)[0] == second[0], "the same as from disk"


def answered(engine: Engine, replica: int) -> tuple[list[int], int]:
    """What a replica says as soon as it is up."""
    until = time.monotonic() + TIMEOUT
    while True:
        try:
            return ids_and_cached(engine, data_parallel_rank=replica)
        except RequestError:
            if time.monotonic() > until:
                raise
            time.sleep(0.2)


def test_requests_go_on_while_a_trainer_is_awaited(folders: tuple[str, str]) -> None:
    with Engine(model_path=folders[0], max_total_tokens=2048, strict=True) as engine:
        with socket.create_server(("127.0.0.1", 0)) as nobody:
            port = nobody.getsockname()[1]
        found: list[tuple[bool, str]] = []
        named = {"backend": "gloo", "timeout": 3.0}
        waiting = threading.Thread(target=lambda: found.append(engine.init_weights_update_group("127.0.0.1", port, 1, 2, **named)))
        waiting.start()
        assert len(ids_and_cached(engine)[0]) == 12
        waiting.join(60)
        assert found and not found[0][0]
        for wrong in ({"backend": "x"}, {"master_port": 0}, {"world_size": 1}, {"rank_offset": 0}, {"timeout": 1e9}):
            with pytest.raises(RequestError) as caught:
                engine.init_weights_update_group(
                    **{"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2, **wrong}
                )
            assert caught.value.param == next(iter(wrong))
        announced = {"names": ["a"], "dtypes": ["float32"], "shapes": [[1]]}
        for wrong in ({"names": []}, {"names": ["a", "b"]}, {"shapes": [[-1]]}, {"shapes": [[1 << 40]]}, {"shapes": [[1] * 9]}):
            with pytest.raises(RequestError):
                engine.update_weights_from_distributed(**{**announced, **wrong})
        for more in ({}, {"dtypes": ["complex64"]}):
            assert not engine.update_weights_from_distributed(**{**announced, **more})[0]
        assert engine.get_server_info()["internal_states"][0]["memory_balanced"]
