"""run_batch: order, bounds, errors per item, nested forks, the shared prefix."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from scripted import ScriptedBackend

import banyan as bn
from banyan.lang.errors import BackendError, ProgramError
from banyan.lang.global_config import global_config

LONG = "These instructions are the same for all items, and long enough to be worth a call. "


@bn.function
def ask(s: Any, question: str, style: str = "") -> str:
    s += LONG + style
    s += question + bn.gen("x")
    return f"{question}:{s['x']}"


def test_states_come_in_order() -> None:
    script = ScriptedBackend()
    states = ask.run_batch([{"question": "q" * i} for i in range(20)], backend=script, num_threads=3)
    assert [state.ret_value for state in states] == [f"{'q' * i}:<{len(LONG) + i}>" for i in range(20)]


def test_tuples_and_bound_arguments() -> None:
    script = ScriptedBackend()
    states = ask.run_batch([("a", "S"), ("b",)], backend=script)
    assert script.texts() == [LONG + "Sa", LONG + "b"] or script.texts() == [LONG + "b", LONG + "Sa"]
    assert states[0].ret_value.startswith("a:")
    assert ask.bind(style="T").run_batch([("a",)], backend=script)[0].text().startswith(LONG + "Ta")
    with pytest.raises(TypeError, match="takes 2 arguments, an item has 3"):
        ask.run_batch([("a", "b", "c")], backend=script)
    assert ask.run_batch([], backend=script) == []


def test_options_reach_every_gen() -> None:
    script = ScriptedBackend()
    ask.run_batch([("a",), ("b",)], backend=script, max_new_tokens=3, temperature=0.25)
    assert {(p.max_new_tokens, p.temperature) for kind, _, p in script.calls if kind == "generate"} == {(3, 0.25)}
    with pytest.raises(bn.UnsupportedError):
        ask.run_batch([("a",)], backend=ScriptedBackend(lacks={"seed": "no"}), seed=3)


def test_num_threads_bounds_how_many_run() -> None:
    script = ScriptedBackend()
    script.gate.clear()
    threading.Timer(0.2, script.gate.set).start()
    ask.run_batch([("a",)] * 12, backend=script, num_threads=4)
    assert script.max_waiting <= 4
    for wrong in (0, "many", 1.5):
        with pytest.raises(ValueError, match="num_threads"):
            ask.run_batch([("a",)], backend=script, num_threads=wrong)


def test_an_error_stays_with_its_item() -> None:
    def answer(prompt: Any, params: Any) -> Any:
        return BackendError("no") if "bad" in prompt.text else "ok"

    @bn.function
    def program(s: Any, word: str) -> str:
        if word == "raise":
            raise ZeroDivisionError("mine")
        s += word + bn.gen("x")
        return str(s["x"])

    states = program.run_batch([("good",), ("bad",), ("raise",), ("fine",)], backend=ScriptedBackend(answer))
    assert [state.ret_value for state in states] == ["ok", None, None, "ok"]
    assert isinstance(states[1].error(), bn.StepError)
    with pytest.raises(bn.StepError, match="gen 'x': no"):
        states[1]["x"]
    assert isinstance(states[2].error(), ProgramError)
    assert isinstance(states[2].error().__cause__, ZeroDivisionError)
    with pytest.raises(ProgramError, match="program ended with ZeroDivisionError: mine"):
        states[2]["x"]


@pytest.mark.parametrize("num_threads", [1, 4])
def test_nested_forks_and_batches_never_starve(num_threads: int) -> None:
    """DS-06: 32 programs x 4 forks on 4 threads, each of which runs a batch of its own."""
    script = ScriptedBackend()

    @bn.function
    def leaf(s: Any, i: int) -> str:
        s += f"leaf {i}" + bn.gen("x")
        return str(s["x"])

    @bn.function
    def tree(s: Any, i: int) -> list[str]:
        s += f"root {i}" + bn.gen("x")
        forks = s.fork(4)
        forks += lambda j: f"-{j}" + bn.gen("y")
        nested = leaf.run_batch([(j,) for j in range(3)], num_threads=1)
        forks.join()
        return [*s["y"], *(state.ret_value for state in nested)]

    states = tree.run_batch([(i,) for i in range(32)], backend=script, num_threads=num_threads)
    assert all(len(state.ret_value) == 7 for state in states)
    assert len(script.texts()) == 32 * 8


def test_generator_style_gives_each_as_it_is_there_and_stops_when_left() -> None:
    script = ScriptedBackend()
    states = ask.run_batch([(str(i),) for i in range(100)], backend=script, num_threads=2, generator_style=True)
    assert [next(states).ret_value[0] for _ in range(3)] == ["0", "1", "2"]
    states.close()
    done = len(script.texts())
    assert done <= 3 + 2 * 4 + 2
    assert [state.ret_value[0] for state in ask.run_batch(["a", "b"], backend=script, generator_style=True)] == ["a", "b"]


def test_progress_bar(capsys: Any) -> None:
    ask.run_batch([("a",), ("b",)], backend=ScriptedBackend(), progress_bar=True)
    assert "2/2" in capsys.readouterr().err


def test_streams_in_a_batch() -> None:
    states = ask.run_batch([("a",), ("b",)], backend=ScriptedBackend(), stream=True)
    assert [next(state.text_iter())[:5] for state in states] == ["These", "These"]


# --- the shared prefix ------------------------------------------------------------------------------------------------------------


@bn.function
def chat(s: Any, topic: str, rules: str) -> None:
    s += bn.system(rules)
    s += bn.user(f"Tell me of {topic}.")
    s += bn.assistant(bn.gen("x"))


def test_the_text_that_all_items_share_is_computed_once_beforehand() -> None:
    script = ScriptedBackend()
    rules = "Be brief, be kind, be right. " * 3
    chat.run_batch([{"topic": topic, "rules": rules} for topic in ("rain", "snow")], backend=script)
    (prefix,) = script.texts("cache")
    assert prefix == f"<|im_start|>system\n{rules}<|im_end|>\n<|im_start|>user\nTell me of "
    assert all(text.startswith(prefix) for text in script.texts())
    assert script.calls[0][0] == "cache"


def test_short_or_differing_prefixes_are_not_sent() -> None:
    script = ScriptedBackend()
    chat.run_batch([{"topic": "rain", "rules": "a"}, {"topic": "snow", "rules": "b" * 99}], backend=script)
    ask.run_batch([("a",)], backend=script)
    assert script.texts("cache") == []
    global_config.enable_precache_with_tracing = False
    try:
        ask.run_batch([("a",), ("b",)], backend=script)
    finally:
        global_config.enable_precache_with_tracing = True
    assert script.texts("cache") == []


def test_cache_by_hand() -> None:
    script = ScriptedBackend()
    assert ask.cache(script) == LONG
    assert ask.cache(script, style="S", question="T") == LONG + "ST"
    assert script.texts("cache") == [LONG, LONG + "ST"]


def test_a_function_that_cannot_be_traced_still_runs() -> None:
    @bn.function
    def program(s: Any, items: list[str]) -> None:
        s += LONG
        total = sum(len(item) for item in items)
        s += f"{total / len(items)}" + bn.gen("x")

    script = ScriptedBackend()
    states = program.run_batch([(["a"],), (["b", "c"],)], backend=script)
    assert all(state.error() is None for state in states)
    assert script.texts("cache") == [LONG]


def test_an_item_s_arguments_are_never_options() -> None:
    @bn.function
    def program(s: Any, top_p: float, stop: str) -> str:
        s += f"{top_p} {stop}" + bn.gen("x", top_p=top_p)
        return str(s["x"])

    script = ScriptedBackend()
    states = program.run_batch([{"top_p": 0.5, "stop": "a"}, {"top_p": 0.25, "stop": "b"}], backend=script, temperature=0.5)
    assert [state.ret_value for state in states] == ["<5>", "<6>"]
    assert {(p.top_p, p.stop, p.temperature) for kind, _, p in script.calls if kind == "generate"} == {
        (0.5, None, 0.5),
        (0.25, None, 0.5),
    }
    with pytest.raises(TypeError, match="unexpected keyword argument 'tempersture'"):
        program.run_batch([(0.5, "a")], backend=script, tempersture=0.5)
