"""Backends that speak the native /generate, over HTTP or in this process."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any

from ..choices import ChoicesDecision, ChoicesSamplingMethod, Entry, decide, departure
from ..errors import BackendError
from ..global_config import global_config
from ..ir import SamplingParams
from ..transcript import Prompt
from .base import Backend, Completion, asks
from .http import error_text

HEALED = 1  # tokens at the end of a prompt that a choice may change without a second request
LOGPROB_FIELDS = ("return_logprob", "logprob_start_len", "top_logprobs_num", "return_text_in_logprobs")
RENAMED = {"seed": "sampling_seed"}
NO_TOKENS = {"max_new_tokens": 0, "temperature": 0}


class NativeBackend(Backend):
    """Subclasses move JSON; this says what is in it."""

    has_prefix_cache = True

    def __init__(self) -> None:
        self._unsupported: Mapping[str, str] | None = None

    @abstractmethod
    def post(self, body: dict[str, Any]) -> Any:
        """The answer of /generate. Raises BackendError."""

    @abstractmethod
    def post_stream(self, body: dict[str, Any]) -> Generator[dict[str, Any]]:
        """The chunks of /generate. Raises BackendError."""

    @abstractmethod
    def get_model_info(self) -> dict[str, Any]:
        """The answer of /model_info."""

    def unsupported(self) -> Mapping[str, str]:
        """Pictures where the model cannot see."""
        if self._unsupported is None:
            known = dict(super().unsupported())
            if not self.get_model_info().get("has_image_understanding"):
                known["image"] = f"the model {self.get_model_name()} does not understand images"
            self._unsupported = known
        return self._unsupported

    def get_model_name(self) -> str:
        """The path of the model."""
        return str(self.get_model_info().get("model_path", "unknown"))

    # --- completions -----------------------------------------------------------------------------------------------------------

    def generate(self, prompt: Prompt, params: SamplingParams) -> list[Completion]:
        """One request, whatever n is."""
        answer = self.post(_request(prompt, params))
        items = answer if isinstance(answer, list) else [answer]
        return [Completion(item["text"], _served(item["meta_info"])) for item in items]

    def generate_stream(self, prompt: Prompt, params: SamplingParams) -> Generator[Completion]:
        """Works with servers that repeat all text in each chunk and with those that send what is new."""
        chunks = self.post_stream({**_request(prompt, params), "stream": True, "incremental": True})
        with closing(chunks):
            yield from self._deltas(chunks)

    @staticmethod
    def _deltas(chunks: Iterator[dict[str, Any]]) -> Iterator[Completion]:
        seen = 0
        for chunk in chunks:
            if "error" in chunk:
                raise BackendError(error_text(chunk))
            meta = _served(chunk["meta_info"])
            ids = chunk.get("output_ids")
            is_delta = ids is not None and len(ids) < meta.get("completion_tokens", 0)
            new = chunk["text"] if is_delta else chunk["text"][seen:]
            seen += len(new)
            yield Completion(new, meta)

    def cache_prefix(self, text: str, images: Sequence[Any] = ()) -> dict[str, Any] | None:
        """A request for no tokens."""
        answer = self.post(_body(text, images, sampling_params=NO_TOKENS))
        return dict(_served(answer["meta_info"]))

    def shares_calls(self) -> bool:
        """A Banyan server does that."""
        return self._is_banyan()

    def _is_banyan(self) -> bool:
        return bool(self.get_model_info().get("has_continuations"))

    # --- select ----------------------------------------------------------------------------------------------------------------

    def select(self, prompt: Prompt, choices: Sequence[str], method: ChoicesSamplingMethod) -> ChoicesDecision:
        """One request on a server that takes a prompt with continuations, two on others; one more for a method that needs
        unconditional log-probabilities. Raises BackendError for an empty prompt that has no token at all.
        """
        if not prompt.text:
            raise BackendError("select needs text before it: the first token of a text has no probability")
        metas: list[dict[str, Any]] = []
        at_once = self._is_banyan() and not prompt.images
        scored, outputs = (self._score_continuations if at_once else self._score_texts)(prompt, choices, metas)
        if any(entry[0] is None for entries in scored for entry in entries):
            raise BackendError("select: the server gave no log-probability for a token of a choice")
        plain = self._unconditional(scored, metas) if method.requires_unconditional_logprobs else None
        decision = decide(method, choices, scored, outputs=outputs, unconditional=plain)
        return ChoicesDecision(decision.decision, {**decision.meta_info, "requests": metas})

    def _score_continuations(
        self, prompt: Prompt, choices: Sequence[str], metas: list[dict[str, Any]]
    ) -> tuple[list[list[Entry]], list[list[Entry]]]:
        """(entries of each choice's tokens, output entries). The server finds where the choices depart from the prompt's tokens
        and begins there."""
        body = {"text": prompt.text, "continuations": list(choices), "sampling_params": NO_TOKENS}
        answers = self.post({**body, "return_logprob": True, "return_text_in_logprobs": True})
        found = [_served(answer["meta_info"]) for answer in answers]
        metas += found
        return [meta["input_token_logprobs"] for meta in found], _outputs(found)

    def _score_texts(
        self, prompt: Prompt, choices: Sequence[str], metas: list[dict[str, Any]]
    ) -> tuple[list[list[Entry]], list[list[Entry]]]:
        """The same from any server: the prompt alone, then all choices at once, with log-probabilities from just before its
        end on; once more, from the beginning, only where a choice changes more of the prompt's tokens than its last."""
        first = self.post({**_body(prompt.text, prompt.images, sampling_params=NO_TOKENS), "return_prompt_token_ids": True})
        metas.append(_served(first["meta_info"]))
        length = int(metas[0]["prompt_tokens"])
        start = max(length - 1 - HEALED, 0)
        ids, wholes, outputs = self._score(prompt, choices, start, metas, first.get("prompt_token_ids"))
        at = departure(ids[start:], [[entry[1] for entry in whole] for whole in wholes])
        if at == 0 and start > 0:  # entry 0 has no value: begin at the beginning
            start = 0
            ids, wholes, outputs = self._score(prompt, choices, 0, metas, first.get("prompt_token_ids"))
            at = departure(ids, [[entry[1] for entry in whole] for whole in wholes])
        if at == 0:
            raise BackendError("select: the choices change the first token of the text, which has no probability")
        return [whole[at:] for whole in wholes], outputs

    def _score(
        self, prompt: Prompt, choices: Sequence[str], start: int, metas: list[dict[str, Any]], ids: list[int] | None
    ) -> tuple[list[int], list[list[Entry]], list[list[Entry]]]:
        """(ids of the prompt, entries of prompt + choice from start on, output entries). Without ids it asks for the prompt too."""
        texts = [prompt.text + choice for choice in choices]
        if ids is None:
            texts.append(prompt.text)
        body = _body(texts, prompt.images and [list(prompt.images)] * len(texts), sampling_params=NO_TOKENS)
        answers = self.post({**body, "return_logprob": True, "logprob_start_len": start, "return_text_in_logprobs": True})
        found = [_served(answer["meta_info"]) for answer in answers]
        entries = [meta["input_token_logprobs"] for meta in found]
        metas += found
        if ids is None:
            ids = [-1] * start + [entry[1] for entry in entries.pop()]
        return ids, entries, _outputs(found[: len(choices)])

    def _unconditional(self, scored: list[list[Entry]], metas: list[dict[str, Any]]) -> list[list[Entry]]:
        """Of each choice. A first token has no value, so a Banyan server is not asked about choices of one token."""
        plain: list[list[Entry]] = [[(None, *entries[0][1:])] for entries in scored]
        asked = [index for index, entries in enumerate(scored) if len(entries) > 1 or not self._is_banyan()]
        if not asked:
            return plain
        body = {"input_ids": [[entry[1] for entry in scored[index]] for index in asked], "sampling_params": NO_TOKENS}
        answers = self.post({**body, "return_logprob": True, "logprob_start_len": 0})
        found = [_served(answer["meta_info"]) for answer in answers]
        metas += found
        for index, meta in zip(asked, found, strict=True):
            plain[index] = meta["input_token_logprobs"]
        return plain


def _request(prompt: Prompt, params: SamplingParams) -> dict[str, Any]:
    given = {name: value for name, value in vars(params).items() if value is not None}
    sampling = {
        "skip_special_tokens": global_config.skip_special_tokens_in_output,
        "spaces_between_special_tokens": global_config.spaces_between_special_tokens_in_out,
        **{RENAMED.get(name, name): value for name, value in given.items() if name not in LOGPROB_FIELDS},
    }
    body = _body(prompt.text, prompt.images, sampling_params=sampling)
    return {**body, **{name: given[name] for name in LOGPROB_FIELDS if asks(name, given.get(name))}}


def _body(text: str | list[str], images: Sequence[Any], **more: Any) -> dict[str, Any]:
    return {"text": text, **more, **({"image_data": list(images)} if images else {})}


def _outputs(metas: Sequence[dict[str, Any]]) -> list[list[Entry]]:
    return [meta.get("output_token_logprobs") or [] for meta in metas]


def _served(meta: dict[str, Any]) -> dict[str, Any]:
    """The meta_info of a request that was served. Raises BackendError for one that was aborted."""
    reason = meta.get("finish_reason")
    if isinstance(reason, dict) and reason.get("type") == "abort":
        raise BackendError(str(reason.get("message") or "the request was aborted"), status=reason.get("status_code"))
    return meta
