"""Log-probabilities in OpenAI's two shapes."""

from __future__ import annotations

from typing import Any

from ...managers.detokenizer import TextDecoder
from ...managers.generation import Generation, Output
from ...managers.logprobs.logprob_json import TokenLogprob, TokenTexts, input_logprobs, output_logprobs
from ...managers.tokenizer import Tokenizer


def chat_logprobs(generation: Generation, output: Output, texts: TokenTexts) -> dict[str, Any] | None:
    """Of the tokens of one output; None if none were asked for."""
    params = generation.logprobs[output.index]
    if params is None:
        return None

    def entry(token_id: int, value: float | None) -> dict[str, Any]:
        return {"token": texts.text_of(token_id), "bytes": list(texts.bytes_of(token_id)), "logprob": value}

    tokens = output_logprobs(params, output.logprobs, output.token_ids)
    content = [
        {**entry(token.token_id, token.value), "top_logprobs": [entry(id, value) for value, id in token.top or []]}
        for token in tokens
    ]
    return {"content": content, "refusal": None}


class CompletionLogprobs:
    """Of one choice, output by output. text_offset counts the characters of the choice's text, an echoed prompt included.

    A token of which a part of a character only is known begins where that character will. Tokens of a stop string that was cut
    off, and special tokens that are not shown, have values all the same, and the offset at which their text would be.
    """

    def __init__(self, generation: Generation, index: int, tokenizer: Tokenizer, *, skip_special: bool) -> None:
        params = generation.logprobs[index]
        if params is None:
            raise ValueError("no log-probabilities were asked for")
        self._params = params
        self._tokenizer = tokenizer
        self._texts = TokenTexts(tokenizer)
        self._decoder = TextDecoder(tokenizer, skip_special_tokens=skip_special)
        self._offset = 0
        self._columns: dict[str, list[Any]] = {}

    def echo(self, generation: Generation, output: Output, text: str, *, as_given: bool) -> None:
        """The prompt goes before the output's tokens. text: what is echoed; as_given: the client's own text, where special tokens
        show and a BOS that the tokenizer added does not."""
        prompt = generation.prompts[output.index]
        tokens = input_logprobs(self._params, output.logprobs, prompt)
        decoder = self._decoder
        if as_given:
            decoder = TextDecoder(self._tokenizer, skip_special_tokens=False)
            bos = self._tokenizer.bos_token_id
            hides_bos = bos is not None and prompt[0] == bos and not text.startswith(self._texts.text_of(bos))
            if hides_bos and tokens:
                self._append(tokens.pop(0), "")
        for token in tokens:
            self._append(token, decoder.push((token.token_id,)))
        self._offset = len(text)

    def part(self, output: Output) -> dict[str, Any]:
        """What this output adds."""
        for token in output_logprobs(self._params, output.logprobs, output.token_ids):
            self._append(token, self._decoder.push((token.token_id,)))
        columns, self._columns = self._columns, {}
        names = ("text_offset", "token_logprobs", "tokens", "top_logprobs")
        return {name: columns.get(name, []) for name in names} | ({} if self._params.top_num else {"top_logprobs": None})

    def _append(self, token: TokenLogprob, text: str) -> None:
        values = {
            "text_offset": self._offset,
            "token_logprobs": token.value,
            "tokens": self._texts.text_of(token.token_id),
            "top_logprobs": self._alternatives(token),
        }
        for name, value in values.items():
            self._columns.setdefault(name, []).append(value)
        self._offset += len(text)

    def _alternatives(self, token: TokenLogprob) -> dict[str, float] | None:
        """The best by text, and the token itself. Of tokens with equal texts the less likely ones are called token:ID."""
        if token.top is None or token.value is None:
            return None
        found: dict[str, float] = {}
        own = [] if token.token_id in (id for _, id in token.top) else [(token.value, token.token_id)]
        for value, token_id in [*token.top, *own]:
            text = self._texts.text_of(token_id)
            found[f"token:{token_id}" if text in found else text] = value
        return found
