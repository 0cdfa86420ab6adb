"""The tokenizer of SmolLM2 over the token oracle: the ids that other engines stumbled over."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from server import Server, running

pytestmark = pytest.mark.model

VOCAB = 49152
EOS = 2
FACE = [10813, 242, 218]  # an emoji of three tokens
WORLD = [7906, 240, 178, 239, 230]
STOPS = {"Observation:": [23143, 2903, 42], "\nUser:": [198, 11126, 42], "</tool_call>": [9617, 19324, 79, 4350, 46]}


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running("smollm2", tmp_path_factory.mktemp("s")) as server:
        yield server


def deltas(server: Server, ids: list[int], **params: Any) -> tuple[list[str], dict[str, Any]]:
    chunks = server.stream(
        input_ids=[VOCAB - 1, len(ids), *ids], incremental=True, sampling_params={"max_new_tokens": 600, **params}
    )
    return [chunk["text"] for chunk in chunks], chunks[-1]["meta_info"]["finish_reason"]


@pytest.mark.parametrize("interval", [1, 2, 3, 7])
def test_characters(smollm2: Server, interval: int) -> None:
    ids = [*WORLD, 216, 143, 233, *FACE, 85, 151, 219]
    texts, reason = deltas(smollm2, ids, stream_interval=interval)
    assert "".join(texts) == "世界 ď😀e\u0301"
    assert not any("\ufffd" in text for text in texts)
    assert reason == {"type": "stop", "matched": EOS}


def test_broken_and_literal_replacement_characters(smollm2: Server) -> None:
    texts, _ = deltas(smollm2, [111] * 400)
    assert "".join(texts) == "\ufffd" * 400
    assert sum(map(bool, texts)) > 100
    assert "".join(deltas(smollm2, [24211] * 3)[0]) == "\ufffd" * 3


@pytest.mark.parametrize("stop", STOPS)
def test_stop_strings_over_tokens(smollm2: Server, stop: str) -> None:
    for interval in (1, 2):
        texts, reason = deltas(smollm2, [*WORLD, *STOPS[stop], *FACE], stop=[stop], stream_interval=interval)
        assert ("".join(texts), reason) == ("世界", {"type": "stop", "matched": stop})
        texts, reason = deltas(smollm2, [*WORLD, *STOPS[stop][:-1]], stop=[stop], stream_interval=interval)
        assert ("".join(texts), reason) == ("世界" + stop[:-1], {"type": "stop", "matched": EOS})


def test_half_a_newline_pair_and_the_skipped_end(smollm2: Server) -> None:
    assert "".join(deltas(smollm2, [*WORLD, 198], stop="\n\n")[0]) == "世界\n"
    texts, reason = deltas(smollm2, [*WORLD, EOS], stop_token_ids=[EOS])
    assert ("".join(texts), reason) == ("世界", {"type": "stop", "matched": EOS})


def test_chat_over_the_oracle(smollm2: Server) -> None:
    """Content as a string or as parts gives the same prompt, so the same answer; stream and whole agree."""
    body: dict[str, Any] = {"max_tokens": 12, "temperature": 0, "messages": [{"role": "user", "content": "hi"}]}
    parts = {**body, "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]}
    answers = [smollm2.post(each, "/v1/chat/completions").json() for each in (body, parts)]
    texts = [answer["choices"][0]["message"]["content"] for answer in answers]
    chunks = smollm2.stream("/v1/chat/completions", **body)
    joined = "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])
    assert texts == [joined, joined]
    for content in ([{"type": "image_url", "image_url": {"url": "x"}}], 5):
        reply = smollm2.post({**body, "messages": [{"role": "user", "content": content}]}, "/v1/chat/completions")
        assert reply.status_code == 400, reply.text
    smollm2.check()
