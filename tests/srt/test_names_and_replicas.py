"""Several names of one model, and requests that name their replica."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
ROUTES = [("/generate", {"text": "a"}), ("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", CHAT)]


@pytest.fixture
def named(served: Any) -> Any:
    served.manager.config = msgspec.structs.replace(served.manager.config, served_aliases=["other"])
    return served


def test_each_name_is_listed_and_served(named: Any) -> None:
    cards = named.client.get("/v1/models").json()["data"]
    assert [(card["id"], card["root"]) for card in cards] == [("small", "smollm2"), ("other", "smollm2")]
    assert named.client.get("/v1/models/other").json()["id"] == "other"
    assert named.client.get("/v1/models/others").status_code == 404
    for model, told in ((None, "small"), ("default", "small"), ("small", "small"), ("other", "other"), ("smollm2", "smollm2")):
        assert named.client.post("/v1/chat/completions", json={**CHAT, "model": model}).json()["model"] == told
    assert named.client.post("/v1/completions", json={"prompt": "a", "model": "another"}).status_code == 404


def test_names_behind_commas() -> None:
    from banyan.srt.server_args import ServerArgs

    args = ServerArgs.from_kwargs({"served_model_name": "a, b,a,,c"})
    assert (args.served_name, args.served_names) == ("a", ["a", "b", "c"])
    assert ServerArgs.from_kwargs({"served_model_name": ","}).served_names == [args.model_path]


@pytest.fixture
def replicated(served: Any) -> Iterator[Any]:
    validator = served.manager.validator
    validator._info = msgspec.structs.replace(validator._info, dp_size=3)
    yield served


@pytest.mark.parametrize(("path", "body"), ROUTES)
@pytest.mark.parametrize("name", ["data_parallel_rank", "routed_dp_rank"])
def test_a_replica_may_be_named(replicated: Any, path: str, body: dict[str, Any], name: str) -> None:
    client = replicated.client
    assert client.post(path, json={**body, name: 2}).status_code == 200
    assert client.post(path, json={**body, name: 2}, headers={"X-Data-Parallel-Rank": "1"}).status_code == 200
    assert [message.data_parallel_rank for message in replicated.manager.seen] == [2, 1]
    for wrong in (3, -1, "1", 1.5, 1 << 70):
        reply = client.post(path, json={**body, name: wrong})
        assert reply.status_code == 400, wrong
    for header in ("3", "-1", "x", "", "9" * 40):
        reply = client.post(path, json=body, headers={"X-Data-Parallel-Rank": header})
        assert reply.status_code == 400, header


def test_hidden_states_need_their_option(served: Any) -> None:
    for path, body in ROUTES:
        for wanted in (True, "last"):
            reply = served.client.post(path, json={**body, "return_hidden_states": wanted})
            assert (reply.status_code, reply.json()["error"]["param"]) == (400, "return_hidden_states")
        reply = served.client.post(path, json={**body, "return_hidden_states": "first"})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "return_hidden_states")
