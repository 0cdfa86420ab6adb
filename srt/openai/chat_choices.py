"""Outputs of the engine as the choices of a chat reply, whole or as deltas: one parser per choice reads both."""

from __future__ import annotations

import uuid
from typing import Any

from ...managers.generation import Generation, Output
from ...managers.io_struct import FinishReason
from ...managers.logprobs.logprob_json import TokenTexts
from ...managers.reasoning.parser import OutputParser
from ...managers.tool_parsers.events import CallArguments, CallStart, Event, Reasoning, Text, collected
from .chat_tools import ChatPlan
from .hidden import LastStates
from .logprobs import chat_logprobs
from .protocol import ChatBody
from .replies import checked_reason


class _Answer:
    """One choice as it grows."""

    def __init__(self, parser: OutputParser, *, parallel: bool, stream_reasoning: bool) -> None:
        self._parser = parser
        self._parallel = parallel
        self._stream_reasoning = stream_reasoning
        self._thoughts: list[str] = []  # held back until the thinking is over
        self.opened = False
        self.has_calls = False

    def read(self, output: Output) -> list[Event]:
        """What an output adds."""
        events = self._parser.feed(output.text)
        if output.finish_reason is not None:
            events += self._parser.finish()
        if not self._parallel:
            events = [event for event in events if not (isinstance(event, CallStart | CallArguments) and event.index)]
        self.has_calls = self.has_calls or any(isinstance(event, CallStart) for event in events)
        merged = _merged(events)
        return merged if self._stream_reasoning else self._gathered(merged, last=output.finish_reason is not None)

    def _gathered(self, events: list[Event], *, last: bool) -> list[Event]:
        """The thinking as one event, before whatever follows it."""
        result: list[Event] = []
        for event in events:
            if isinstance(event, Reasoning):
                self._thoughts.append(event.text)
                continue
            result += self._whole_thought()
            result.append(event)
        return result + (self._whole_thought() if last else [])

    def _whole_thought(self) -> list[Event]:
        text, self._thoughts = "".join(self._thoughts), []
        return [Reasoning(text)] if text else []


def _merged(events: list[Event]) -> list[Event]:
    """Neighbours of one kind as one."""
    result: list[Event] = []
    for event in events:
        last = result[-1] if result else None
        if isinstance(event, Text) and isinstance(last, Text):
            result[-1] = Text(last.text + event.text)
        elif isinstance(event, Reasoning) and isinstance(last, Reasoning):
            result[-1] = Reasoning(last.text + event.text)
        elif isinstance(event, CallArguments) and isinstance(last, CallArguments) and event.index == last.index:
            result[-1] = CallArguments(event.index, last.text + event.text)
        else:
            result.append(event)
    return result


class ChatChoices:
    """Writes the choices of one request."""

    def __init__(self, body: ChatBody, generation: Generation, texts: TokenTexts, plan: ChatPlan, *, inside: bool | None) -> None:
        """inside: whether the answers begin within the thinking, see ChatPlan.parser."""
        self._body = body
        self._generation = generation
        self._texts = texts
        self._hidden = LastStates(wanted=bool(body.return_hidden_states))
        stream = body.stream_reasoning or not body.stream
        self._answers = [
            _Answer(plan.parser(inside=inside), parallel=plan.parallel, stream_reasoning=stream) for _ in generation.rids
        ]

    def whole(self, output: Output) -> dict[str, Any]:
        """The choice that a merged output is."""
        answer = self._answers[output.index]
        parsed = collected(answer.read(output))
        calls = [
            {
                "id": call.call_id or _call_id(),
                "index": call.index,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in parsed.calls
        ]
        choice: dict[str, Any] = {
            "index": output.index,
            "message": {
                "role": "assistant",
                "content": parsed.text,
                "reasoning_content": parsed.reasoning or None,
                "tool_calls": calls or None,
            },
            "logprobs": chat_logprobs(self._generation, output, self._texts),
            **_ending(checked_reason(output.finish_reason), answer),
        }
        choice |= self._hidden.field(output)
        if self._body.return_token_ids:
            choice["token_ids"] = output.token_ids
            choice["prompt_token_ids"] = self._generation.prompts[output.index]
        return choice

    def deltas(self, output: Output) -> list[dict[str, Any]]:
        """The choices that one output becomes, one chunk each: first the role, last the finish reason and nothing else."""
        reason = checked_reason(output.finish_reason)
        answer, index = self._answers[output.index], output.index
        choices = [] if answer.opened else [self._opening(index)]
        answer.opened = True
        contents = [_delta(index, **_fields(event)) for event in answer.read(output)]
        if (self._body.return_token_ids or self._body.logprobs) and output.token_ids:
            contents = contents or [_delta(index, content="")]
            contents[0]["logprobs"] = chat_logprobs(self._generation, output, self._texts)
            if self._body.return_token_ids:
                contents[0]["token_ids"] = output.token_ids
        choices += contents
        hidden = self._hidden.field(output)
        if reason is not None:
            choices.append({**_delta(index), **_ending(reason, answer), **hidden})
        return choices

    def _opening(self, index: int) -> dict[str, Any]:
        choice = _delta(index, role="assistant", content="")
        if self._body.return_token_ids:
            choice["prompt_token_ids"] = self._generation.prompts[index]
        return choice


def _ending(reason: FinishReason | None, answer: _Answer) -> dict[str, Any]:
    """An answer that ends by itself and has calls ends with them; one that is cut off is cut off."""
    if reason is None:
        return {"finish_reason": None, "matched_stop": None}
    if reason.kind == "stop" and answer.has_calls:
        return {"finish_reason": "tool_calls", "matched_stop": None}
    return {"finish_reason": reason.kind, "matched_stop": reason.matched}


def _call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


def _fields(event: Event) -> dict[str, Any]:
    """An event as fields of a delta."""
    if isinstance(event, Text):
        return {"content": event.text}
    if isinstance(event, Reasoning):
        return {"reasoning_content": event.text}
    if isinstance(event, CallStart):
        function = {"name": event.name, "arguments": ""}
        return {"tool_calls": [{"id": event.call_id or _call_id(), "index": event.index, "type": "function", "function": function}]}
    rest = {"index": event.index, "id": None, "type": "function", "function": {"name": None, "arguments": event.text}}
    return {"tool_calls": [rest]}


def _delta(
    index: int,
    *,
    role: str | None = None,
    content: str | None = None,
    reasoning_content: str | None = None,
    tool_calls: list[dict[str, Any]] | None = None,
) -> dict[str, Any]:
    return {
        "index": index,
        "delta": {"role": role, "content": content, "reasoning_content": reasoning_content, "tool_calls": tool_calls},
        "logprobs": None,
        "finish_reason": None,
        "matched_stop": None,
    }
