"""Recovery: which requests go on when the engine's processes are started again, and which are told that they failed.

What has begun to answer fails, since its KV and the state of its sampling are gone. What has not is sent once more, and only once:
a request that kills the scheduler must not do so for ever.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from ..errors import EngineDeadError, RequestError
from ..generation import Output
from ..io_struct import FinishReason, GenerateReq
from ..request_table import Choice, RequestTable
from ..request_track import RequestWatch

REPLICA_LOST = "ReplicaLostError"
FAILED = FinishReason(kind="abort", message="The engine is started again.", status_code=503, err_type="EngineRestartError")


class Recovery:
    """Works on the table of a tokenizer manager, on its loop."""

    def __init__(
        self,
        table: RequestTable,
        watch: RequestWatch,
        forget: Callable[[str, FinishReason], None],
        send: Callable[[GenerateReq], None],
    ) -> None:
        """forget(rid, reason): no more output will come. send: to the new scheduler."""
        self._table = table
        self._watch = watch
        self._forget = forget
        self._send = send

    def give_up_begun(self, new_error: Callable[[], EngineDeadError]) -> None:
        """The processes have died: fail every request that cannot be sent again."""
        doomed = {id(choice.generation): choice.generation for choice in self._table.choices() if not _may_go_on(choice)}
        for choice in self._table.choices():
            if id(choice.generation) in doomed:
                self._end(choice)
            elif choice.sent:
                choice.sent, choice.resent = False, True
        for generation in doomed.values():
            generation.fail(new_error())

    def sends_again(self, choice: Choice, output: Output) -> bool:
        """Whether a request that ended with this output is sent once more, to another replica, instead.

        Of one that had begun at a replica that was lost the output then tells what its client has had.
        """
        message, reason, last = choice.track.message, output.finish_reason, choice.track.last
        if reason is None or reason.err_type != REPLICA_LOST:
            return False
        if last is not None:
            output.completion_tokens, output.cached_tokens = last.completion_tokens, last.cached_tokens
            output.num_retractions = last.num_retractions
        if message is None or not _may_go_on(choice):
            return False
        choice.resent = True
        self._send(message)
        return True

    async def go_on(self, load: Callable[[str], Awaitable[None]]) -> None:
        """New processes are there: send what waits. load(key) gives the scheduler a grammar first."""
        waiting = [choice for choice in self._table.choices() if choice.track.message is not None and not choice.sent]
        for choice in sorted(waiting, key=_has_grammar):
            message = choice.track.message
            if message is None or choice.sent:
                continue
            try:
                if message.grammar_key:
                    await load(message.grammar_key)
            except (RequestError, EngineDeadError) as error:
                if self._table.get(message.rid) is choice:
                    self._end(choice)
                    choice.generation.fail(error)
                continue
            if self._table.get(message.rid) is choice and not choice.sent:
                self._send(message)

    def _end(self, choice: Choice) -> None:
        rid = choice.track.rid
        self._forget(rid, FAILED)
        self._watch.failed(choice.track, FAILED)


def _may_go_on(choice: Choice) -> bool:
    return not choice.resent and choice.track.last is None and not choice.aborted


def _has_grammar(choice: Choice) -> bool:
    return choice.track.message is not None and bool(choice.track.message.grammar_key)
