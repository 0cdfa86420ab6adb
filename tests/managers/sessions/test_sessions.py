"""Sessions without an engine: histories, branches, replacement, errors, capacity, ends."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from banyan.managers.errors import RequestError
from banyan.managers.sessions.sessions import OpenSession, SessionController, SessionParams, Turn


class Sessions:
    """A controller with one open session "s", and the whole of a turn in one call."""

    def __init__(self, **options: Any) -> None:
        self.controller = SessionController(2)
        self.controller.open("s", OpenSession.parse({"capacity_of_str_len": 1000, **options}), 0.0)

    def begin(self, rid: str, new: list[int], /, *, now: float = 0.0, **params: Any) -> tuple[Turn, list[int], list[str]]:
        """The turn, its prompt and the rids that it aborts."""
        turn = self.controller.begin(SessionParams.parse({"id": "s", **params}), rid, now)
        prompt = [*turn.history().tolist(), *new]
        try:
            return turn, prompt, self.controller.commit(turn, np.array(new, np.int32))
        except RequestError:
            self.controller.cancel(turn, now)
            raise

    def end(self, rid: str, output: list[int], *, now: float = 0.0, failed: bool = False, aborted: bool = False) -> list[str]:
        for token in output:
            self.controller.add_output(rid, [token])
        return [session.id for session in self.controller.finish(rid, now, failed=failed, aborted=aborted)]

    def run(self, rid: str, new: list[int], output: list[int], /, **params: Any) -> list[int]:
        prompt = self.begin(rid, new, **params)[1]
        self.end(rid, output)
        return prompt


def refused(sessions: Sessions, rid: str = "new", new: tuple[int, ...] = (1,), **params: Any) -> str:
    with pytest.raises(RequestError) as caught:
        sessions.begin(rid, list(new), **params)
    assert caught.value.status_code == 400
    return str(caught.value)


def test_turns_continue_the_turn_they_name() -> None:
    sessions = Sessions()
    assert sessions.run("a", [1, 2], [3]) == [1, 2]
    assert sessions.run("b", [4], [5, 6], rid="a") == [1, 2, 3, 4]
    assert sessions.run("c", [7], [], rid="b") == [1, 2, 3, 4, 5, 6, 7]
    assert sessions.run("d", [8], [], rid="a") == [1, 2, 3, 8]
    assert sessions.run("e", [9], []) == [9], "no rid: anew"
    assert sessions.run("f", [10], [], rid="c") == [1, 2, 3, 4, 5, 6, 7, 10]


@pytest.mark.parametrize(
    ("params", "history"),
    [
        ({}, [1, 2, 3, 4, 5, 6]),
        ({"offset": 0}, [1, 2, 3, 4, 5, 6]),
        ({"offset": 2}, [1, 2]),
        ({"offset": 5}, [1, 2, 3, 4, 5]),
        ({"offset": 99}, [1, 2, 3, 4, 5, 6]),
        ({"offset": -1}, [1, 2, 3, 4, 5]),
        ({"offset": -99}, []),
        ({"drop_previous_output": True}, [1, 2, 3, 4]),
        ({"drop_previous_output": True, "offset": -1}, [1, 2, 3]),
        ({"replace": False, "offset": None, "drop_previous_output": None}, [1, 2, 3, 4, 5, 6]),
    ],
)
def test_how_much_history_a_turn_takes(params: dict[str, Any], history: list[int]) -> None:
    sessions = Sessions()
    sessions.run("a", [1], [2, 3])
    sessions.run("b", [4], [5, 6], rid="a")
    assert sessions.run("c", [7], [], rid="b", **params) == [*history, 7]


def test_replace_takes_the_descendants_out_and_aborts_those_that_run() -> None:
    sessions = Sessions()
    sessions.run("a", [1], [2])
    sessions.run("b", [3], [4], rid="a")
    sessions.run("c", [5], [6], rid="b")
    sessions.begin("runs", [7], rid="b")
    sessions.run("other", [8], [9])
    _, prompt, aborted = sessions.begin("b2", [10], rid="a", replace=True)
    assert (prompt, aborted) == ([1, 2, 10], ["runs"])
    sessions.end("runs", [1], aborted=True)
    sessions.end("b2", [11])
    for gone in ("b", "c", "runs"):
        assert f"rid {gone} does not exist" in refused_at(sessions, gone)
    assert sessions.run("d", [12], [], rid="b2") == [1, 2, 10, 11, 12]
    assert sessions.run("e", [13], [], rid="other") == [8, 9, 13]


def refused_at(sessions: Sessions, parent: str, **params: Any) -> str:
    with pytest.raises(RequestError) as caught:
        sessions.controller.begin(SessionParams(id="s", rid=parent, **params), "new", 0.0)
    assert caught.value.status_code == 400
    assert caught.value.param == "session_params"
    return str(caught.value)


def test_replace_without_a_turn_clears_the_session() -> None:
    sessions = Sessions()
    sessions.run("a", [1], [2])
    sessions.begin("b", [3], rid="a")
    _, prompt, aborted = sessions.begin("a", [4], replace=True)
    assert (prompt, aborted) == ([4], ["b"])
    sessions.end("a", [5])
    assert sessions.run("c", [6], [], rid="a") == [4, 5, 6]


def test_a_turn_that_is_replaced_while_it_is_prepared_is_aborted() -> None:
    sessions = Sessions()
    controller = sessions.controller
    sessions.run("a", [1], [2])
    slow = controller.begin(SessionParams(id="s", rid="a"), "slow", 0.0)
    slower = controller.begin(SessionParams(id="s", rid="a", replace=True), "slower", 0.0)
    assert sessions.begin("fast", [4], replace=True)[2] == ["slow"]
    assert controller.commit(slow, np.array([5], np.int32)) == ["slow"]
    assert controller.commit(slower, np.array([5], np.int32)) == ["slower"]
    for rid in ("slow", "slower"):
        sessions.end(rid, [], aborted=True)
        assert "does not exist" in refused_at(sessions, rid)
    sessions.end("fast", [6])
    assert sessions.run("next", [7], [], rid="fast") == [4, 6, 7]


def test_what_is_refused() -> None:
    sessions = Sessions()
    sessions.run("a", [1], [2])
    sessions.begin("b", [3], rid="a")
    assert refused_at(sessions, "x") == "Invalid request: rid x does not exist in session s"
    assert "rid b of session s has not finished" in refused_at(sessions, "b")
    assert "rid b of session s has not finished" in refused_at(sessions, "b", replace=True)
    assert "names an earlier turn" in refused(sessions, "a")
    with pytest.raises(RequestError, match="Invalid request: session id t does not exist"):
        sessions.controller.begin(SessionParams(id="t"), "c", 0.0)
    assert sessions.run("c", [4], [], rid="a") == [1, 2, 4], "refusals change nothing"


def test_turns_that_fail_leave_and_turns_that_are_aborted_stay() -> None:
    sessions = Sessions()
    sessions.run("a", [1], [2])
    sessions.begin("failed", [3], rid="a")
    sessions.end("failed", [4], failed=True, aborted=True)
    assert "does not exist" in refused_at(sessions, "failed")
    sessions.begin("aborted", [5], rid="a")
    sessions.end("aborted", [6, 7], aborted=True)
    assert sessions.run("b", [8], [], rid="aborted") == [1, 2, 5, 6, 7, 8]
    assert sessions.end("unknown", [1]) == []


def test_streaming_sessions_only_append() -> None:
    sessions = Sessions(streaming=True)
    for name, value in (("replace", True), ("offset", 1), ("drop_previous_output", True)):
        assert "allows no replace, offset or drop" in refused(sessions, **{name: value})
    sessions.run("a", [1], [2])
    assert sessions.run("b", [3], [4]) == [1, 2, 3]
    assert sessions.run("c", [5], [6], rid="b") == [1, 2, 3, 4, 5]
    assert "rid a is not its last turn" in refused_at(sessions, "a")
    sessions.begin("d", [7])
    assert "has a turn under way" in refused(sessions)
    sessions.end("d", [8], aborted=True)
    assert sessions.run("d", [9], []) == [1, 2, 3, 4, 5, 6, 9], "an aborted turn never was"


def test_capacity() -> None:
    sessions = Sessions(capacity_of_str_len=10)
    sessions.run("a", [1, 2, 3], [4, 5])
    sessions.run("b", [6, 7, 8], [9], rid="a")
    with pytest.raises(RequestError, match="would keep 11 tokens in 3 turns, its capacity is 10"):
        sessions.begin("c", [1, 2], rid="a")
    assert sessions.run("c", [1, 2], [], rid="a", replace=True) == [1, 2, 3, 4, 5, 1, 2], "what is replaced makes room"
    sessions.run("d", [1], [1, 1, 1, 1])
    with pytest.raises(RequestError, match="would keep 13"):
        sessions.begin("e", [1], rid="d")
    assert sessions.run("f", [1], [], replace=True) == [1]
    small = Sessions(capacity_of_str_len=2)
    small.run("a", [], [])
    small.run("b", [], [])
    assert "in 3 turns" in refused(small, new=())


def test_sessions_are_opened_once_and_not_without_bound() -> None:
    controller = SessionController(2)
    request = OpenSession(capacity_of_str_len=1)
    controller.open("a", request, 0.0)
    with pytest.raises(RequestError, match="exists already") as caught:
        controller.open("a", request, 0.0)
    assert (caught.value.status_code, caught.value.param) == (400, "session_id")
    controller.open("b", request, 0.0)
    with pytest.raises(RequestError, match="2 sessions already") as caught:
        controller.open("c", request, 0.0)
    assert caught.value.status_code == 429
    assert [session.id for session in controller.close("a")] == ["a"]
    controller.open("c", request, 0.0)
    with pytest.raises(RequestError, match="session id a does not exist"):
        controller.close("a")


def test_a_busy_session_closes_with_its_last_turn() -> None:
    sessions = Sessions()
    sessions.begin("a", [1])
    sessions.begin("b", [1])
    assert sessions.controller.close("s") == []
    assert "session id s does not exist" in refused(sessions)
    with pytest.raises(RequestError, match="does not exist"):
        sessions.controller.close("s")
    assert sessions.end("a", [2]) == []
    assert sessions.end("b", [2]) == ["s"]
    assert len(sessions.controller) == 0


def test_idle_sessions_time_out_and_busy_ones_do_not() -> None:
    sessions = Sessions(timeout=10)
    controller = sessions.controller
    controller.open("forever", OpenSession(capacity_of_str_len=1), 0.0)
    assert controller.reap(10.0) == []
    sessions.begin("a", [1], now=9.0)
    assert controller.reap(1000.0) == []
    sessions.end("a", [], now=1000.0)
    assert controller.reap(1010.0) == []
    assert [session.id for session in controller.reap(1010.5)] == ["s"]
    assert len(controller) == 1


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "capacity_of_str_len"),
        ({"capacity_of_str_len": 0}, "capacity_of_str_len"),
        ({"capacity_of_str_len": "1"}, "capacity_of_str_len"),
        ({"capacity_of_str_len": 1, "session_id": ""}, "session_id"),
        ({"capacity_of_str_len": 1, "session_id": "\ud800"}, "session_id"),
        ({"capacity_of_str_len": 1, "session_id": "x" * 300}, "session_id"),
        ({"capacity_of_str_len": 1, "streaming": "yes"}, "streaming"),
        ({"capacity_of_str_len": 1, "timeout": 0}, "timeout"),
        ({"capacity_of_str_len": 1, "timeout": float("inf")}, "timeout"),
        ({"capacity_of_str_len": 1, "timeout": float("nan")}, "timeout"),
    ],
)
def test_what_cannot_be_opened(body: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        OpenSession.parse(body)
    assert caught.value.param == param


# --- against a naive model --------------------------------------------------------------------------------------------------------


class Naive:
    """Every turn with its whole prompt."""

    def __init__(self) -> None:
        self.turns: dict[str, tuple[list[int], list[int], str | None]] = {}  # prompt, output, parent
        self.own: dict[str, int] = {}
        self.running: set[str] = set()

    def below(self, rid: str | None) -> set[str]:
        found = {child for child, (_, _, parent) in self.turns.items() if parent == rid}
        return found | {each for child in found for each in self.below(child)}

    def begin(
        self, rid: str, new: list[int], parent: str | None, offset: int, drop: bool, replace: bool
    ) -> tuple[list[int], set[str]]:
        history: list[int] = []
        if parent is not None:
            prompt, output, _ = self.turns[parent]
            history = prompt + ([] if drop else output)
            history = history[:offset] if offset else history
        gone = (self.below(parent) if parent is not None else set(self.turns)) if replace else set()
        for each in gone:
            del self.turns[each], self.own[each]
        self.turns[rid] = (history + new, [], parent)
        self.own[rid] = len(new)
        aborted = gone & self.running
        self.running.add(rid)
        return history + new, aborted

    def end(self, rid: str, output: list[int]) -> None:
        self.running.discard(rid)
        if rid in self.turns:
            self.turns[rid][1].extend(output)
            self.own[rid] += len(output)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_sequence_of_turns_equals_the_naive_model(data: st.DataObject) -> None:
    sessions, naive = Sessions(), Naive()
    tokens = st.lists(st.integers(0, 9), max_size=4)
    for step in range(data.draw(st.integers(1, 20))):
        running = sorted(naive.running)
        if running and data.draw(st.booleans()):
            rid, output = data.draw(st.sampled_from(running)), data.draw(tokens)
            sessions.end(rid, output)
            naive.end(rid, output)
        else:
            done = sorted(set(naive.turns) - naive.running)
            parent = data.draw(st.sampled_from([None, *done]))
            new, offset = data.draw(tokens), data.draw(st.integers(-6, 6))
            drop, replace = data.draw(st.booleans()), data.draw(st.integers(0, 3)) == 0
            _, prompt, aborted = sessions.begin(
                f"t{step}", new, rid=parent, offset=offset, drop_previous_output=drop, replace=replace
            )
            expected, gone = naive.begin(f"t{step}", new, parent, offset, drop, replace)
            assert prompt == expected
            assert set(aborted) == gone
        (session,) = sessions.controller._sessions.values()
        assert set(session.turns) == set(naive.turns)
        assert session.num_tokens == sum(naive.own.values())
        assert session.num_running == len(naive.running)
