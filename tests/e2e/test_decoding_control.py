"""Log-probabilities and stops by pattern over HTTP: aligned with ids and text, in streams as in whole answers."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import EOS, SCRIPT, VOCAB
from server import Server, answer_of

from banyan.managers.tokenizer import Tokenizer
from banyan.model_executor.oracle import fake_logprob

TEXT = "世界 ď 😀 e\u0301 five six"


@pytest.fixture(scope="module")
def tokenizer(model: str) -> Tokenizer:
    return Tokenizer.load(model)


def script(ids: list[int]) -> list[int]:
    """The prompt whose answer are these ids."""
    return [SCRIPT, len(ids), *ids]


def value(position: int, token: int) -> float:
    return float(fake_logprob(position, np.array([token]))[0])


def triples(tokens: list[int], first: int) -> list[list[Any]]:
    return [[value(first + index, token), token, None] for index, token in enumerate(tokens)]


def joined(parts: Iterable[list[Any]]) -> list[Any]:
    return list(itertools.chain.from_iterable(parts))


def finite(found: Any) -> bool:
    if isinstance(found, dict):
        return all(finite(item) for item in found.values())
    if isinstance(found, list):
        return all(finite(item) for item in found)
    return not isinstance(found, float) or math.isfinite(found)


@pytest.mark.parametrize("start", [-1, 0, 1, 5, "end"])
def test_native_arrays(server: Server, tokenizer: Tokenizer, start: Any) -> None:
    prompt = script(tokenizer.encode(TEXT))
    begin = len(prompt) - 1 if start in (-1, "end") else start  # with token_ids_logprob the last token has an entry, without values
    without = 0 if begin == start else begin
    answer = server.generate(
        input_ids=prompt,
        return_logprob=True,
        logprob_start_len=len(prompt) if start == "end" else start,
        top_logprobs_num=2,
        token_ids_logprob=[5, VOCAB - 1],
        return_text_in_logprobs=True,
    )
    meta, ids = answer["meta_info"], answer["output_ids"]
    assert ids == [*prompt[2:], EOS]
    given = [[lp, id, None] for lp, id, _ in meta["output_token_logprobs"]]
    assert given == triples(ids, len(prompt))
    assert meta["output_token_logprobs_length"] == len(ids)
    texts = [text for _, _, text in meta["output_token_logprobs"]]
    table = tokenizer.byte_table
    assert table is not None
    assert texts == [table.tokens[id].decode(errors="replace") for id in ids]
    inputs = meta["input_token_logprobs"]
    assert [id for _, id, _ in inputs] == prompt[begin:]
    assert [lp for lp, _, _ in inputs] == [value(i, prompt[i]) if i != without else None for i in range(begin, len(prompt))]
    for side, first in (("input", begin), ("output", len(prompt))):
        for index, (top, named) in enumerate(zip(meta[f"{side}_top_logprobs"], meta[f"{side}_token_ids_logprobs"], strict=True)):
            if (side, first + index) == ("input", without):
                assert top is named is None
                continue
            assert [pair[:2] for pair in named] == [[value(first + index, id), id] for id in (5, VOCAB - 1)]
            assert len(top) == 2
            assert top[0][0] >= top[1][0] == value(first + index, top[1][1])
    assert finite(meta)


@pytest.mark.parametrize("incremental", [False, True])
@pytest.mark.parametrize("interval", [1, 3])
def test_streams_say_the_same(server: Server, tokenizer: Tokenizer, incremental: bool, interval: int) -> None:
    """LP-08: a prompt of several chunks, and one entry per token."""
    prompt = script(tokenizer.encode(TEXT * 3))
    body = {"input_ids": prompt, "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 1}
    params = {"max_new_tokens": 100, "stop": ["five"]}
    whole = server.generate(**body, sampling_params=params)
    chunks = server.stream(**body, sampling_params={**params, "stream_interval": interval}, incremental=incremental)
    for name in ("output_token_logprobs", "output_top_logprobs"):
        expected = whole["meta_info"][name]
        parts = [chunk["meta_info"][name] for chunk in chunks]
        assert [len(part) for part in parts] == [len(chunk["output_ids"]) for chunk in chunks]
        assert (joined(parts) if incremental else parts[-1]) == expected
        if not incremental:
            assert all(part == expected[: len(part)] for part in parts)
    inputs = [chunk["meta_info"]["input_token_logprobs"] for chunk in chunks]
    assert inputs[0] == whole["meta_info"]["input_token_logprobs"]
    assert inputs[1:] == ([[]] if incremental else [inputs[0]]) * (len(chunks) - 1)


def test_batches_may_differ_per_prompt(plain: Server) -> None:
    first, second = plain.generate(
        input_ids=[[5, 6, 7], [8, 9]],
        return_logprob=[True, False],
        logprob_start_len=[1, -1],
        token_ids_logprob=[[3], None],
        sampling_params={"max_new_tokens": 0},
    )
    assert first["meta_info"]["input_token_logprobs"] == triples([6, 7], 1)
    assert first["meta_info"]["output_token_logprobs"] == []
    assert [len(item) for item in first["meta_info"]["input_token_ids_logprobs"]] == [1, 1]
    assert "input_token_logprobs" not in second["meta_info"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("num", [0, 2])
@pytest.mark.parametrize("as_ids", [False, True])
def test_completions_with_echo(server: Server, tokenizer: Tokenizer, stream: bool, num: int, as_ids: bool) -> None:
    """LP-06: 0 is the chosen token's alone. Offsets lead to each token's text."""
    ids = tokenizer.encode(TEXT)
    body = {"prompt": ids if as_ids else TEXT, "max_tokens": 5, "logprobs": num, "echo": True, "ignore_eos": True, "temperature": 0}
    if stream:
        choices = [choice for chunk in server.stream("/v1/completions", **body) for choice in chunk["choices"]]
    else:
        choices = answer_of(server.post(body, "/v1/completions"))["choices"]
    text = "".join(choice["text"] for choice in choices)
    parts = [choice["logprobs"] for choice in choices]
    columns = {name: joined(part[name] or [] for part in parts) for name in parts[0]}
    assert text.startswith(TEXT)
    assert columns["token_logprobs"][0] is None
    assert columns["token_logprobs"][1 : len(ids)] == [value(i, ids[i]) for i in range(1, len(ids))]
    assert len(columns["token_logprobs"]) == len(columns["tokens"]) == len(columns["text_offset"]) == len(ids) + 5
    for token, offset in zip(columns["tokens"], columns["text_offset"], strict=True):
        assert "\ufffd" in token or text[offset : offset + len(token)] == token
    if num:
        assert columns["top_logprobs"][0] is None
        assert all(2 <= len(top) <= 3 for top in columns["top_logprobs"][1:])
    else:
        assert all(part["top_logprobs"] is None for part in parts)
    assert finite(columns)


def test_chat(start: Callable[..., Server], tmp_path: Path, tokenizer: Tokenizer) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text("{% for message in messages %}{{ message['content'] }}{% endfor %}")
    server = start("--chat-template", str(template))
    server.wait_ready()
    for stream in (False, True):
        check_chat(server, tokenizer, stream)
    server.terminate()


def check_chat(server: Server, tokenizer: Tokenizer, stream: bool) -> None:
    body = {
        "model": "default",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 6,
        "logprobs": True,
        "top_logprobs": 2,
    }
    body |= {"ignore_eos": True, "temperature": 0, "return_token_ids": True}
    if stream:
        choices = [choice for chunk in server.stream("/v1/chat/completions", **body) for choice in chunk["choices"]]
    else:
        choices = answer_of(server.post(body, "/v1/chat/completions"))["choices"]
    content = [entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["content"]]
    ids = [id for choice in choices for id in choice.get("token_ids", [])]
    assert len(content) == len(ids) == 6
    table = tokenizer.byte_table
    assert table is not None
    for entry, id in zip(content, ids, strict=True):
        assert entry["bytes"] == list(table.tokens[id] if id < len(table.tokens) else b"")
        assert [top["logprob"] for top in entry["top_logprobs"]] == sorted(
            (t["logprob"] for t in entry["top_logprobs"]), reverse=True
        )
    assert finite(content)


PROCESSOR = """
class Countdown:
    def __init__(self, params):
        self.start = params["start"]
    def __call__(self, prompt_ids, output_ids, logits_V):
        logits_V.fill_(float("-inf"))
        logits_V[self.start - len(output_ids)] = 0
        return logits_V
"""


def test_controls_with_weights(start: Callable[..., Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SA-06 and logit processors, over random weights."""
    (tmp_path / "countdown.py").write_text(PROCESSOR)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    server = start("--logit-processors", '{"countdown": "countdown:Countdown"}', load_format="dummy")
    server.wait_ready()
    body = {"prompt": [5, 6], "max_tokens": 4, "temperature": 0, "return_token_ids": True, "ignore_eos": True}
    for more, expected in (
        ({"logit_bias": {"123": 100}}, [123] * 4),
        ({"allowed_token_ids": [7], "logit_bias": {"123": 100}}, [7] * 4),
    ):
        (choice,) = answer_of(server.post({**body, **more}, "/v1/completions"))["choices"]
        assert choice["token_ids"] == expected
    (free,) = answer_of(server.post(body, "/v1/completions"))["choices"]
    banned = {"logit_bias": {str(free["token_ids"][0]): -100}}
    (choice,) = answer_of(server.post({**body, **banned}, "/v1/completions"))["choices"]
    assert free["token_ids"][0] not in choice["token_ids"]
    params = {"max_new_tokens": 5, "custom_params": {"start": 99}, "ignore_eos": True}
    answer = server.generate(input_ids=[4], custom_logit_processor="countdown", sampling_params=params)
    assert answer["output_ids"] == [99, 98, 97, 96, 95]
    broken = server.post({"input_ids": [4], "custom_logit_processor": "countdown", "sampling_params": {"max_new_tokens": 5}})
    assert broken.status_code == 500
    nothing = {"allowed_token_ids": [EOS], "min_new_tokens": 2}
    assert server.post({"input_ids": [4], "sampling_params": nothing}).status_code == 400
    server.check()
    server.terminate()


def test_without_asking_there_is_nothing(plain: Server) -> None:
    assert answer_of(plain.post({"prompt": "a", "max_tokens": 2}, "/v1/completions"))["choices"][0]["logprobs"] is None
    assert not [name for name in plain.generate(text="a")["meta_info"] if "logprob" in name]


@pytest.mark.parametrize("interval", [1, 2, 7])
@pytest.mark.parametrize("trim", [True, False])
def test_stop_pattern(server: Server, tokenizer: Tokenizer, interval: int, trim: bool) -> None:
    text = "User: hello, the end. 12 34 five 12345 six"
    prompt = script(tokenizer.encode(text))
    params = {"max_new_tokens": 200, "stop_regex": [r"\d{4}", "nev+er"], "no_stop_trim": not trim, "stream_interval": interval}
    shown = "User: hello, the end. 12 34 five " + ("" if trim else "1234")
    answer = server.generate(input_ids=prompt, sampling_params=params)
    assert answer["text"] == shown
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": r"\d{4}"}
    chunks = server.stream(input_ids=prompt, sampling_params=params, incremental=True)
    assert "".join(chunk["text"] for chunk in chunks) == shown
    assert joined(chunk["output_ids"] for chunk in chunks) == answer["output_ids"]
