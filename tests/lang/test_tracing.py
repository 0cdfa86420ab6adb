"""Traces without a backend: the steps of a program, and where a trace ends."""

from __future__ import annotations

from typing import Any

import pytest
from scripted import ScriptedBackend

import banyan as bn
from banyan.lang import ir
from banyan.lang.tracing import ForkNode, Placeholder, StopTracing


def test_the_steps_of_a_program() -> None:
    @bn.function
    def program(s: Any, topic: str) -> None:
        s += bn.system("rules")
        with s.user():
            s += "about " + topic
        s["mine"] = 1
        with s.var_scope("scope"):
            s += bn.gen("a", max_tokens=3)
        forks = s.fork(2)
        forks += lambda i: str(i) + bn.gen("b")
        forks.join()
        with s.copy() as c:
            c += "copied"
        s += "so " + s["a"] + bn.select("x", ["y", "z"])
        s.sync()

    trace = program.trace()
    assert trace.complete
    assert trace.nodes[:3] == [ir.RoleBegin("system"), ir.Text("rules"), ir.RoleEnd("system")]
    assert bn.gen("a", max_tokens=3) in trace.nodes
    forks = [node for node in trace.nodes if isinstance(node, ForkNode)]
    assert [[str(state.nodes[0].value) for state in node.states] for node in forks] == [["0", "1"], ["copied"]]
    assert trace.nodes[-1] == bn.select("x", ["y", "z"])
    assert "a" in trace
    assert "about" not in trace
    assert program.trace(topic="rain").nodes[4] == ir.Text("about rain")


def test_an_async_program_is_traced_without_a_loop() -> None:
    @bn.function
    async def program(s: Any) -> str:
        s += "a" + bn.gen("x")
        value = await s["x"]
        forks = s.fork(1)
        await forks.join()
        s += "b" + value
        return "done"

    trace = program.trace()
    assert trace.complete
    assert trace.ret_value == "done"


@pytest.mark.parametrize(
    "use",
    [
        lambda s, p: p.strip(),
        lambda s, p: len(p),
        lambda s, p: p == "a",
        lambda s, p: list(p),
        lambda s, p: 1 if p else 2,
        lambda s, p: p[0],
        lambda s, p: int(p),
        lambda s, p: "x" in p,
        lambda s, p: bool(s["x"]),
        lambda s, p: next(s.text_iter()),
        lambda s, p: inner("y"),
    ],
)
def test_a_trace_ends_where_a_real_value_is_needed(use: Any) -> None:
    @bn.function
    def program(s: Any, p: str) -> None:
        s += "first"
        use(s, p)
        s += "second"

    trace = program.trace()
    assert not trace.complete
    assert trace.nodes == [ir.Text("first")]


@bn.function
def inner(s: Any, x: str) -> None:
    s += x


def test_a_program_s_try_does_not_catch_the_end_of_a_trace() -> None:
    @bn.function
    def program(s: Any, p: str) -> None:
        try:
            p.strip()
        except Exception:
            s += "caught"

    assert program.trace().nodes == []
    with pytest.raises(StopTracing):
        len(Placeholder("x"))


def test_placeholders_in_text() -> None:
    p = Placeholder("x")
    assert f"a{p}b" == "a" + p + "b" == f"a{p!s}b"
    parts = ir.parts_of(p + bn.gen("y"))
    assert isinstance(parts[0], ir.Text)
    assert parts[1] == bn.gen("y")
    assert (bn.gen("y") + "z").parts == ir.parts_of(bn.gen("y") + "z")


def test_show_has_what_happened(tmp_path: Any) -> None:
    script = ScriptedBackend()

    @bn.function
    def program(s: Any) -> None:
        s += bn.user("1 < 2 & <b>")
        s += bn.assistant("so " + bn.gen("x"))
        forks = s.fork(2)
        forks += lambda i: bn.user(str(i)) + bn.assistant(bn.gen("y") + bn.select("z", ["p", "q"]))
        forks.join()

    picture = program.run(backend=script).show()
    data = picture.json
    kinds = [event["kind"] for event in data["events"]]
    assert kinds == ["text", "text", "gen", "text", "cache", "fork"]
    gen = data["events"][2]
    assert (gen["label"], gen["role"]) == ("x", "assistant")
    assert gen["prompt_tokens"] == gen["cached_tokens"] + gen["computed_tokens"] if "cached_tokens" in gen else True
    assert gen["seconds"] >= 0
    assert [len(group) for group in data["forks"]] == [2]
    child = data["forks"][0][0]["events"]
    assert [event["kind"] for event in child] == ["text", "text", "gen", "select", "text"]
    assert child[3]["detail"] == {"choices": ["p", "q"], "scores": [0.0, -1.0]}
    calls = [event for state in (data, *data["forks"][0]) for event in state["events"] if "prompt_tokens" in event]
    assert data["totals"]["prompt_tokens"] == sum(event["prompt_tokens"] for event in calls) > 0
    assert data["totals"]["computed_tokens"] == data["totals"]["prompt_tokens"] - data["totals"]["cached_tokens"]
    assert "1 &lt; 2 &amp; &lt;b&gt;" in picture.html
    assert "<b>" not in picture.html
    assert "http" not in picture.html.replace("https://example", "")
    assert picture.html.count('class="g"') == 1
    for name in ("run.json", "run.html"):
        picture.save(tmp_path / name)
        assert (tmp_path / name).read_text("utf-8")
    with pytest.raises(ValueError, match=r"\.json or \.html"):
        picture.save(tmp_path / "run.png")
    assert "iframe" in picture._repr_html_()
    assert "gen x" in picture.to_text()


def test_show_tells_an_error(capsys: Any) -> None:
    script = ScriptedBackend(lambda prompt, params: ValueError("odd <x>"))  # type: ignore[arg-type, return-value]

    @bn.function
    def program(s: Any) -> None:
        s += "a" + bn.gen("x")

    (state, _) = program.run_batch([(), ()], backend=script)
    picture = state.show()
    assert picture.json["error"] == "program, step gen 'x': odd <x>"
    assert "odd &lt;x&gt;" in picture.html


def test_verbosity(capsys: Any) -> None:
    @bn.function
    def program(s: Any) -> None:
        s += "a" + bn.gen("x")

    for level, expected in ((1, "a<1>"), (2, "gen x '<1>'")):
        bn.global_config.verbosity = level
        try:
            program.run(backend=ScriptedBackend())
        finally:
            bn.global_config.verbosity = 0
        assert expected in capsys.readouterr().err
