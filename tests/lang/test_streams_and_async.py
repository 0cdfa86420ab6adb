"""Streams, and programs on an event loop."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from scripted import ScriptedBackend

import banyan as bn
from banyan.lang.backend.base import Completion
from banyan.lang.errors import BackendError, ProgramError
from banyan.lang.state import AsyncProgramState


@bn.function
def two(s: Any) -> str:
    s += "begin " + bn.gen("a") + " middle "
    s += bn.gen("b") + bn.select("c", ["p", "q"]) + " end"
    return "done"


TEXT = "begin <6> middle <17>p end"


# --- streams ----------------------------------------------------------------------------------------------------------------------


def test_the_pieces_of_a_stream_are_the_text() -> None:
    script = ScriptedBackend()
    state = two.run(backend=script, stream=True)
    assert "".join(state.text_iter()) == TEXT
    assert state.text() == TEXT
    assert state.ret_value == "done"
    assert (state["a"], state["b"], state["c"]) == ("<6>", "<17>", "p")
    assert state.get_meta_info("b")["completion_tokens"] == 4
    assert script.texts("stream") == ["begin ", "begin <6> middle "]


def test_text_comes_before_the_end() -> None:
    script = ScriptedBackend()
    script.gate.clear()
    state = two.run(backend=script, stream=True)
    pieces = state.text_iter()
    assert next(pieces) == "begin "
    assert state.ret_value in (None, "done")
    script.gate.set()
    assert "".join(pieces) == TEXT[6:]


def test_a_variable_s_stream_can_be_asked_for_before_it_begins() -> None:
    script = ScriptedBackend()
    state = two.run(backend=script, stream=True)
    assert "".join(state.text_iter("b")) == "<17>"
    assert "".join(state.text_iter("a")) == "<6>"
    assert "".join(two.run(backend=script).text_iter("b")) == "<17>"
    with pytest.raises(KeyError, match="'nothing'"):
        list(two.run(backend=script, stream=True).text_iter("nothing"))


def test_many_streams_at_once() -> None:
    states = [two.run(backend=ScriptedBackend(), stream=True) for _ in range(30)]
    assert ["".join(state.text_iter()) for state in states] == [TEXT] * 30


def test_n_and_forks_in_a_stream() -> None:
    @bn.function
    def program(s: Any) -> None:
        s += "a" + bn.gen("x", n=2)
        forks = s.fork(2)
        forks += bn.gen("y")
        forks.join("concate_and_append")

    script = ScriptedBackend()
    state = program.run(backend=script, stream=True)
    assert "".join(state.text_iter()) == "a<1><4><4>"
    assert state["x"] == ["<1>", "<1>"]


def test_a_stream_that_fails_gives_what_it_had_and_raises() -> None:
    script = ScriptedBackend(lambda prompt, params: "ok" if prompt.text == "begin " else BackendError("no"))  # type: ignore[arg-type, return-value]
    state = two.run(backend=script, stream=True)
    got = []
    with pytest.raises(bn.StepError, match="gen 'b': no"):
        for piece in state.text_iter():
            got.append(piece)
    assert "".join(got) == "begin ok middle "
    with pytest.raises(bn.StepError):
        list(state.text_iter("b"))


def test_what_a_streaming_function_raises_is_the_state_s_error() -> None:
    @bn.function
    def program(s: Any) -> None:
        s += "a"
        raise ZeroDivisionError("mine")

    state = program.run(backend=ScriptedBackend(), stream=True)
    with pytest.raises(ProgramError, match="program ended with ZeroDivisionError: mine"):
        list(state.text_iter())
    assert isinstance(state.error(), ProgramError)


def test_async_iteration_over_a_plain_program() -> None:
    async def body() -> None:
        state = two.run(backend=ScriptedBackend(), stream=True)
        pieces = [piece async for piece in state.text_async_iter()]
        assert "".join(pieces) == TEXT
        metas = [meta["completion_tokens"] async for _, meta in state.text_async_iter("b", return_meta_data=True)]
        assert metas[-1] == 4
        with pytest.raises(KeyError):
            [piece async for piece in state.text_async_iter("nothing")]

    asyncio.run(body())


# --- async programs ---------------------------------------------------------------------------------------------------------------


@bn.function
async def agent(s: Any, question: str) -> str:
    s += bn.user(question)
    s += bn.assistant(bn.gen("a"))
    assert isinstance(s, AsyncProgramState)
    answer: str = await s["a"]
    forks = s.fork(2)
    forks += lambda i: f"{i}" + bn.gen("b")
    await forks.join()
    async with s.copy() as c:
        c += "copied" + bn.gen("z")
    s["mine"] = answer
    assert (await s.text()).endswith("<|im_end|>\n")
    assert len(await s.messages()) == 2
    assert (await s.get_meta_info("a"))["completion_tokens"] == len(answer)
    return f"{await s['mine']} {await s['b']}"


def expected(question: str) -> str:
    length = len(f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n")
    after = length + len(f"<{length}>") + len("<|im_end|>\n") + 1
    return f"<{length}> {[f'<{after}>'] * 2}"


def test_an_async_program() -> None:
    script = ScriptedBackend()
    assert asyncio.run(agent("why", backend=script)).ret_value == expected("why")

    async def several() -> list[Any]:
        return await asyncio.gather(*[agent.run_async("q" * i, backend=script) for i in range(1, 6)])

    assert [state.ret_value for state in asyncio.run(several())] == [expected("q" * i) for i in range(1, 6)]


def test_an_async_program_from_plain_code() -> None:
    script = ScriptedBackend()
    assert agent.run("why", backend=script).ret_value == expected("why")
    assert [state.ret_value for state in agent.run_batch([("a",), ("bb",)], backend=script)] == [expected("a"), expected("bb")]


def test_the_loop_goes_on_while_a_program_waits() -> None:
    script = ScriptedBackend()
    script.gate.clear()

    async def body() -> None:
        task = asyncio.ensure_future(agent("why", backend=script))
        for _ in range(5):
            await asyncio.sleep(0.001)
        assert not task.done()
        script.gate.set()
        assert (await task).ret_value == expected("why")

    asyncio.run(body())


def test_run_batch_async_bounds_and_keeps_errors() -> None:
    script = ScriptedBackend(lambda prompt, params: BackendError("no") if "bad" in prompt.text else f"<{len(prompt.text)}>")  # type: ignore[arg-type, return-value]

    async def body() -> list[Any]:
        return await agent.run_batch_async([("a",), ("bad",), ("cc",)], backend=script, num_threads=2)

    states = asyncio.run(body())
    assert [state.ret_value for state in states] == [expected("a"), None, expected("cc")]
    assert isinstance(states[1].error(), bn.StepError)
    plain = asyncio.run(two.run_batch_async([(), ()], backend=ScriptedBackend()))
    assert [state.text() for state in plain] == [TEXT, TEXT]


def test_an_async_stream() -> None:
    async def body() -> None:
        state = await agent.run_async("why", backend=ScriptedBackend(), stream=True)
        text = "".join([piece async for piece in state.text_async_iter()])
        assert text == await state.text()
        assert state.ret_value == expected("why")
        plain = await two.run_async(backend=ScriptedBackend(), stream=True)
        assert "".join([piece async for piece in plain.text_async_iter()]) == TEXT

    asyncio.run(body())


def test_errors_of_an_async_program() -> None:
    script = ScriptedBackend(lambda prompt, params: BackendError("no"))  # type: ignore[arg-type, return-value]
    for run in (lambda: asyncio.run(agent("why", backend=script)), lambda: agent.run("why", backend=script)):
        with pytest.raises(bn.StepError, match="agent, step gen 'a': no"):
            run()

    @bn.function
    async def program(s: Any) -> None:
        raise ZeroDivisionError("mine")

    for run in (lambda: asyncio.run(program(backend=script)), lambda: program.run(backend=script)):
        with pytest.raises(ZeroDivisionError, match="mine"):
            run()


def test_a_cancelled_program() -> None:
    script = ScriptedBackend()
    script.gate.clear()

    async def body() -> None:
        state = await agent.run_async("why", backend=script, stream=True)
        await asyncio.sleep(0.01)
        state.task.cancel()
        with pytest.raises(ProgramError, match="ended with CancelledError"):
            await state["a"]
        with pytest.raises(asyncio.CancelledError):
            await state.task

    asyncio.run(body())
    script.gate.set()


def test_cancelling_a_state_leaves_its_streams_and_ends_its_forks() -> None:
    left: list[str] = []

    class Endless(ScriptedBackend):
        def generate_stream(self, prompt: Any, params: Any) -> Any:
            try:
                while True:
                    yield Completion("x", {})
                    time.sleep(0.001)
            finally:
                left.append(prompt.text)

    @bn.function
    def program(s: Any) -> None:
        s += "a"
        forks = s.fork(2)
        forks += lambda i: str(i) + bn.gen("x")
        forks.join()

    state = program.run(backend=Endless(), stream=True)
    assert next(state.text_iter()) == "a"
    time.sleep(0.05)
    state.cancel()
    with pytest.raises(ProgramError, match="program was cancelled"):
        state.text()
    end = time.monotonic() + 10
    while sorted(left) != ["a0", "a1"]:
        assert time.monotonic() < end
        time.sleep(0.005)


def test_ctrl_c_ends_a_program() -> None:
    kept: list[Any] = []

    @bn.function
    def program(s: Any) -> None:
        kept.append(s)
        s += "a" + bn.gen("x")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        program.run(backend=ScriptedBackend())
    with pytest.raises(ProgramError, match="ended with KeyboardInterrupt"):
        kept[0].text()
