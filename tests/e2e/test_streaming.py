"""Streams and the text in them: characters, stop strings and special tokens, whatever the chunks."""

from __future__ import annotations

from typing import Any

import pytest
from harness import EOS, SCRIPT
from server import Server

from banyan.managers.tokenizer import Tokenizer

EOT = "<|eot_id|>"


@pytest.fixture(scope="module")
def tokenizer(model: str) -> Tokenizer:
    return Tokenizer.load(model)


def script(ids: list[int]) -> list[int]:
    """The prompt whose answer are these ids."""
    return [SCRIPT, len(ids), *ids]


def deltas(server: Server, ids: list[int], interval: int = 1, **params: Any) -> tuple[list[str], list[int], dict[str, Any]]:
    """Texts of an incremental stream, its ids, its last meta_info."""
    chunks = server.stream(
        input_ids=script(ids), incremental=True, sampling_params={"max_new_tokens": 500, "stream_interval": interval, **params}
    )
    assert [chunk["meta_info"]["finish_reason"] is None for chunk in chunks[:-1]] == [True] * (len(chunks) - 1)
    joined = [id for chunk in chunks for id in chunk["output_ids"]]
    assert chunks[-1]["meta_info"]["completion_tokens"] == len(joined)
    return [chunk["text"] for chunk in chunks], joined, chunks[-1]["meta_info"]


def whole(server: Server, ids: list[int], **params: Any) -> tuple[str, list[int], Any]:
    answer = server.generate(input_ids=script(ids), sampling_params={"max_new_tokens": 500, **params})
    return answer["text"], answer["output_ids"], answer["meta_info"]["finish_reason"]


@pytest.mark.parametrize("interval", [1, 2, 3, 7])
def test_characters_are_never_torn(plain: Server, tokenizer: Tokenizer, interval: int) -> None:
    """ST-04."""
    text = "世界 ď 😀 👩‍👩‍👧 e\u0301 世界"
    ids = tokenizer.encode(text)
    texts, joined, meta = deltas(plain, ids, interval)
    assert "".join(texts) == text
    assert not any("\ufffd" in delta for delta in texts)
    assert joined == [*ids, EOS]
    assert meta["finish_reason"] == {"type": "stop", "matched": EOS}
    cumulative = plain.stream(input_ids=script(ids), sampling_params={"max_new_tokens": 500, "stream_interval": interval})
    assert all(text.startswith(chunk["text"]) for chunk in cumulative)
    assert cumulative[-1]["text"] == text
    assert cumulative[-1]["output_ids"] == joined


@pytest.mark.parametrize("interval", [1, 3])
def test_half_a_character_shows_once_and_at_the_end(plain: Server, tokenizer: Tokenizer, interval: int) -> None:
    """SA-10: whatever keeps a model from ending a character (a banned token, say), no stream shows a part of it before its end."""
    ids = tokenizer.encode("five 😀")
    while "\ufffd" not in tokenizer.decode(ids):
        ids.pop()
    texts, joined, _ = deltas(plain, ids, interval)
    assert joined == [*ids, EOS]
    assert "".join(texts) == "five \ufffd"
    assert not any("\ufffd" in delta for delta in texts[:-1])
    assert whole(plain, ids)[0] == "five \ufffd"


def test_an_openai_stream_joins_to_the_whole(plain: Server, tokenizer: Tokenizer) -> None:
    text = "世界 ď 😀 e\u0301 five"
    chunks = plain.stream("/v1/completions", prompt=script(tokenizer.encode(text)), max_tokens=100)
    texts = [choice["text"] for chunk in chunks for choice in chunk["choices"]]
    assert "".join(texts) == text
    assert not any("\ufffd" in delta for delta in texts)
    assert [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"] if choice["finish_reason"]] == ["stop"]


def test_ids_that_are_replacement_characters_are_streamed(plain: Server, tokenizer: Tokenizer) -> None:
    """ST-02."""
    [broken] = [id for id in range(2, 258) if tokenizer.decode([id]) == "\ufffd"][:1]
    texts, joined, _ = deltas(plain, [broken] * 400)
    assert "".join(texts) == "\ufffd" * 400 == tokenizer.decode(joined[:-1])
    assert sum(map(bool, texts)) > 100


STOPS = ["Observation:", "\nUser:", "</tool_call>", "世界", "ď 😀", "\ufffd", "e", "ver", "👩‍👩"]


@pytest.mark.parametrize("interval", [1, 3])
@pytest.mark.parametrize("stop", STOPS)
def test_no_part_of_a_stop_string_is_streamed(plain: Server, tokenizer: Tokenizer, stop: str, interval: int) -> None:
    """ST-06."""
    ids = tokenizer.encode("a b, " + stop + " six seven")
    texts, joined, meta = deltas(plain, ids, interval, stop=stop)
    assert "".join(texts) == "a b, "
    assert meta["finish_reason"] == {"type": "stop", "matched": stop}
    assert stop in tokenizer.decode(joined)
    assert stop not in tokenizer.decode(joined[:-1])
    assert whole(plain, ids, stop=[stop]) == ("a b, ", joined, meta["finish_reason"])
    texts, kept, _ = deltas(plain, ids, interval, stop=[stop], no_stop_trim=True)
    assert "".join(texts) == "a b, " + stop
    assert kept == joined


@pytest.mark.parametrize(
    ("stops", "answer", "text", "matched"),
    [
        (["five", "five six"], "a five six", "a ", "five"),
        (["five six", "five"], "a five six", "a ", "five"),
        (["six", "five six"], "a five six", "a ", "five six"),  # they end together: the one that starts first
        (["fivefold", "six"], "a five six", "a five ", "six"),
        (["aab"], "aaaab", "aa", "aab"),
        (["b", "b"], "ab", "a", "b"),
        (["", "x"], "ab", "ab", EOS),  # an empty stop string never matches
        ([], "ab", "ab", EOS),
    ],
)
def test_several_stop_strings(plain: Server, tokenizer: Tokenizer, stops: list[str], answer: str, text: str, matched: Any) -> None:
    ids = tokenizer.encode(answer)
    for interval in (1, 2):
        texts, _, meta = deltas(plain, ids, interval, stop=stops)
        assert "".join(texts) == text
        assert meta["finish_reason"] == {"type": "stop", "matched": matched}


@pytest.mark.parametrize("interval", [1, 5])
def test_a_stop_string_of_single_characters_one_per_step(plain: Server, tokenizer: Tokenizer, interval: int) -> None:
    """The longest possible hold: nothing of 60 tokens may be shown, and all of it when the match fails at the end."""
    stop = "ab" * 30
    ids = [id for char in stop[:-1] for id in tokenizer.encode(char)]
    texts, _, meta = deltas(plain, ids, interval, stop=stop)
    assert texts[:-1] == [""] * (len(texts) - 1)
    assert texts[-1] == stop[:-1]
    assert meta["finish_reason"]["matched"] == EOS


@pytest.mark.parametrize("limit", [None, 2])
def test_a_half_matched_stop_is_delivered_at_the_end(plain: Server, tokenizer: Tokenizer, limit: int | None) -> None:
    """ST-08."""
    ids = [*tokenizer.encode("a"), *tokenizer.encode("\n")]
    texts, _, meta = deltas(plain, ids, stop="\n\n", max_new_tokens=limit)
    assert "".join(texts) == "a\n"
    assert meta["finish_reason"] == ({"type": "length", "length": 2} if limit else {"type": "stop", "matched": EOS})


def test_half_a_character_is_delivered_at_the_end_only(plain: Server, tokenizer: Tokenizer) -> None:
    face = tokenizer.encode("😀")
    assert len(face) > 1
    texts, _, _ = deltas(plain, face, max_new_tokens=len(face) - 1)
    assert not any("\ufffd" in text for text in texts[:-1])
    assert "".join(texts).count("\ufffd") == 1


def test_stop_tokens_and_special_tokens(plain: Server, tokenizer: Tokenizer) -> None:
    """ST-12: a stop token whose text is not shown takes none of the text before it along."""
    [eot] = tokenizer.encode(EOT)
    ids = [*tokenizer.encode("injury."), eot]
    cases: list[tuple[dict[str, Any], str, int]] = [
        ({"stop_token_ids": [eot]}, "injury.", eot),
        ({}, "injury.", eot),  # it is an end-of-sequence token of the tokenizer as well
        ({"skip_special_tokens": False}, "injury.", eot),
        ({"skip_special_tokens": False, "no_stop_trim": True}, "injury." + EOT, eot),
        ({"no_stop_trim": True}, "injury.", eot),
        ({"ignore_eos": True, "stop_token_ids": [eot]}, "injury.", eot),
        ({"stop_token_ids": [ids[0], 511, 0]}, "", ids[0]),
        ({"stop_token_ids": ids[1], "no_stop_trim": True}, tokenizer.decode(ids[:2]), ids[1]),
        ({"stop_token_ids": [ids[3]], "stop": ["never"]}, tokenizer.decode(ids[:3]), ids[3]),
    ]
    for params, text, matched in cases:
        texts, joined, meta = deltas(plain, ids, **params)
        assert ("".join(texts), meta["finish_reason"]) == (text, {"type": "stop", "matched": matched}), params
        assert joined[-1] == matched
        assert whole(plain, ids, **params) == (text, joined, meta["finish_reason"])


def test_special_tokens_in_the_middle(plain: Server, tokenizer: Tokenizer) -> None:
    [eot] = tokenizer.encode(EOT)
    ids = [*tokenizer.encode("a"), eot, *tokenizer.encode("b<think>c")]
    limits = {"ignore_eos": True, "max_new_tokens": len(ids)}
    assert "".join(deltas(plain, ids, **limits)[0]) == "ab<think>c"
    assert "".join(deltas(plain, ids, skip_special_tokens=False, **limits)[0]) == f"a{EOT}b<think>c"
    texts, joined, meta = deltas(plain, ids, skip_special_tokens=False, stop=EOT, **limits)
    assert ("".join(texts), joined, meta["finish_reason"]["matched"]) == ("a", ids[:2], EOT)
    assert deltas(plain, ids, stop=EOT, **limits)[2]["finish_reason"]["type"] == "length"  # not in the visible text


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_stop_string_loses_to_no_token_behind_it(plain: Server, tokenizer: Tokenizer, number: int) -> None:
    """A stop string that is completed by the last token that is allowed is a stop; one token fewer is a length."""
    ids = tokenizer.encode("one Observation:")
    _, joined, meta = deltas(plain, ids, stop="Observation:", max_new_tokens=len(ids) - number)
    assert meta["finish_reason"]["type"] == ("stop" if number == 0 else "length")
    assert joined == ids[: len(ids) - number]


def test_min_new_tokens_holds_off_tokens_and_not_strings(plain: Server, tokenizer: Tokenizer) -> None:
    """SA-08."""
    ids = tokenizer.encode("ab")
    banned = [EOS, 1, *tokenizer.encode(EOT)]
    for stream in (False, True):
        body: dict[str, Any] = {"input_ids": script(ids), "sampling_params": {"min_new_tokens": 6, "max_new_tokens": 10}}
        answer = plain.stream(**body)[-1] if stream else plain.generate(**body)
        assert answer["output_ids"][:2] == ids
        assert not set(answer["output_ids"][:6]) & set(banned)
    assert whole(plain, ids, min_new_tokens=2)[1] == [*ids, EOS]


@pytest.mark.parametrize("interval", [1, 4])
def test_batches_and_choices_stream_side_by_side(server: Server, interval: int) -> None:
    texts = ["the quick", "brown fox", "the lazy dog"]
    params = {"max_new_tokens": 30, "temperature": 0, "ignore_eos": True, "stream_interval": interval, "n": 2}
    expected = server.generate(text=texts, sampling_params=params)
    for incremental in (False, True):
        chunks = server.stream(text=texts, sampling_params=params, incremental=incremental)
        found: dict[int, dict[str, Any]] = {}
        for chunk in chunks:
            index = chunk.pop("index")
            assert found.get(index, chunk)["meta_info"]["finish_reason"] is None or index not in found, "output after the end"
            if incremental and index in found:
                chunk["text"] = found[index]["text"] + chunk["text"]
                chunk["output_ids"] = found[index]["output_ids"] + chunk["output_ids"]
            found[index] = chunk
        assert sorted(found) == list(range(6))
        for index, item in enumerate(expected):
            assert found[index]["text"] == item["text"]
            assert found[index]["output_ids"] == item["output_ids"]
            assert found[index]["meta_info"]["finish_reason"] == {"type": "length", "length": 30}


def test_a_stream_is_one_chunk_per_interval(plain: Server, tokenizer: Tokenizer) -> None:
    """Tokens 1, 4, 7, ... and the last; the consumer may see them merged, but never out of order."""
    ids = tokenizer.encode("abcdefghij")
    chunks = plain.stream(input_ids=script(ids), sampling_params={"max_new_tokens": 500, "stream_interval": 3})
    counts = [chunk["meta_info"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(set(counts))
    assert set(counts) <= {1, 4, 7, 10, len(ids) + 1}
    assert counts[-1] == len(ids) + 1
