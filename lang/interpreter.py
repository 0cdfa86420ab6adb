"""One state of a running program: it takes steps, sends them to the backend in order and keeps what they give."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from contextlib import closing
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ..managers.reasoning.parser import split_reasoning
from . import ir
from .backend.base import Backend
from .errors import VariableError
from .media import as_data_uri
from .record import Event, Record
from .speculation import Speculation
from .step_queue import Step, StepQueue
from .transcript import Transcript
from .waiting import Signal

SEED_BITS = 63


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What all states of a run share."""

    program: str
    backend: Backend
    params: ir.SamplingParams
    stream: bool = False
    threaded: bool = True
    num_spec_tokens: int | None = None


running: ContextVar[Setting | None] = ContextVar("running", default=None)  # the run whose function is being executed here


class Interpreter:
    """``submit`` takes steps; everything else reads. Reading waits on ``signal``."""

    def __init__(self, setting: Setting, *, held: bool = False, path: tuple[int, ...] = (), record: Record | None = None) -> None:
        self.setting = setting
        self.signal = Signal()
        self.queue = StepQueue(setting.program, self.signal, threaded=setting.threaded, held=held)
        self.transcript = Transcript(setting.backend.get_chat_template)
        self.origin = self.transcript.copy()  # as it was at the fork
        self.variables: dict[str, Any] = {}
        self.meta_info: dict[str, Any] = {}
        self.record = record or Record()
        self._pending: dict[str, int] = {}  # writes of a variable that are still to come
        self._scopes: dict[str, int] = {}
        self._path = path
        self._num_gens = 0
        self._forks: list[list[Interpreter]] = []
        self._speculation = Speculation.of(setting)

    # --- steps ------------------------------------------------------------------------------------------------------------------

    def submit(self, value: object) -> None:
        """Take what ``s +=`` takes. Raises UnsupportedError before anything of it is sent."""
        parts = ir.parts_of(value)
        for part in parts:
            self._check(part)
        for part in parts:
            self._submit_part(part)

    def set(self, name: str, value: Any) -> None:
        """``s[name] = value``, in its turn."""
        self._submit(f"set {name!r}", lambda: self._write(name, value, None), name=name, quick=True)

    def flush(self) -> None:
        """Have what was put off, until an assistant's turn ends, sent now."""
        if self._speculation is not None and self.queue.error is None:
            self._submit("gen", lambda: self._speculate_end(), quick=False)

    def _check(self, part: ir.Expr) -> None:
        backend = self.setting.backend
        if isinstance(part, ir.Gen):
            backend.check_params(part.params.over(self.setting.params))
        elif isinstance(part, ir.Select):
            backend.check("select")
        elif isinstance(part, ir.Image):
            backend.check("image")
        elif isinstance(part, ir.Video):
            backend.check("video")

    def _submit_part(self, part: ir.Expr) -> None:
        name = part.name if isinstance(part, (ir.Gen, ir.Select, ir.ScopeBegin)) else None
        quick = isinstance(part, (ir.Text, ir.RoleBegin, ir.RoleEnd, ir.ScopeBegin, ir.ScopeEnd))
        quick = quick and not (isinstance(part, ir.RoleEnd) and self._speculation is not None)
        label = str(part) if isinstance(part, (ir.Gen, ir.Select)) else type(part).__name__.lower()
        self._submit(label, partial(self._perform, part), name=name, quick=quick)

    def _submit(self, label: str, perform: Callable[[], None], *, name: str | None = None, quick: bool) -> None:
        if name is not None:
            with self.signal:
                self._pending[name] = self._pending.get(name, 0) + 1
        self.queue.submit(Step(label, perform, quick))

    def _perform(self, part: ir.Expr) -> None:
        if isinstance(part, ir.Text):
            self._append(part.value)
        elif isinstance(part, ir.Gen):
            self._gen(part)
        elif isinstance(part, ir.Select):
            self._select(part)
        elif isinstance(part, (ir.RoleBegin, ir.RoleEnd)):
            self._role(part)
        elif isinstance(part, ir.Image):
            self._image(part)
        elif isinstance(part, ir.ScopeBegin):
            self._scopes[part.name] = len(self.transcript.text)
        elif isinstance(part, ir.ScopeEnd):
            self._write(part.name, self.transcript.text[self._scopes.pop(part.name) :], None)
        else:
            raise TypeError(f"{type(part).__name__} is no step")

    def _append(self, text: str) -> None:
        if self._speculation is not None:
            self._speculation.append(text)
        with self.signal:
            self.transcript.append(text)
        self.record.text(text, self.transcript.role)
        self.signal.notify()

    def _role(self, part: ir.RoleBegin | ir.RoleEnd) -> None:
        before = len(self.transcript.text)
        if isinstance(part, ir.RoleBegin):
            with self.signal:
                self.transcript.begin(part.role)
        else:
            self._speculate_end()
            with self.signal:
                self.transcript.end(part.role)
        self.record.text(self.transcript.text[before:], part.role)
        self.signal.notify()

    def _image(self, part: ir.Image) -> None:
        with self.signal:
            self.transcript.images += (as_data_uri(part.source),)
        if not self.setting.backend.is_chat_model:
            self._append(self.setting.backend.get_chat_template().image_token)
        self.record.events.append(Event(kind="image", role=self.transcript.role, start=self.record.now()))

    # --- calls ------------------------------------------------------------------------------------------------------------------

    def _gen(self, gen: ir.Gen) -> None:
        params = self._params(gen)
        if self._speculation is not None and self._speculation.put_off(gen, params, self.transcript):
            return
        event = Event(kind="gen", label=gen.name or "", role=self.transcript.role, start=self.record.now())
        if self.setting.stream and (params.n or 1) == 1 and gen.reasoning is None:
            text, meta = self._stream(gen, params)
            self._finish(event, [meta], text)
        else:
            texts, metas = self._whole(gen, params)
            self._finish(event, metas, "\n---\n".join(texts))

    def _whole(self, gen: ir.Gen, params: ir.SamplingParams) -> tuple[list[str], list[dict[str, Any]]]:
        """Without streaming. Text goes on with the first of several completions."""
        if self._speculation is not None:
            done = self._speculation.complete(self.transcript.prompt(), params)
        else:
            done = self.setting.backend.generate(self.transcript.prompt(), params)
        texts = [each.text for each in done]
        if gen.reasoning is not None:
            split = [split_reasoning(text, gen.reasoning) for text in texts]
            texts = [answer for _, answer in split]
            if gen.name is not None:
                thoughts = [thinking for thinking, _ in split]
                self._assign(f"{gen.name}_reasoning_content", thoughts if (params.n or 1) > 1 else thoughts[0])
        metas = [each.meta_info for each in done]
        with self.signal:
            self.transcript.append(texts[0])
        if (params.n or 1) > 1:
            self._write(gen.name, texts, metas)
        else:
            self._write(gen.name, texts[0], metas[0])
        return texts, metas

    def _stream(self, gen: ir.Gen, params: ir.SamplingParams) -> tuple[str, dict[str, Any]]:
        """Text and variable grow as the completion comes in."""
        meta: dict[str, Any] = {}
        value = ""
        with closing(self.setting.backend.generate_stream(self.transcript.prompt(), params)) as pieces:
            for new in pieces:
                if self.queue.error is not None:  # the state was ended
                    break
                meta = new.meta_info
                value += new.text
                with self.signal:
                    self.transcript.append(new.text)
                    self._assign(gen.name, value, meta)
                self.signal.notify()
        self._write(gen.name, value, meta)
        return value, meta

    def _select(self, part: ir.Select) -> None:
        event = Event(kind="select", label=part.name or "", role=self.transcript.role, start=self.record.now())
        decision = self.setting.backend.select(self.transcript.prompt(), part.choices, part.method)
        with self.signal:
            self.transcript.append(decision.decision)
        self._write(part.name, decision.decision, decision.meta_info)
        requests = decision.meta_info.get("requests", [])
        scores = decision.meta_info.get("normalized_prompt_logprobs")
        event.detail = {"choices": list(part.choices), **({} if scores is None else {"scores": scores})}
        self._finish(event, requests, decision.decision)

    def _speculate_end(self) -> None:
        """Complete what was put off in an assistant's turn with one call."""
        if self._speculation is None or not self._speculation.is_open:
            return
        event = Event(kind="gen", label="turn", role=self.transcript.role, start=self.record.now())
        text, values, meta = self._speculation.resolve()
        with self.signal:
            self.transcript.text = text
        for name, value in values:
            self._write(name, value, meta)
        self._finish(event, [meta], text)

    def _finish(self, event: Event, metas: list[dict[str, Any]], text: str) -> None:
        event.text = text
        reasons = [meta["finish_reason"] for meta in metas if meta.get("finish_reason")]
        if reasons:
            event.detail["finish_reason"] = reasons[0] if len(reasons) == 1 else reasons
        self.record.call(event, metas)

    def _params(self, gen: ir.Gen) -> ir.SamplingParams:
        params = gen.params.over(self.setting.params)
        if self.transcript.role is not None and not self.setting.backend.is_chat_model:
            stops = params.stops()
            ends = self.setting.backend.get_chat_template().stop_strings
            params = replace(params, stop=[*stops, *(end for end in ends if end not in stops)])
        if gen.params.seed is None and self.setting.params.seed is not None:
            params = replace(params, seed=self._derived_seed(self.setting.params.seed))
        self._num_gens += 1
        return params

    def _derived_seed(self, seed: int) -> int:
        """A run's seed gives each gen of each fork its own, the same in every run."""
        where = repr((seed, self._path, self._num_gens)).encode()
        return int.from_bytes(hashlib.blake2b(where, digest_size=8).digest()) >> (64 - SEED_BITS)

    # --- forks ------------------------------------------------------------------------------------------------------------------

    def fork(self, size: int) -> list[Interpreter]:
        """States that go on from here; each begins when this one has come to this point. Never waits."""
        number = len(self._forks)
        forks = [
            Interpreter(self.setting, held=True, path=(*self._path, number, index), record=Record(self.record.clock))
            for index in range(size)
        ]
        self._forks.append(forks)

        def drop(error: Exception) -> None:
            for each in forks:
                each.queue.fail(error)

        step = Step(f"fork {size}", lambda: self._release(forks), quick=size == 1 and self._speculation is None, dropped=drop)
        try:
            self.queue.submit(step)
        except Exception as error:  # whatever ended this state ends its forks
            drop(error)
            raise
        return forks

    def _release(self, forks: list[Interpreter]) -> None:
        self._speculate_end()
        try:
            self._prepare_forks(len(forks))
        except Exception as error:  # whatever ends this state ends its forks
            for each in forks:
                each.queue.fail(error)
            raise
        records = self.record.fork(len(forks))
        for each, record in zip(forks, records, strict=True):
            each._begin(self, record)

    def _begin(self, parent: Interpreter, record: Record) -> None:
        self.record = record
        self.transcript = parent.transcript.copy()
        self.origin = parent.transcript.copy()
        self.variables = dict(parent.variables)
        self.meta_info = dict(parent.meta_info)
        self.queue.release()

    def _prepare_forks(self, size: int) -> None:
        """Have the common text computed once, although several forks ask for it at once."""
        text = self.transcript.text
        if size < 2 or not text:
            return
        start = self.record.now()
        meta = self.setting.backend.prepare_forks(text, self.transcript.images)
        if meta is not None:
            self.record.call(Event(kind="cache", role=self.transcript.role, start=start), [meta])

    def gather(self, forks: Sequence[Interpreter]) -> None:
        """Take the forks' new variables as lists; the forks have ended."""
        gathered: dict[str, list[Any]] = {}
        for fork in forks:
            for name, value in fork.variables.items():
                if not self.knows(name):
                    gathered.setdefault(name, []).append(value)
        for name, values in gathered.items():
            self.set(name, values)

    def concatenate(self, forks: Sequence[Interpreter]) -> None:
        """Append what the forks have said since; they have ended."""

        def join() -> None:
            before = len(self.transcript.text)
            with self.signal:
                for fork in forks:
                    self.transcript.extend(fork.transcript, fork.origin)
            self.record.text(self.transcript.text[before:], self.transcript.role)
            self.signal.notify()

        self._submit("join", join, quick=True)

    # --- variables ----------------------------------------------------------------------------------------------------------------

    def _assign(self, name: str | None, value: Any, meta: Any = None) -> None:
        if name is not None:
            with self.signal:
                self.variables[name] = value
                if meta is not None:
                    self.meta_info[name] = meta

    def _write(self, name: str | None, value: Any, meta: Any) -> None:
        """A variable is complete."""
        self._assign(name, value, meta)
        if name is not None:
            with self.signal:
                self._pending[name] = self._pending.get(name, 1) - 1
        self.signal.notify()

    def knows(self, name: str) -> bool:
        """A step that was submitted writes the variable."""
        with self.signal:
            return name in self.variables or name in self._pending

    def close(self) -> None:
        """No more steps will come, neither here nor in a fork."""
        for group in self._forks:
            for fork in group:
                fork.close()
        self.queue.close()

    def fail(self, error: Exception) -> None:
        """End this state and its forks: what has not been sent never is, and streams under way are left."""
        for group in self._forks:
            for fork in group:
                fork.fail(error)
        self.queue.fail(error)

    def is_idle(self) -> bool:
        """All that was submitted is done; for those outside of the program, all that will be. Look with the signal held."""
        return self.queue.is_idle if running.get() is self.setting else self.queue.is_finished

    def is_complete(self, name: str) -> bool:
        """The variable has its value, or never will. Look with the signal held."""
        if self.queue.error is not None:
            return True
        pending = self._pending.get(name)
        return self.is_idle() if pending is None and name not in self.variables else not pending

    def value(self, name: str) -> Any:
        """A complete variable. Raises the state's error, or VariableError."""
        with self.signal:
            if name in self.variables and not self._pending.get(name):
                return self.variables[name]
        self.queue.check()
        raise VariableError(f"{self.setting.program} has no variable {name!r}; it has {sorted(self.variables)}")

    def meta(self, name: str) -> Any:
        """The backend's account of a complete variable: a dict, a list of them for n > 1, None for what no call wrote."""
        self.value(name)
        return self.meta_info.get(name)
