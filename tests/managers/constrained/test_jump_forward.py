"""Jump-forward: forced text becomes the tokenizer's own tokens, computed in one step, and nothing else about an output changes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from grammars import FIRST, WORDS, grammar
from harness import EOS, VOCAB, Harness, prompt_of

from banyan.managers.constrained.constraint import Constraint
from banyan.managers.constrained.grammar import Vocabulary, create_backend
from banyan.managers.constrained.jump_forward import JumpForward, stable_length
from banyan.managers.io_struct import LogprobParams

PAIRS = {b"na": 300, b"me": 301, b"name": 302, b'":': 303, b' "': 304, b'{"': 305, b'"name': 306, b'","': 307}
BYTES = list(WORDS.tokens)
for _data, _id in PAIRS.items():
    BYTES[_id] = _data
MERGED = Vocabulary(tokens=BYTES, stop_ids=(EOS,))
PERSON = json.dumps(
    {
        "type": "object",
        "properties": {
            "name": {"enum": ["ann", "bo"]},
            "nickname": {"type": "string", "maxLength": 3},
            "years": {"type": "integer"},
        },
        "required": ["name", "nickname", "years"],
    }
)


def encode_bytes(text: str) -> list[int]:
    return [FIRST + byte for byte in text.encode()]


def encode_pairs(text: str) -> list[int]:
    """The longest token first."""
    data, ids = text.encode(), []
    while data:
        size = max(size for size in range(1, 6) if data[:size] in PAIRS or size == 1)
        ids.append(PAIRS.get(data[:size], FIRST + data[0]))
        data = data[size:]
    return ids


def merged_grammar(kind: str, text: str, backend: str = "xgrammar") -> Any:
    library = create_backend(backend, MERGED)
    return library.load(library.compile(kind, text))


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("", ""),
        ("name", ""),
        ('{"name": "', '{"name":'),
        ('", "years": ', '", "years":'),
        ('{"a": 12', '{"a":'),
        ('x, "nam', "x, "),
        ("one two", "one"),
        ("größe=", "größe"),
        ("a\n\n", "a"),
    ],
)
def test_what_a_continuation_could_change_is_left_out(text: str, kept: str) -> None:
    assert text[: stable_length(text)] == kept


@pytest.mark.parametrize("backend", ["xgrammar", "llguidance"])
def test_forced_text_becomes_the_tokenizers_tokens(backend: str) -> None:
    jumper = JumpForward(encode_pairs, BYTES)
    matcher = merged_grammar("json_schema", PERSON, backend).matcher()
    ids = jumper.tokens(matcher, encode_pairs("x: "))
    assert ids == [PAIRS[b'{"'], PAIRS[b"name"], PAIRS[b'":']]
    for token_id in ids:
        assert matcher.accept(token_id)
    assert matcher.forced_text() == ' "', "the look has not moved the matcher"


def test_no_jump_where_a_token_would_reach_across_its_beginning() -> None:
    """Behind a quote sampled alone the tokenizer would write quote and name as one token."""
    jumper = JumpForward(encode_pairs, BYTES)
    matcher = merged_grammar("json_schema", PERSON).matcher()
    assert all(matcher.accept(token_id) for token_id in encode_bytes("{"))
    assert jumper.tokens(matcher, encode_bytes("{")) == []
    matcher = merged_grammar("json_schema", PERSON).matcher()
    assert matcher.accept(PAIRS[b'{"'])
    assert jumper.tokens(matcher, [PAIRS[b'{"']]) == [PAIRS[b"name"], PAIRS[b'":']]


def test_no_jump_behind_half_a_character() -> None:
    jumper = JumpForward(encode_bytes, WORDS.tokens)
    matcher = grammar("regex", "öabc: x").matcher()
    half = encode_bytes("ö")[:1]
    assert matcher.accept(half[0])
    assert jumper.tokens(matcher, half) == []
    assert jumper.tokens(grammar("regex", "öabc: x").matcher(), encode_bytes("öx")[1:]) == encode_bytes("öabc:")


def test_one_token_is_no_jump() -> None:
    jumper = JumpForward(encode_pairs, BYTES)
    matcher = merged_grammar("regex", "(name=[ab])|(name=[0-9])").matcher()
    assert jumper.tokens(matcher, []) == []


class Counted:
    """Counts the steps of a harness' runner and the tokens that they compute."""

    def __init__(self, harness: Harness) -> None:
        self.num_steps, self.lens = 0, []
        self._launch = harness.runner.launch
        harness.runner.launch = self.launch

    def launch(self, step: Any) -> Any:
        self.num_steps += 1
        self.lens.append(int(step.extend_lens.max()))
        return self._launch(step)


def run(harness: Harness, *, jumps: bool, **options: Any) -> dict[str, list[int]]:
    """Three constrained requests beside three free ones. With one byte per token a jump cannot change the text."""
    compiled = grammar("json_schema", PERSON)
    jumper = JumpForward(encode_bytes, WORDS.tokens) if jumps else None
    for seed in range(3):
        harness.submit(f"g{seed}", prompt_of(seed, 20), **{"max_new_tokens": 90, **options})
        harness.scheduler.live[f"g{seed}"].constraint = Constraint(compiled.matcher(), WORDS.stop_ids, jumper=jumper)
        harness.submit(f"free{seed}", prompt_of(seed + 50, 40), max_new_tokens=30, ignore_eos=True)
    harness.drain()
    return dict(harness.ids)


CASES: Sequence[dict[str, Any]] = (
    {},
    {"faults": {"retract_every": 4}},
    {"chunked_prefill_size": 16, "faults": {"alloc_fail": 0.3}},
    {"enable_mixed_chunk": True, "chunked_prefill_size": 16},
    {"total": 320},
    {"disable_radix_cache": True},
)


@pytest.mark.parametrize("case", range(len(CASES)))
def test_outputs_are_those_without_jumps(make: Any, case: int) -> None:
    plain, harness = run(make(), jumps=False), make(**CASES[case])
    counted = Counted(harness)
    assert run(harness, jumps=True) == plain
    assert max(counted.lens) > 1
    for seed in range(3):
        text = bytes(token - FIRST for token in plain[f"g{seed}"] if token != EOS).decode()
        assert text.startswith('{"name": "')


def test_a_jump_saves_steps(make: Any) -> None:
    steps = []
    for jumps in (False, True):
        harness = make()
        counted = Counted(harness)
        harness.submit("g", prompt_of(1, 20), max_new_tokens=90)
        jumper = JumpForward(encode_bytes, WORDS.tokens) if jumps else None
        matcher = grammar("regex", '\\{"a_long_fixed_key": [0-9]{3}\\}').matcher()
        harness.scheduler.live["g"].constraint = Constraint(matcher, WORDS.stop_ids, jumper=jumper)
        harness.drain()
        steps.append(counted.num_steps)
        assert len(harness.ids["g"]) == 26
    assert steps[1] <= steps[0] - 15


@pytest.mark.parametrize("limit", [1, 2, 9, 10, 11, 17])
def test_limits_cut_a_jump(make: Any, limit: int) -> None:
    outputs = []
    for jumps in (False, True):
        harness = make()
        run(harness, jumps=jumps, max_new_tokens=limit)
        outputs.append((harness.ids, {rid: reason.kind for rid, reason in harness.reasons.items()}))
    assert outputs[0] == outputs[1]


def test_a_stop_token_inside_a_jump_ends_the_request(make: Any) -> None:
    """ST-14: ids end with the token that ended it, whatever was appended behind it."""
    outputs = []
    for jumps in (False, True):
        harness = make()
        run(harness, jumps=jumps, stop_token_ids=[FIRST + ord("k")])
        outputs.append(dict(harness.ids))
        assert bytes(token - FIRST for token in harness.ids["g0"]).endswith(b'"nick')
        assert harness.reasons["g0"].matched == FIRST + ord("k")
    assert outputs[0] == outputs[1]


class StopAt:
    """A stop string over bytes, as the stop checker finds it."""

    def __init__(self, stop: bytes) -> None:
        self._stop, self._text = stop, b""

    def push(self, token_id: int) -> str | None:
        self._text += WORDS.tokens[token_id]
        return self._stop.decode() if self._text.endswith(self._stop) else None


def test_a_stop_string_that_ends_inside_a_jump_ends_the_request_there(make: Any) -> None:
    """ST-14: none of the ids behind it is told."""
    compiled, stop, outputs = grammar("json_schema", PERSON), b'"nickn', []
    for jumps in (False, True):
        harness = make()
        counted = Counted(harness)
        harness.submit("g", prompt_of(1, 20), max_new_tokens=90)
        jumper = JumpForward(encode_bytes, WORDS.tokens) if jumps else None
        harness.scheduler.live["g"].constraint = Constraint(compiled.matcher(), WORDS.stop_ids, jumper=jumper)
        harness.scheduler.live["g"].stop_checker = StopAt(stop)  # type: ignore[assignment]
        harness.turn()
        harness.drain()
        outputs.append((harness.ids["g"], counted.num_steps))
        assert bytes(token - FIRST for token in harness.ids["g"]).endswith(stop)
        assert harness.reasons["g"].matched == stop.decode()
    assert outputs[0][0] == outputs[1][0]
    assert outputs[1][1] < outputs[0][1], "there was a jump"


def test_aborts_amid_a_jump(make: Any) -> None:
    compiled = grammar("regex", '\\{"a_long_fixed_key": [0-9]{3}\\}')
    jumper = JumpForward(encode_bytes, WORDS.tokens)
    for turns in range(9):
        harness = make()
        harness.submit("g", prompt_of(1, 20), max_new_tokens=90)
        harness.scheduler.live["g"].constraint = Constraint(compiled.matcher(), WORDS.stop_ids, jumper=jumper)
        harness.turn(turns)
        harness.abort("g")
        harness.submit("free", prompt_of(2, 20), max_new_tokens=20, ignore_eos=True)
        harness.drain()
        assert len(harness.ids["free"]) == 20


@pytest.mark.parametrize("option", [{"logprobs": LogprobParams(start_len=0)}, {"repetition_penalty": 1.1}])
def test_rows_whose_every_token_needs_its_logits_do_not_jump(make: Any, option: dict[str, Any]) -> None:
    harness = make()
    counted = Counted(harness)
    harness.submit("g", prompt_of(1, 1), max_new_tokens=30, **option)
    matcher = grammar("regex", "abcdefgh: [0-9]").matcher()
    jumper = JumpForward(encode_bytes, WORDS.tokens)
    harness.scheduler.live["g"].constraint = Constraint(matcher, WORDS.stop_ids, jumper=jumper)
    harness.drain()
    assert max(counted.lens) == 1 and len(harness.ids["g"]) >= 11
    assert np.all(np.array(harness.ids["g"]) < VOCAB)
