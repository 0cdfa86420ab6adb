"""The one place where a request is checked. What passes can run; what cannot is a RequestError that names the field.

Two halves: ``plan`` is cheap and needs no tokenizer, so that rids are known at once; ``prepare`` may tokenise megabytes and runs
on a worker thread.
"""

from __future__ import annotations

import hashlib
import math
import random
import uuid
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec
import numpy as np

from .bootstrap import rooms_of
from .config import SchedulerInfo, TokenizerManagerConfig
from .constrained.thinking import ThinkingPlanner
from .continuations import continued, departure
from .errors import RequestError, StartError
from .generation import GenerateInput
from .io_struct import GenerateReq, HiddenWish, pack_ids
from .logprobs.params import logprob_plans, with_start
from .per_prompt import per_prompt
from .prompt_embeds import checked_embeds, embeds_key, embeds_prompts
from .request_plan import RequestPlan, Service
from .request_size import CopyBudget, check_choices
from .sampling_params import SEED_RANGE, SamplingParams
from .score_tree import ScoreTree
from .sessions.sessions import SessionParams, Turn

MAX_PRIORITY = 1 << 31
MAX_NAME_LEN = 4096  # characters of a rid, an extra_key, a cache_salt or a routing_key


class TextEncoder(Protocol):
    """What the validator needs of a tokenizer."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. Called from several threads."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of ids. Called from several threads."""


class RequestValidator:
    """Checks requests against one model and one pool."""

    def __init__(self, config: TokenizerManagerConfig, info: SchedulerInfo, tokenizer: TextEncoder) -> None:
        self._info = info
        self._vocab_size = info.model.vocab_size
        self._bos_token_id = info.model.bos_token_id
        self._tokenizer = tokenizer
        self._max_top_logprobs = config.max_top_logprobs
        self._tells_hidden = config.return_hidden_states_mode
        self._auto_truncate = config.allow_auto_truncate
        self._refuses_priority = config.abort_on_priority_when_disabled and not info.priority_scheduling
        self._random = random.Random(config.random_seed)
        self._preferred = _preferred(config, self._vocab_size)
        self._thinking = ThinkingPlanner(config.reasoning_parser, tokenizer)

    def plan(self, request: GenerateInput) -> RequestPlan:
        """Check everything but the prompts' tokens."""
        texts, ids, embeds, single = _prompts(request)
        prompt = None
        if request.continuations is not None:
            prompt = texts[0] if texts is not None else list(ids[0] if ids else [])
            texts = texts and continued(texts, request.continuations, single=single, kind=str)
            ids = ids and continued(ids, request.continuations, single=single, kind=(list, tuple))
            single = False
        num_prompts = len(next(prompts for prompts in (texts, ids, embeds) if prompts is not None))
        check_choices(num_prompts, 1)
        given = per_prompt(request.sampling_params, num_prompts, "sampling_params", dict[str, Any]())
        shared = not isinstance(request.sampling_params, list)
        params = [self._params(given[0])] * num_prompts if shared else [self._params(values) for values in given]
        n = params[0].n
        if any(item.n != n for item in params):
            raise RequestError("n must be the same for all prompts of a batch.", param="n")
        check_choices(num_prompts, n)
        rids, families = _rids(request.rid, num_prompts, n, single)
        extra_keys = per_prompt(request.extra_key, num_prompts, "extra_key", "")
        cache_salts = per_prompt(request.cache_salt, num_prompts, "cache_salt", "")
        _check_names(rid=families, extra_key=extra_keys, cache_salt=cache_salts)
        for item in params[:1] if shared else params:
            _check_unicode(stop=item.stop, stop_regex=item.stop_regex, bad_words=item.bad_words)
            if (grammar := item.grammar()) is not None:
                _check_unicode(**{grammar[0]: [grammar[1]]})
        return RequestPlan(
            texts=texts,
            ids=ids,
            embeds=embeds,
            is_single_prompt=single,
            n=n,
            params=params,
            explicit_limits=["max_new_tokens" in values for values in given],
            namespaces=list(zip(extra_keys, cache_salts, strict=True)),
            processors=self._processors(request, num_prompts),
            rooms=rooms_of(request, num_prompts),
            logprobs=logprob_plans(
                request, num_prompts, max_top_num=min(self._max_top_logprobs, self._vocab_size), vocab_size=self._vocab_size
            ),
            hidden=self._hidden(request, num_prompts),
            rids=rids,
            families=families,
            stream=request.stream,
            session=_session(request, single=single and n == 1),
            service=self._service(request),
            continued=prompt,
        )

    def prepare(self, plan: RequestPlan) -> list[GenerateReq]:
        """Tokenise and check the prompts; one message per output, prompt-major. Safe on any thread."""
        messages: list[GenerateReq] = []
        embeds = [checked_embeds(values, self._info.model.hidden_size) for values in plan.embeds or ()]
        prompts = [self._prompt_ids(plan, index, embeds) for index in range(plan.num_prompts)]
        start = None if plan.continued is None else self._start_of_continuations(plan, prompts)
        if start is not None and plan.only_scores:
            plan.tree = ScoreTree.of(prompts, start)
        budget, bad_words = CopyBudget(), dict[int, list[list[int]]]()  # by the list of words, which prompts may share
        for index, ids in enumerate(prompts):
            logprobs = with_start(plan.logprobs[index], len(ids), default=start)
            budget.tell(logprobs, len(ids), plan.n)
            own = embeds[index][: len(ids)] if embeds else None
            if own is not None and logprobs is not None and logprobs.start_len < len(ids):
                raise RequestError("logprob_start_len: embeddings have no log-probabilities.", param="logprob_start_len")
            params = self._limit(plan.params[index], len(ids), explicit=plan.explicit_limits[index])
            if id(params.bad_words) not in bad_words:
                bad_words[id(params.bad_words)] = self._bad_word_ids(params.bad_words)
            limit = plan.service.max_thinking_tokens
            thinking = self._thinking.params(ids.tolist() if own is None else [], limit) if plan.service.thinks else None
            first = GenerateReq(
                rid=plan.rids[index * plan.n],
                input_ids=pack_ids(ids),
                sampling_params=msgspec.structs.replace(params, n=1, sampling_seed=self._seed(params.sampling_seed, 0)),
                stream=plan.stream,
                extra_key=plan.namespaces[index][0],
                cache_salt=plan.namespaces[index][1],
                bad_word_ids=bad_words[id(params.bad_words)],
                logit_processor=plan.processors[index],
                logprobs=logprobs,
                thinking=thinking,
                priority=plan.service.priority,
                cache_hint=plan.service.cache_hint,
                routing_key=plan.service.routing_key,
                data_parallel_rank=plan.service.data_parallel_rank,
                bootstrap_room=plan.rooms[index],
                timeout=plan.service.timeout,
                input_embeds=b"" if own is None else own.tobytes(),
                embeds_key="" if own is None else embeds_key(own),
                return_hidden_states=plan.hidden[index],
            )
            if len(plan.rids) > 1:
                budget.take(first, plan.n)
            messages.append(first)
            for sample in range(1, plan.n):
                own_params = msgspec.structs.replace(params, n=1, sampling_seed=self._seed(params.sampling_seed, sample))
                rid = plan.rids[index * plan.n + sample]
                messages.append(msgspec.structs.replace(first, rid=rid, sampling_params=own_params))
        return messages

    def _hidden(self, request: GenerateInput, num_prompts: int) -> list[HiddenWish]:
        wanted: list[HiddenWish] = per_prompt(request.return_hidden_states, num_prompts, "return_hidden_states", False)
        told: tuple[HiddenWish, ...] = {"full": (False, True, "last"), "last": (False, "last"), None: (False,)}[self._tells_hidden]
        if not all(wish in told for wish in wanted):
            why = "with --return-hidden-states-mode last" if self._tells_hidden else "without --return-hidden-states-mode"
            raise RequestError(f"return_hidden_states: the server was started {why}.", param="return_hidden_states")
        return wanted

    def _processors(self, request: GenerateInput, num_prompts: int) -> list[str]:
        names, known = per_prompt(request.custom_logit_processor, num_prompts, "custom_logit_processor", ""), self._info.model
        for name in names:
            if name and name not in known.logit_processors:
                raise RequestError(
                    f"custom_logit_processor: {name[:100]!r} is not known; this server has {known.logit_processors}.",
                    param="custom_logit_processor",
                )
        return names

    def _bad_word_ids(self, words: list[str]) -> list[list[int]]:
        """The tokens of each word, at the beginning of a text and after a space."""
        spelled: dict[tuple[int, ...], None] = {}
        for word in words:
            for text in (word, f" {word.lstrip(' ')}"):
                ids = self._tokenizer.encode(text, add_special_tokens=False) if text.strip(" ") or text == word else []
                if ids:
                    spelled[tuple(ids)] = None
        return [list(ids) for ids in spelled]

    def _service(self, request: GenerateInput) -> Service:
        priority, timeout = request.priority, request.timeout
        if priority is not None and self._refuses_priority:
            raise RequestError(
                "Using priority is disabled for this server. Please send a new request without a priority.",
                param="priority",
                status_code=503,
                err_type="ServiceUnavailableError",
            )
        if priority is not None and abs(priority) > MAX_PRIORITY:
            raise RequestError(f"priority must be in [-{MAX_PRIORITY}, {MAX_PRIORITY}], got {priority}.", param="priority")
        if timeout is not None and not 0 < timeout < math.inf:
            raise RequestError(f"timeout must be a positive number of seconds, got {timeout}.", param="timeout")
        routing_key = request.routing_key or ""
        _check_names(routing_key=[routing_key])
        hint = request.cache_hint
        if hint is not None and math.isnan(hint.pin_seconds):
            raise RequestError("cache_hint.pin_seconds must be a number.", param="cache_hint")
        self._thinking.check(wanted=request.require_reasoning, budget=request.max_thinking_tokens)
        return Service(
            priority=priority,
            cache_hint=hint,
            routing_key=routing_key,
            data_parallel_rank=self._replica(request),
            timeout=timeout,
            thinks=request.require_reasoning or request.max_thinking_tokens is not None,
            max_thinking_tokens=request.max_thinking_tokens,
        )

    def _replica(self, request: GenerateInput) -> int | None:
        for name in ("data_parallel_rank", "routed_dp_rank"):
            rank, size = getattr(request, name), self._info.dp_size
            if rank is not None and not 0 <= rank < size:
                raise RequestError(f"{name} must be in [0, {size}), got {rank}.", param=name)
        return request.routed_dp_rank if request.data_parallel_rank is None else request.data_parallel_rank

    def prompt(self, request: GenerateInput) -> GenerateReq:
        """The one prompt of a request whose output nobody wants, checked like any other. Safe on any thread."""
        nothing = {"n": 1, "min_new_tokens": 0, "max_new_tokens": 0, "sampling_seed": 0}
        plan = self.plan(
            GenerateInput(
                text=request.text,
                input_ids=request.input_ids,
                extra_key=request.extra_key,
                cache_salt=request.cache_salt,
                sampling_params=nothing,
            )
        )
        if not plan.is_single_prompt:
            raise RequestError("Give one prompt, not a batch.", param="input_ids" if plan.texts is None else "text")
        return self.prepare(plan)[0]

    def _params(self, given: dict[str, Any]) -> SamplingParams:
        # A null means "as if absent", except for max_new_tokens, where it means "no limit".
        own = {name: value for name, value in given.items() if value is not None or name == "max_new_tokens"}
        return SamplingParams.parse({**self._preferred, **own}, self._vocab_size)

    def _prompt_ids(self, plan: RequestPlan, index: int, embeds: list[np.ndarray]) -> np.ndarray:
        if embeds:
            ids, field = np.zeros(len(embeds[index]), np.int64), "input_embeds"
        elif plan.texts is not None:
            _check_unicode(text=[plan.texts[index]])
            ids, field = np.asarray(self._tokenizer.encode(plan.texts[index]), dtype=np.int64), "text"
        else:
            ids, field = _as_ids(plan.ids[index] if plan.ids is not None else []), "input_ids"
        if not len(ids):
            raise RequestError(f"{field} must not be empty.", param=field)
        wrong = np.flatnonzero((ids < 0) | (ids >= self._vocab_size))
        if len(wrong):
            raise RequestError(
                f"input_ids must be in [0, {self._vocab_size - 1}], got {ids[wrong[0]]} at position {wrong[0]}.", param=field
            )
        if plan.turn is not None:
            ids = self._continue(plan.turn, ids)
        limit, context_len = self._info.max_req_input_len, self._info.model.context_len
        if len(ids) <= limit:
            return ids
        if self._auto_truncate and plan.turn is None:
            return ids[:limit]
        if len(ids) >= context_len:
            raise RequestError(
                f"The input ({len(ids)} tokens) is longer than the model's context length ({context_len} tokens).", param=field
            )
        raise RequestError(f"The input ({len(ids)} tokens) is longer than the KV cache can serve ({limit} tokens).", param=field)

    def _start_of_continuations(self, plan: RequestPlan, prompts: list[np.ndarray]) -> int:
        """Where their log-probabilities begin: at the first token that any of them has of its own."""
        prompt = plan.continued or ""
        ids = self._tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        first = departure(np.asarray(ids, dtype=np.int64), prompts)
        if first == 0 and any(params is not None and params.start_len < 0 for params in plan.logprobs):
            raise RequestError(
                "The continuations change the first token of the prompt, which has no log-probability.", param="continuations"
            )
        return first

    def _continue(self, turn: Turn, ids: np.ndarray) -> np.ndarray:
        """The whole prompt of a session's turn; a BOS amid a conversation would be none of its author's."""
        if turn.history_len and ids[0] == self._bos_token_id:
            ids = ids[1:]
        return np.concatenate([turn.history(), ids])

    def _limit(self, params: SamplingParams, prompt_len: int, *, explicit: bool) -> SamplingParams:
        """max_new_tokens cut to the room that is left; an explicit value beyond the model's context is refused."""
        context_len = self._info.model.context_len
        wanted = params.max_new_tokens
        if explicit and wanted is not None and prompt_len + wanted > context_len and not self._auto_truncate:
            raise RequestError(
                f"Requested token count exceeds the model's maximum context length of {context_len} tokens. You requested a total"
                f" of {prompt_len + wanted} tokens: {prompt_len} tokens of input and {wanted} tokens of output.",
                param="max_new_tokens",
            )
        room = max(0, min(context_len, self._info.max_req_len) - prompt_len)
        limit = room if wanted is None else min(wanted, room)
        if params.min_new_tokens > limit:
            raise RequestError(
                f"min_new_tokens must be in [0, max_new_tokens({limit})], got {params.min_new_tokens}.", param="min_new_tokens"
            )
        return msgspec.structs.replace(params, max_new_tokens=limit)

    def _seed(self, given: int | None, sample: int) -> int:
        if given is None:
            return self._random.getrandbits(63)  # atomic
        if sample == 0:
            return given
        digest = hashlib.blake2b(f"{given}/{sample}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") % SEED_RANGE


def _session(request: GenerateInput, *, single: bool) -> SessionParams | None:
    if request.session_params is None:
        return None
    if request.session_id:
        raise RequestError("session_id and session_params cannot be used together.", param="session_params")
    if not single:
        raise RequestError("session_params: a turn of a session is one prompt with n = 1.", param="session_params")
    return request.session_params


def _check_names(**fields: list[str]) -> None:
    for name, values in fields.items():
        if any(len(value) > MAX_NAME_LEN for value in set(values)):
            raise RequestError(f"{name} must have at most {MAX_NAME_LEN} characters.", param=name)
    _check_unicode(**fields)


def _check_unicode(**fields: list[str]) -> None:
    """Refuse lone surrogates: JSON can carry them, UTF-8 cannot."""
    for name, values in fields.items():
        try:
            for value in set(values):
                value.encode()
        except UnicodeEncodeError:
            raise RequestError(f"{name} is not valid Unicode.", param=name) from None


def _preferred(config: TokenizerManagerConfig, vocab_size: int) -> dict[str, Any]:
    values = msgspec.json.decode(config.preferred_sampling_params, type=dict[str, Any])
    try:
        SamplingParams.parse(values, vocab_size)
    except RequestError as error:
        raise StartError(f"--preferred-sampling-params: {error}") from None
    return values


def _prompts(request: GenerateInput) -> tuple[list[str] | None, list[Sequence[int]] | None, list[Any] | None, bool]:
    """The prompts as texts, as ids or as embeddings, and whether the request had the form of a single prompt."""
    if sum(prompt is not None for prompt in (request.text, request.input_ids, request.input_embeds)) != 1:
        raise RequestError("Exactly one of text, input_ids and input_embeds must be given.", param="text")
    if request.input_embeds is not None:
        return None, None, *embeds_prompts(request)
    if request.text is not None:
        single = isinstance(request.text, str)
        texts: list[str] = [request.text] if isinstance(request.text, str) else request.text
        if not texts or not all(texts):
            raise RequestError("text must not be empty.", param="text")
        return texts, None, None, single
    given = request.input_ids
    if not given:
        raise RequestError("input_ids must not be empty.", param="input_ids")
    rows: list[Any] = list(given)
    single = isinstance(rows[0], int)  # a mixture is refused by _as_ids
    return None, ([rows] if single else rows), None, single


def _as_ids(values: Sequence[int]) -> np.ndarray:
    try:
        ids = np.asarray(values)
    except ValueError:  # ragged
        ids = np.empty((0, 0))
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise RequestError("input_ids must be a list of token ids, or a list of such lists.", param="input_ids")
    return ids


def _rids(given: str | list[str] | None, num_prompts: int, n: int, single: bool) -> tuple[list[str], list[str]]:
    """rid of each output, and the rid of the client that it belongs to."""
    if given is None:
        rids = [uuid.uuid4().hex for _ in range(num_prompts * n)]
        return rids, rids
    if isinstance(given, str) and not (single and n == 1):
        rids, families = [f"{given}_{index}" for index in range(num_prompts * n)], [given] * (num_prompts * n)
    else:
        bases = per_prompt(given, num_prompts, "rid", "")
        rids = [base if n == 1 else f"{base}_{sample}" for base in bases for sample in range(n)]
        families = [base for base in bases for _ in range(n)]
    if not all(families):
        raise RequestError("rid must not be empty.", param="rid")
    if len(set(rids)) < len(rids):
        raise RequestError("rid: the same one twice in a batch.", param="rid")
    return rids, families
