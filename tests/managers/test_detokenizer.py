from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizers import byte_fallback_folder, byte_level_folder, metaspace_folder

from banyan.managers.detokenizer import Detokenizer, StopChecker, TextDecoder
from banyan.managers.io_struct import DecodeOptions, FinishReason, TextOutput, TokenOutput, pack_ids, unpack_ids
from banyan.managers.sampling_params import SamplingParams
from banyan.managers.tokenizer import Tokenizer

ids_lists = st.lists(st.integers(0, 330), max_size=24)
cut_lists = st.lists(st.integers(1, 5), min_size=1, max_size=24)
LENGTH = FinishReason(kind="length", length=9)
EOS = FinishReason(kind="stop", matched=1)


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(str(byte_level_folder(tmp_path_factory.mktemp("byte_level"))))


@pytest.fixture(scope="module")
def byte_fallback(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(str(byte_fallback_folder(tmp_path_factory.mktemp("byte_fallback"))))


@pytest.fixture(scope="module")
def metaspace(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(str(metaspace_folder(tmp_path_factory.mktemp("metaspace"))))


def chunks(ids: Sequence[int], cuts: Sequence[int]) -> list[list[int]]:
    parts, start, turn = [], 0, 0
    while start < len(ids):
        size = cuts[turn % len(cuts)]
        parts.append(list(ids[start : start + size]))
        start, turn = start + size, turn + 1
    return parts


def stream(tokenizer: Tokenizer, parts: list[list[int]], *, skip: bool = True) -> list[str]:
    decoder = TextDecoder(tokenizer, skip_special_tokens=skip)
    return [*[decoder.push(part) for part in parts], decoder.finish()]


def through_window(tokenizer: Tokenizer) -> Tokenizer:
    """The same tokenizer, as if its decoder were of an unknown kind."""
    other = Tokenizer(
        tokens=tokenizer.tokens, special_ids=tokenizer.special_ids, decoder={"type": "CTC"}, build=lambda: tokenizer.backend
    )
    assert other.byte_table is None
    return other


# --- text decoding ----------------------------------------------------------------------------------------------------------------


@settings(max_examples=150)
@given(ids=ids_lists, cuts=cut_lists, skip=st.booleans())
def test_byte_level_deltas_join_to_the_librarys_text(byte_level: Tokenizer, ids: list[int], cuts: list[int], skip: bool) -> None:
    whole = byte_level.backend.decode([id for id in ids if id < byte_level.vocab_size], skip_special_tokens=skip)
    assert byte_level.decode(ids, skip_special_tokens=skip) == whole
    assert "".join(stream(byte_level, chunks(ids, cuts), skip=skip)) == whole


@settings(max_examples=150)
@given(ids=ids_lists, cuts=cut_lists, skip=st.booleans())
def test_window_deltas_join_to_the_librarys_text(byte_level: Tokenizer, ids: list[int], cuts: list[int], skip: bool) -> None:
    tokenizer = through_window(byte_level)
    assert "".join(stream(tokenizer, chunks(ids, cuts), skip=skip)) == tokenizer.decode(ids, skip_special_tokens=skip)


@settings(max_examples=100)
@given(ids=st.lists(st.integers(0, 8), max_size=24), cuts=cut_lists, skip=st.booleans())
def test_metaspace_deltas_join_to_the_librarys_text(metaspace: Tokenizer, ids: list[int], cuts: list[int], skip: bool) -> None:
    assert metaspace.byte_table is None
    whole = metaspace.backend.decode(ids, skip_special_tokens=skip)
    assert "".join(stream(metaspace, chunks(ids, cuts), skip=skip)) == whole


@settings(max_examples=200)
@given(ids=st.lists(st.one_of(st.integers(255, 290), st.integers(0, 290)), max_size=24), cuts=cut_lists, skip=st.booleans())
def test_byte_fallback_deltas_join_to_decode(byte_fallback: Tokenizer, ids: list[int], cuts: list[int], skip: bool) -> None:
    whole = byte_fallback.decode(ids, skip_special_tokens=skip)
    assert "".join(stream(byte_fallback, chunks(ids, cuts), skip=skip)) == whole
    if "\ufffd" not in byte_fallback.backend.decode(ids, skip_special_tokens=skip):
        assert whole == byte_fallback.backend.decode(ids, skip_special_tokens=skip)


@settings(max_examples=100)
@given(st.lists(st.integers(3, 258), max_size=12))
def test_each_invalid_byte_is_one_replacement_character(byte_fallback: Tokenizer, ids: list[int]) -> None:
    data = bytes(id - 3 for id in ids)
    text = byte_fallback.decode([260, *ids])  # "h" first: no space to strip
    valid = data.decode("utf-8", "ignore")
    assert text.removeprefix("h").replace("\ufffd", "") == valid.replace("\ufffd", "")
    assert text.count("\ufffd") == len(data) - len(valid.encode()) + valid.count("\ufffd")


@pytest.mark.parametrize("text", ["世界 ď 😀 👩‍👩‍👧", "e\u0301 über\n", "plain"])
@pytest.mark.parametrize("size", [1, 2, 3, 7])
@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "window"])
def test_no_replacement_character_in_any_delta_of_valid_text(
    byte_level: Tokenizer, byte_fallback: Tokenizer, kind: str, size: int, text: str
) -> None:
    tokenizer = {"byte_level": byte_level, "byte_fallback": byte_fallback, "window": through_window(byte_level)}[kind]
    deltas = stream(tokenizer, chunks(tokenizer.encode(text), [size]))
    assert "".join(deltas) == text
    assert not any("\ufffd" in delta for delta in deltas)
    assert deltas[-1] == ""  # nothing was left for the flush


def test_the_leading_space_goes_only_at_the_very_start(byte_fallback: Tokenizer) -> None:
    hi = byte_fallback.encode("hi", add_special_tokens=False)
    assert stream(byte_fallback, [[1], hi, hi]) == ["", "hi", " hi", ""]
    assert "".join(stream(byte_fallback, [[1], hi, hi], skip=False)) == "<s> hi hi"


@pytest.mark.parametrize("kind", ["byte_level", "window"])
def test_a_run_of_lone_bytes_streams(byte_level: Tokenizer, kind: str) -> None:
    """ST-02: nothing waits for a character that never comes."""
    lone = byte_level.tokens.index("¡")  # byte 0xA1, a continuation byte
    tokenizer = byte_level if kind == "byte_level" else through_window(byte_level)
    deltas = stream(tokenizer, [[lone]] * 400)
    assert "".join(deltas) == "\ufffd" * 400
    assert all(len("".join(deltas[: n + 1])) >= n - 2 for n in range(400))


def test_the_window_decodes_a_bounded_number_of_ids(byte_level: Tokenizer) -> None:
    """ST-02."""
    sizes: list[int] = []

    class Counting(Tokenizer):
        def decode(self, ids: Any, *args: Any, **kwargs: Any) -> str:
            sizes.append(len(ids))
            return super().decode(ids, *args, **kwargs)

    tokenizer = Counting(
        tokens=byte_level.tokens, special_ids=byte_level.special_ids, decoder=None, build=lambda: byte_level.backend
    )
    lone = byte_level.tokens.index("¡")
    stream(tokenizer, [[lone]] * 400)
    assert max(sizes) <= 8
    assert len(sizes) <= 800


@pytest.mark.parametrize("kind", ["byte_level", "window"])
def test_ids_outside_the_vocabulary_are_empty(byte_level: Tokenizer, kind: str) -> None:
    tokenizer = byte_level if kind == "byte_level" else through_window(byte_level)
    [letter] = tokenizer.encode("q")
    assert stream(tokenizer, [[letter, 10**6, -1, 2**31 - 1], [letter]]) == ["q", "q", ""]
    assert tokenizer.decode([letter, 10**6, -1, letter]) == "qq"


# --- stop strings for the scheduler -----------------------------------------------------------------------------------------------


def test_stop_checker_says_at_which_token_a_stop_is_complete(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("and then 😀 done")
    checker = StopChecker(byte_level, SamplingParams(stop=["😀", "zzz"]))
    results = [checker.push(id) for id in ids]
    complete = results.index("😀")
    assert byte_level.decode(ids[: complete + 1]).endswith("😀")
    assert results[:complete] == [None] * complete


def test_stop_checker_sees_special_tokens_only_if_they_are_shown(byte_level: Tokenizer) -> None:
    params = SamplingParams(stop=["</s>"])
    assert StopChecker(byte_level, params).push(1) is None
    params.skip_special_tokens = False
    assert StopChecker(byte_level, params).push(1) == "</s>"


# --- rows of output ---------------------------------------------------------------------------------------------------------------


def output(
    *rows: tuple[str, list[int], FinishReason | None], options: list[tuple[int, DecodeOptions]] | None = None
) -> TokenOutput:
    return TokenOutput(
        rids=[rid for rid, _, _ in rows],
        token_ids=pack_ids([id for _, ids, _ in rows for id in ids]),
        num_ids=[len(ids) for _, ids, _ in rows],
        finish_reasons=[finish for _, _, finish in rows],
        prompt_tokens=[10 + row for row in range(len(rows))],
        completion_tokens=[20 + row for row in range(len(rows))],
        cached_tokens=[30 + row for row in range(len(rows))],
        num_retractions=[40 + row for row in range(len(rows))],
        options=options or [],
    )


def run(
    tokenizer: Tokenizer, parts: list[list[int]], finish: FinishReason, options: DecodeOptions | None = None
) -> tuple[list[str], Detokenizer]:
    """The deltas of one request whose last part is its finishing row."""
    detokenizer = Detokenizer(tokenizer)
    deltas = []
    for rank, part in enumerate(parts):
        last = rank == len(parts) - 1
        first = [(0, options or DecodeOptions())] if rank == 0 else []
        deltas += detokenizer.process(output(("r", part, finish if last else None), options=first)).texts
    return deltas, detokenizer


@settings(max_examples=100)
@given(
    text=st.text("abfive \n😀", max_size=20),
    cuts=cut_lists,
    stops=st.lists(st.sampled_from(["five", "\n\n", "ab", "😀", "b ", "e"]), unique=True, max_size=3),
    no_stop_trim=st.booleans(),
)
def test_streamed_text_equals_unstreamed_text(
    byte_level: Tokenizer, text: str, cuts: list[int], stops: list[str], no_stop_trim: bool
) -> None:
    ids = byte_level.encode(text)
    options = DecodeOptions(stop=stops, no_stop_trim=no_stop_trim)
    deltas, detokenizer = run(byte_level, [*chunks(ids, cuts), []], LENGTH, options)
    whole, _ = run(byte_level, [ids], LENGTH, options)
    assert "".join(deltas) == "".join(whole)
    assert detokenizer.num_streams == 0
    ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    end, start = min(ends, default=(len(text), len(text)))
    assert "".join(whole) == text[: end if no_stop_trim else start]


@pytest.mark.parametrize("stop", ["Observation:", "\nUser:", "</tool_call>"])
def test_no_part_of_a_stop_string_is_shown(byte_level: Tokenizer, stop: str) -> None:
    ids = byte_level.encode("the end" + stop)
    deltas, _ = run(byte_level, [[id] for id in ids], FinishReason(kind="stop", matched=stop), DecodeOptions(stop=[stop]))
    assert "".join(deltas) == "the end"


def test_a_half_matched_stop_is_delivered_at_the_end(byte_level: Tokenizer) -> None:
    """ST-08."""
    ids = byte_level.encode("a\n")
    deltas, _ = run(byte_level, [ids, [1]], EOS, DecodeOptions(stop=["\n\n"]))
    assert deltas == ["a", "\n"]


def test_text_behind_the_stop_in_the_same_step_is_cut(byte_level: Tokenizer) -> None:
    """ST-10."""
    ids = byte_level.encode("four five six seven")
    finish = FinishReason(kind="stop", matched="five")
    assert "".join(run(byte_level, [ids], finish, DecodeOptions(stop=["five"]))[0]) == "four "
    assert "".join(run(byte_level, [ids], finish, DecodeOptions(stop=["five"], no_stop_trim=True))[0]) == "four five"


@pytest.mark.parametrize("skip", [True, False])
def test_a_stop_token_takes_nothing_visible_along(byte_level: Tokenizer, skip: bool) -> None:
    """ST-12."""
    ids = byte_level.encode("an injury.")
    options = DecodeOptions(skip_special_tokens=skip)
    assert "".join(run(byte_level, [ids, [1]], EOS, options)[0]) == "an injury."
    assert "".join(run(byte_level, [[*ids, 1]], EOS, options)[0]) == "an injury."
    options.no_stop_trim = True
    assert "".join(run(byte_level, [[*ids, 1]], EOS, options)[0]) == "an injury." + ("" if skip else "</s>")


def test_stop_token_0_and_an_ordinary_stop_token(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("hello")
    zero = FinishReason(kind="stop", matched=0)
    assert "".join(run(byte_level, [[*ids, 0]], zero, DecodeOptions(skip_special_tokens=False))[0]) == "hello"
    [x] = byte_level.encode("x")
    matched = FinishReason(kind="stop", matched=x)
    assert "".join(run(byte_level, [[x, *ids, x]], matched)[0]) == "xhello"
    assert "".join(run(byte_level, [[x, *ids, x]], matched, DecodeOptions(no_stop_trim=True))[0]) == "xhellox"


def test_a_stop_token_id_is_no_stop_token_when_something_else_ended_the_text(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("hello")
    assert "".join(run(byte_level, [ids], LENGTH)[0]) == "hello"
    assert "".join(run(byte_level, [ids], FinishReason(kind="abort", message="gone"))[0]) == "hello"


@pytest.mark.parametrize("finish", [LENGTH, FinishReason(kind="abort", message="gone"), EOS])
def test_half_a_character_is_flushed_at_the_end(byte_level: Tokenizer, finish: FinishReason) -> None:
    half = byte_level.encode("😀")[:-1]
    assert run(byte_level, [half, []], finish)[0] == ["", "\ufffd"]


def test_rows_keep_their_columns(byte_level: Tokenizer) -> None:
    detokenizer = Detokenizer(byte_level)
    a, b = byte_level.encode("ab")
    text = detokenizer.process(
        output(
            ("p", [a], None),
            ("nobody", [a, a], None),
            ("q", [], LENGTH),
            ("s", [b], EOS),
            options=[(row, DecodeOptions()) for row in (0, 2, 3)],
        )
    )
    assert isinstance(text, TextOutput)
    assert (text.rids, text.texts) == (["p", "q", "s"], ["a", "", "b"])
    assert (unpack_ids(text.token_ids).tolist(), text.num_ids) == ([a, b], [1, 0, 1])
    assert text.finish_reasons == [None, LENGTH, EOS]
    assert (text.prompt_tokens, text.completion_tokens) == ([10, 12, 13], [20, 22, 23])
    assert (text.cached_tokens, text.num_retractions) == ([30, 32, 33], [40, 42, 43])
    assert detokenizer.num_streams == 1


def test_unknown_rids_are_dropped_with_one_warning(byte_level: Tokenizer, caplog: pytest.LogCaptureFixture) -> None:
    """ST-16."""
    detokenizer = Detokenizer(byte_level)
    [a] = byte_level.encode("a")
    with caplog.at_level(logging.WARNING):
        for _ in range(50):
            assert detokenizer.process(output(("ghost", [a], None))).rids == []
    assert len(caplog.records) == 1
    assert "ghost" in caplog.text
    detokenizer.process(output(("r", [a], LENGTH), options=[(0, DecodeOptions())]))
    assert detokenizer.process(output(("r", [a], None))).rids == []  # finished, so unknown again


def test_a_row_that_fails_ends_only_its_own_request(
    byte_level: Tokenizer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    detokenizer = Detokenizer(through_window(byte_level))
    a, b = byte_level.encode("ab")
    decode = Tokenizer.decode

    def failing(self: Tokenizer, ids: list[int], **kwargs: Any) -> str:
        if b in ids:
            raise RuntimeError("the library's bug")
        return decode(self, ids, **kwargs)

    monkeypatch.setattr(Tokenizer, "decode", failing)
    rows = output(("p", [a], None), ("q", [b], None), ("s", [a], None), options=[(row, DecodeOptions()) for row in range(3)])
    text = detokenizer.process(rows)
    assert text.texts == ["a", "", "a"]
    reason = text.finish_reasons[1]
    assert reason is not None and (reason.kind, reason.status_code) == ("abort", 500)
    assert [text.finish_reasons[0], text.finish_reasons[2]] == [None, None]
    assert detokenizer.num_streams == 2
    assert "library's bug" in caplog.text


@pytest.mark.parametrize("field", ["num_ids", "finish_reasons", "cached_tokens", "token_ids", "options"])
def test_columns_that_do_not_fit_are_refused_and_move_nothing(byte_level: Tokenizer, field: str) -> None:
    detokenizer = Detokenizer(byte_level)
    [a] = byte_level.encode("a")
    bad = output(("p", [a], None), options=[(0, DecodeOptions())])
    wrong: dict[str, Any] = {
        "num_ids": [2],
        "finish_reasons": [],
        "cached_tokens": [1, 2],
        "token_ids": b"12345",
        "options": [(1, DecodeOptions())],
    }
    setattr(bad, field, wrong[field])
    with pytest.raises(ValueError, match="columns"):
        detokenizer.process(bad)
    assert detokenizer.num_streams == 0


# --- real vocabularies ------------------------------------------------------------------------------------------------------------


@pytest.mark.model
def test_smollm2_characters_over_chunk_borders() -> None:
    tokenizer = _real("smollm2")
    assert tokenizer.decode([10813, 242, 218, 7906, 240, 178, 239, 230, 143, 233, 85, 151, 219]) == "😀世界ďe\u0301"
    ids = [10813, 242, 218, 7906, 240, 178, 239, 230, 143, 233, 85, 151, 219, *tokenizer.encode("👩‍👩‍👧")]
    for size in (1, 2, 3, 7):
        deltas = stream(tokenizer, chunks(ids, [size]))
        assert "".join(deltas) == "😀世界ďe\u0301👩‍👩‍👧"
        assert not any("\ufffd" in delta for delta in deltas)
    deltas = stream(tokenizer, [[111]] * 400)
    assert "".join(deltas) == tokenizer.backend.decode([111] * 400)
    assert all(deltas[:-1])
    assert stream(tokenizer, [[24211]]) == ["\ufffd", ""]
    for stop, ids in {
        "Observation:": [23143, 2903, 42],
        "\nUser:": [198, 11126, 42],
        "</tool_call>": [9617, 19324, 79, 4350, 46],
    }.items():
        shown, _ = run(
            tokenizer, [[id] for id in [28120, *ids]], FinishReason(kind="stop", matched=stop), DecodeOptions(stop=[stop])
        )
        assert "".join(shown) == tokenizer.decode([28120])


@pytest.mark.model
@pytest.mark.parametrize("name", ["smollm2", "gemma3-270m"])
def test_real_vocabularies_at_any_chunking(name: str) -> None:
    tokenizer = _real(name)
    assert tokenizer.byte_table is not None

    @settings(max_examples=300, deadline=None)
    @given(ids=st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=30), cuts=cut_lists, skip=st.booleans())
    def check(ids: list[int], cuts: list[int], skip: bool) -> None:
        whole = tokenizer.decode(ids, skip_special_tokens=skip)
        assert "".join(stream(tokenizer, chunks(ids, cuts), skip=skip)) == whole
        library = tokenizer.backend.decode(ids, skip_special_tokens=skip)
        if name == "smollm2" or "\ufffd" not in library:
            assert whole == library

    check()


@pytest.mark.model
@pytest.mark.parametrize("name", ["smollm2", "gemma3-270m"])
def test_every_single_id_decodes_as_the_library_says(name: str) -> None:
    tokenizer = _real(name)
    backend: tokenizers.Tokenizer = tokenizer.backend
    hidden = sorted(tokenizer.special_ids)
    for ids, skip in ((range(tokenizer.vocab_size), False), (range(0, tokenizer.vocab_size, 50), True), (hidden, True)):
        singles = [[id] for id in ids]
        assert [tokenizer.decode(one, skip_special_tokens=skip) for one in singles] == backend.decode_batch(singles, skip)


@functools.cache
def _real(name: str) -> Tokenizer:
    from banyan.srt.model_source import resolve_model

    return Tokenizer.load(resolve_model(name).path)
