"""Ids to text, incrementally: a pure state machine.

For the decoders of nearly all language models text is the UTF-8 decoding of the tokens' bytes (``token_bytes``), so an incremental
UTF-8 decoder is exact at any chunking and costs the same for every token. Other decoders go through a window of a few ids.
Invariant: the joined deltas of a stream are the text of the whole, whatever the chunking.
"""

from __future__ import annotations

import codecs
import logging
import time
from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

from .constrained.token_bytes import ByteTable
from .io_struct import DecodeOptions, FinishReason, TextOutput, TokenOutput, unpack_ids
from .sampling_params import SamplingParams
from .stop_regex import RegexMatcher
from .stop_strings import StopMatcher
from .tokenizer import Tokenizer

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_WINDOW = 8  # ids that the window decoder decodes at once
MAX_OPEN = 3  # bytes of an incomplete character, each of them maybe a U+FFFD
WARN_INTERVAL = 10.0  # seconds between warnings of one kind


class _Decoder(Protocol):
    def push(self, ids: Iterable[int]) -> str: ...
    def finish(self) -> str: ...


class TextDecoder:
    """Text of one growing list of ids."""

    def __init__(
        self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True, spaces_between_special_tokens: bool = True
    ) -> None:
        table = tokenizer.byte_table
        self._decoder: _Decoder = (
            _WindowDecoder(tokenizer, skip_special_tokens=skip_special_tokens)
            if table is None
            else _ByteDecoder(table, skip_special_tokens=skip_special_tokens)
        )

    def push(self, ids: Iterable[int]) -> str:
        """The text that these ids add. An incomplete character is held back until it is complete or ``finish``."""
        return self._decoder.push(ids)

    def finish(self) -> str:
        """What is held back, as ``Tokenizer.decode`` would show it. Nothing may be pushed afterwards."""
        return self._decoder.finish()


class _ByteDecoder:
    """Concatenates the tokens' bytes and decodes them; holds back at most 3 bytes."""

    def __init__(self, table: ByteTable, *, skip_special_tokens: bool) -> None:
        self._pieces = table.visible if skip_special_tokens else table.tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")(table.errors)
        self._strip = table.strip_space

    def push(self, ids: Iterable[int]) -> str:
        pieces = self._pieces
        size = len(pieces)
        return self._stripped(self._utf8.decode(b"".join([pieces[id] for id in ids if 0 <= id < size])))

    def finish(self) -> str:
        return self._stripped(self._utf8.decode(b"", final=True))

    def _stripped(self, text: str) -> str:
        """Less the space that a SentencePiece text begins with."""
        if self._strip and text:
            self._strip = False
            return text.removeprefix(" ")
        return text


class _WindowDecoder:
    """For any decoder: decodes a window of the last ids and shows what its text has more than was shown.

    Only a tail of U+FFFD may change when more ids come, and not more than 3 of them (a character has at most 4 bytes): that much is
    held back, so ids that really are U+FFFD are shown too, and a step costs the same for ever. Ids that leave the window change
    nothing at the end of its text, from where the shown part is counted.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._window: list[int] = []
        self._text = ""
        self._num_shown = 0  # characters of _text

    def push(self, ids: Iterable[int]) -> str:
        return "".join([self._push_one(id) for id in ids])

    def finish(self) -> str:
        return self._show(len(self._text))

    def _push_one(self, id: int) -> str:
        tokenizer = self._tokenizer
        if not 0 <= id < tokenizer.vocab_size or (self._skip and id in tokenizer.special_ids):
            return ""
        if len(self._window) == MAX_WINDOW:
            self._window = self._window[MAX_WINDOW // 2 :]
            num_held = len(self._text) - self._num_shown
            self._num_shown = max(len(self._decode()) - num_held, 0)
        self._window.append(id)
        self._text = text = self._decode()
        num_open = min(len(text) - len(text.rstrip("\ufffd")), MAX_OPEN)
        return self._show(len(text) - num_open)

    def _decode(self) -> str:
        return self._tokenizer.decode(self._window, skip_special_tokens=self._skip)

    def _show(self, end: int) -> str:
        new = self._text[self._num_shown : end]
        self._num_shown = max(self._num_shown, end)
        return new


def _matcher(strings: list[str], patterns: list[str]) -> StopMatcher | RegexMatcher:
    return RegexMatcher(patterns, strings) if patterns else StopMatcher(strings)


class StopChecker:
    """For the scheduler: is one of a request's stop strings or patterns complete with this token?"""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self._decoder = TextDecoder(
            tokenizer,
            skip_special_tokens=params.skip_special_tokens,
            spaces_between_special_tokens=params.spaces_between_special_tokens,
        )
        self._matcher = _matcher(params.stop, params.stop_regex)

    def push(self, token_id: int) -> str | None:
        """The stop string or pattern that the text up to this token holds; the same one for ever after."""
        return self._matcher.push(self._decoder.push((token_id,)))[1]


class _Stream:
    """State of one request."""

    __slots__ = ("_decoder", "_matcher", "_no_stop_trim")

    def __init__(self, tokenizer: Tokenizer, options: DecodeOptions) -> None:
        self._decoder = TextDecoder(
            tokenizer,
            skip_special_tokens=options.skip_special_tokens,
            spaces_between_special_tokens=options.spaces_between_special_tokens,
        )
        self._matcher = _matcher(options.stop, options.stop_regex) if options.stop or options.stop_regex else None
        self._no_stop_trim = options.no_stop_trim

    def advance(self, ids: list[int], finish: FinishReason | None) -> str:
        """The text to show for these ids; all the rest of it if ``finish`` is set."""
        if finish is not None and not self._no_stop_trim and _ends_with_stop_token(ids, finish):
            ids = ids[:-1]
        text = self._match(self._decoder.push(ids))
        if finish is not None:
            text += self._match(self._decoder.finish())
            if self._matcher is not None:
                text += self._matcher.finish()
        return text

    def _match(self, text: str) -> str:
        matcher = self._matcher
        if matcher is None or matcher.matched is not None:
            return text if matcher is None else ""
        shown, matched = matcher.push(text)
        return shown + matcher.matched_text if matched is not None and self._no_stop_trim else shown


def _ends_with_stop_token(ids: Sequence[int], finish: FinishReason) -> bool:
    return finish.kind == "stop" and isinstance(finish.matched, int) and bool(ids) and ids[-1] == finish.matched


class Detokenizer:
    """The streams of all requests. A stream begins with the row that has options and ends with the one that has a finish reason."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._streams: dict[str, _Stream] = {}
        self._num_dropped = 0
        self._next_warning = 0.0

    @property
    def num_streams(self) -> int:
        return len(self._streams)

    def process(self, output: TokenOutput) -> TextOutput:
        """The same rows with text. A row of a rid that is not known is dropped; a row that fails ends its request with an abort.

        Raises ValueError if the columns do not fit each other; no stream has moved then.
        """
        bounds = _row_bounds(output)
        ids = unpack_ids(output.token_ids).tolist()
        for row, options in output.options:
            self._streams[output.rids[row]] = _Stream(self._tokenizer, options)
        rows: list[int] = []
        texts: list[str] = []
        finishes = list(output.finish_reasons)
        for row, rid in enumerate(output.rids):
            stream = self._streams.get(rid)
            if stream is None:
                self._warn_unknown(rid)
                continue
            finish = finishes[row]
            try:
                text = stream.advance(ids[bounds[row] : bounds[row + 1]], finish)
            except Exception:  # the other rows of this message belong to other requests
                logger.exception("rid %s: its ids cannot be turned into text", rid)
                text, finish = "", _failure()
                finishes[row] = finish
            if finish is not None:
                del self._streams[rid]
            rows.append(row)
            texts.append(text)
        return _text_output(output, rows, texts, finishes=finishes, bounds=bounds)

    def _warn_unknown(self, rid: str) -> None:
        self._num_dropped += 1
        now = time.monotonic()
        if now >= self._next_warning:
            self._next_warning = now + WARN_INTERVAL
            logger.warning("rid %s is not known: its output was dropped (%d rows since the last warning)", rid, self._num_dropped)
            self._num_dropped = 0


def _failure() -> FinishReason:
    return FinishReason(
        kind="abort", message="The output could not be turned into text.", status_code=500, err_type="InternalServerError"
    )


def _row_bounds(output: TokenOutput) -> list[int]:
    """Where each row's ids begin in token_ids, and where the last one's end."""
    num_rows = len(output.rids)
    columns = (
        output.num_ids,
        output.finish_reasons,
        output.prompt_tokens,
        output.completion_tokens,
        output.cached_tokens,
        output.num_retractions,
    )
    bounds = [0]
    for num in output.num_ids:
        bounds.append(bounds[-1] + num)
    fits = all(len(column) == num_rows for column in columns) and min(output.num_ids, default=0) >= 0
    if (
        not fits
        or len(output.token_ids) != 4 * bounds[-1]
        or any(not 0 <= row < num_rows for row, _ in (*output.options, *output.logprobs, *output.hidden, *output.timings))
    ):
        raise ValueError("the columns of a TokenOutput do not fit each other")
    return bounds


def _renumbered(sparse: list[tuple[int, T]], rows: list[int]) -> list[tuple[int, T]]:
    places = {row: index for index, row in enumerate(rows)} if sparse else {}
    return [(places[row], own) for row, own in sparse if row in places]


def _text_output(
    output: TokenOutput, rows: list[int], texts: list[str], *, finishes: list[FinishReason | None], bounds: list[int]
) -> TextOutput:
    """The named rows of ``output`` with their texts."""
    token_ids = output.token_ids
    if len(rows) < len(output.rids):
        token_ids = b"".join([token_ids[4 * bounds[row] : 4 * bounds[row + 1]] for row in rows])
    return TextOutput(
        rids=[output.rids[row] for row in rows],
        token_ids=token_ids,
        num_ids=[output.num_ids[row] for row in rows],
        finish_reasons=[finishes[row] for row in rows],
        prompt_tokens=[output.prompt_tokens[row] for row in rows],
        completion_tokens=[output.completion_tokens[row] for row in rows],
        cached_tokens=[output.cached_tokens[row] for row in rows],
        num_retractions=[output.num_retractions[row] for row in rows],
        logprobs=_renumbered(output.logprobs, rows),
        hidden=_renumbered(output.hidden, rows),
        timings=_renumbered(output.timings, rows),
        texts=texts,
    )
