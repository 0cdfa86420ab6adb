"""Forks: what they share, when they begin, how they join."""

from __future__ import annotations

from typing import Any

import pytest
from scripted import ScriptedBackend

import banyan as bn
from banyan.lang.errors import BackendError, LangError


def run(script: ScriptedBackend, body: Any, **options: Any) -> Any:
    return bn.function(lambda s: body(s)).run(backend=script, **options)


def test_forks_go_on_from_the_same_point_and_gather() -> None:
    script = ScriptedBackend()

    def body(s: Any) -> None:
        s += "base" + bn.gen("x")
        forks = s.fork(3)
        assert len(forks) == 3
        forks += "-"
        forks += [bn.gen("y"), "no" + bn.gen("y"), bn.gen("z")]
        forks += lambda i: str(i)
        assert [fork.text() for fork in forks] == ["base<4>-<8>0", "base<4>-no<10>1", "base<4>-<8>2"]
        assert forks[0]["x"] == "<4>"
        forks.join()
        s += "after"

    state = run(script, body)
    assert state.text() == "base<4>after"
    assert state["y"] == ["<8>", "<10>"]
    assert state["z"] == ["<8>"]
    assert state["x"] == "<4>"
    assert script.texts("cache") == ["base<4>"]


def test_a_fork_before_any_text_works() -> None:
    script = ScriptedBackend()

    def body(s: Any) -> None:
        forks = s.fork(2)
        forks += lambda i: "ab"[i] + bn.gen("y")
        forks.join("concate_and_append")

    assert run(script, body).text() == "a<1>b<1>"
    assert script.texts("cache") == []


def test_a_fork_does_not_wait_for_its_parent() -> None:
    script = ScriptedBackend()
    script.gate.clear()

    def body(s: Any) -> None:
        s += "slow" + bn.gen("x")
        forks = s.fork(2)
        forks += bn.gen("y")
        assert "y" in forks[0]
        assert "y" not in s
        script.gate.set()
        forks.join()

    assert run(script, body)["y"] == ["<7>", "<7>"]
    assert [kind for kind, _, _ in script.calls] == ["generate", "cache", "generate", "generate"]


def test_forks_run_side_by_side() -> None:
    script = ScriptedBackend()
    seen = script.answer

    def answer(prompt: Any, params: Any) -> str:
        return str(seen(prompt, params))

    script.answer = answer
    script.gate.clear()

    def body(s: Any) -> None:
        forks = s.fork(5)
        forks += "p" + bn.gen("y")
        while script.max_waiting < 5:
            pass
        script.gate.set()
        forks.join()

    run(script, body)
    assert script.max_waiting == 5


def test_concatenation_takes_text_and_turns() -> None:
    script = ScriptedBackend()

    def body(s: Any) -> None:
        s += bn.user("q")
        forks = s.fork(2)
        forks += lambda i: bn.assistant(f"{i}" + bn.gen("y"))
        forks.join("concatenate_and_append")
        s += bn.user("and?")

    state = run(script, body)
    answers = [message["content"] for message in state.messages()]
    assert [answer[:1] for answer in answers] == ["q", "0", "1", "a"]
    assert state.text().count("<|im_start|>assistant") == 2
    assert "y" not in state


def test_concatenation_inside_a_turn() -> None:
    def body(s: Any) -> None:
        with s.assistant():
            s += "list:"
            forks = s.fork(2)
            forks += lambda i: f" {i}" + bn.gen("y")
            forks.join("concate_and_append")

    assert run(ScriptedBackend(), body).messages() == [{"role": "assistant", "content": "list: 0<29> 1<29>"}]


def test_a_fork_that_ends_in_another_turn_cannot_be_appended() -> None:
    def body(s: Any) -> None:
        forks = s.fork(2)
        forks += bn.user_begin() + "open"
        forks.join("concate_and_append")

    with pytest.raises(bn.StepError, match="join: a fork can be appended only if") as caught:
        run(ScriptedBackend(), body)
    assert isinstance(caught.value.__cause__, LangError)


def test_copy_and_with() -> None:
    def body(s: Any) -> None:
        s += "a"
        with s.copy() as c:
            c += "b" + bn.gen("x")
        with s.fork(2) as forks:
            forks += bn.gen("y")
        assert s["x"] == ["<2>"]

    state = run(ScriptedBackend(), body)
    assert state["y"] == ["<1>", "<1>"]
    assert state.text() == "a"


def test_forks_of_forks() -> None:
    def body(s: Any) -> None:
        s += "r"
        outer = s.fork(2)
        for index, state in enumerate(outer):
            state += str(index)
            inner = state.fork(3)
            inner += lambda i: str(i) + bn.gen("leaf")
            inner.join()
        outer.join()

    assert run(ScriptedBackend(), body)["leaf"] == [["<3>"] * 3] * 2


def test_a_fork_that_fails_fails_the_join_and_not_the_parent() -> None:
    script = ScriptedBackend(lambda prompt, params: BackendError("no") if prompt.text.endswith("1") else "ok")  # type: ignore[arg-type, return-value]

    def body(s: Any) -> str:
        s += "a"
        forks = s.fork(3)
        forks += lambda i: str(i) + bn.gen("y")
        with pytest.raises(bn.StepError, match="gen 'y': no"):
            forks.join()
        assert [fork.error() is None for fork in forks] == [True, False, True]
        s += bn.gen("x")
        return str(s["x"])

    assert run(script, body).ret_value == "ok"


def test_a_parent_that_fails_fails_its_forks() -> None:
    script = ScriptedBackend(lambda prompt, params: BackendError("no"))  # type: ignore[arg-type, return-value]
    kept: list[Any] = []

    def body(s: Any) -> None:
        script.gate.clear()
        s += "a" + bn.gen("x")
        forks = s.fork(2)
        kept.extend(forks)
        forks += bn.gen("y")
        script.gate.set()
        forks.join()

    with pytest.raises(bn.StepError, match="gen 'x': no"):
        run(script, body)
    for fork in kept:
        with pytest.raises(bn.StepError, match="gen 'x': no"):
            fork["y"]
    assert len(script.calls) == 1


def test_wrong_arguments() -> None:
    def body(s: Any) -> None:
        with pytest.raises(ValueError, match="at least 1"):
            s.fork(0)
        forks = s.fork(2)
        with pytest.raises(ValueError, match="3 steps for 2 forks"):
            forks += ["a", "b", "c"]
        with pytest.raises(ValueError, match="mode must be one of"):
            forks.join("merge")

    run(ScriptedBackend(), body)
