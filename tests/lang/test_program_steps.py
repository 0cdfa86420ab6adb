"""Programs on a scripted backend: every step, what it writes, and what it refuses."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import pytest
from scripted import ScriptedBackend

import banyan as bn
from banyan.lang import ir
from banyan.lang.errors import BackendError, LangError, NoBackendError
from banyan.lang.global_config import global_config
from banyan.lang.transcript import Prompt


@pytest.fixture
def script() -> ScriptedBackend:
    return ScriptedBackend()


@bn.function
def one(s: Any, text: str, **params: Any) -> str:
    s += text + bn.gen("x", **params)
    value: str = s["x"]
    return value


def run(script: ScriptedBackend, body: Any, **options: Any) -> Any:
    """Run a function of s as a program."""

    def program(s: Any) -> Any:
        return body(s)

    return bn.function(program).run(backend=script, **options)


# --- names and signatures ---------------------------------------------------------------------------------------------------------

GEN = [
    "name",
    "max_tokens",
    "min_tokens",
    "n",
    "stop",
    "stop_token_ids",
    "stop_regex",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "ignore_eos",
    "return_logprob",
    "logprob_start_len",
    "top_logprobs_num",
    "return_text_in_logprobs",
    "dtype",
    "choices",
    "choices_method",
    "regex",
    "json_schema",
]


def test_gen_takes_its_arguments_in_sglangs_order() -> None:
    parameters = inspect.signature(bn.gen).parameters
    positional = [name for name, each in parameters.items() if each.kind is each.POSITIONAL_OR_KEYWORD]
    assert positional == GEN
    assert {name for name in parameters if name not in GEN} == {"ebnf", "seed", "repetition_penalty"}
    assert list(inspect.signature(bn.select).parameters) == ["name", "choices", "temperature", "choices_method"]
    assert list(inspect.signature(bn.separate_reasoning).parameters) == ["expr", "model_type"]


def test_gen_becomes_select() -> None:
    step = bn.gen("x", choices=["a", "b"], choices_method=bn.greedy_token_selection)
    assert step == bn.select("x", ["a", "b"], choices_method=bn.greedy_token_selection)


@pytest.mark.parametrize(
    ("dtype", "regex", "stops"),
    [
        (int, r"[-+]?[0-9]+[ \n]*", [" ", "\n"]),
        ("float", r"[-+]?[0-9]*\.?[0-9]+[ \n]*", [" ", "\n"]),
        (bool, "(True|False)", []),
        (str, r"\"[\w\d\s]*\"", []),
    ],
)
def test_dtypes(dtype: Any, regex: str, stops: list[str]) -> None:
    step = bn.gen("x", dtype=dtype, stop="!")
    assert isinstance(step, ir.Gen)
    assert (step.params.regex, step.params.stops()) == (regex, ["!", *stops])


def test_gen_int_and_gen_string_leave_min_tokens_out() -> None:
    assert bn.gen_int("x", 4, 2, ["."], [5], "r", 0.5) == bn.gen("x", 4, None, 2, ["."], [5], "r", 0.5, dtype=int)
    assert bn.gen_string("x", seed=3) == bn.gen("x", dtype=str, seed=3)
    for wrong in ({"min_tokens": 1}, {"name": "y"}, {"regex": "a"}):
        with pytest.raises(TypeError, match="unexpected argument"):
            bn.gen_int("x", **wrong)
    with pytest.raises(TypeError, match="too many"):
        bn.gen_int(*range(18))


def test_dtype_wins_over_regex_and_says_so() -> None:
    with pytest.warns(UserWarning, match="dtype is used"):
        step = bn.gen("x", dtype=bool, regex="abc")
    assert isinstance(step, ir.Gen)
    assert step.params.regex == "(True|False)"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: bn.gen("x", regex="("), "does not compile"),
        (lambda: bn.gen("x", regex="a", json_schema="{}"), "only one of"),
        (lambda: bn.gen("x", ebnf="root ::= 'a'", json_schema="{}"), "only one of"),
        (lambda: bn.gen("x", dtype=list), "dtype"),
        (lambda: bn.gen("x", dtype="complex"), "dtype"),
        (lambda: bn.select("x"), "non-empty strings"),
        (lambda: bn.select("x", "ab"), "non-empty strings"),
        (lambda: bn.select("x", ["a", ""]), "non-empty strings"),
        (lambda: bn.select("x", ["a", 3]), "non-empty strings"),  # type: ignore[list-item]
        (lambda: bn.select("x", ["a"], temperature=0.5), "temperature"),
        (lambda: bn.separate_reasoning(bn.gen("x"), "unheard-of"), "known are"),
    ],
)
def test_what_no_backend_could_do_is_refused_when_it_is_written(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_expressions_add_up() -> None:
    step = "a" + bn.gen("x") + "b" + bn.gen("y") + (bn.gen("z") + "c")
    assert [str(part) if isinstance(part, ir.Gen) else part.value for part in ir.parts_of(step)] == [
        "a", "gen 'x'", "b", "gen 'y'", "gen 'z'", "c",
    ]  # fmt: skip


@pytest.mark.parametrize("value", [3, object(), {"a": 1}, b"bytes"])
def test_only_text_and_steps_are_appended(script: ScriptedBackend, value: Any) -> None:
    with pytest.raises(TypeError, match=type(value).__name__):
        run(script, lambda s: s.__iadd__(value))


def test_none_is_not_appended(script: ScriptedBackend) -> None:
    with pytest.raises(ValueError, match="None was appended"):
        run(script, lambda s: s.__iadd__(None))


def test_a_program_needs_s() -> None:
    with pytest.raises(TypeError, match='The first argument must be "s"'):
        bn.function(lambda state: None)


def test_no_backend() -> None:
    with pytest.raises(NoBackendError, match="set_default_backend"):
        one("a")
    with pytest.raises(TypeError, match="not int"):
        one.run("a", backend=3)
    assert bn.flush_cache() is False
    assert bn.get_server_info() is None


def test_default_backend(script: ScriptedBackend) -> None:
    bn.set_default_backend(script)
    try:
        assert one("ab").ret_value == "<2>"
        assert bn.flush_cache() is False
    finally:
        bn.set_default_backend(None)
    assert global_config.default_backend is None


# --- gen --------------------------------------------------------------------------------------------------------------------------


def test_text_and_variables(script: ScriptedBackend) -> None:
    state = one.run("hello ", backend=script)
    assert state.ret_value == state["x"] == state.get_var("x") == "<6>"
    assert state.text() == "hello <6>"
    assert "x" in state
    assert "y" not in state
    assert state.error() is None
    meta = state.get_meta_info("x")
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (6, 3)
    with pytest.raises(KeyError, match="no variable 'y'"):
        state["y"]


def test_gen_values_win_over_runs_and_none_inherits(script: ScriptedBackend) -> None:
    one.run("a", backend=script, max_new_tokens=7, temperature=0.5, stop="z", min_tokens=3, seed=11, repetition_penalty=1.5)
    params = script.calls[-1][2]
    assert (params.max_new_tokens, params.temperature, params.stops(), params.min_new_tokens) == (7, 0.5, ["z"], 3)
    assert (params.top_p, params.top_k, params.min_p, params.ignore_eos) == (1.0, -1, 0.0, False)
    assert params.repetition_penalty == 1.5
    run(
        script, lambda s: s.__iadd__(bn.gen("x", max_tokens=2, temperature=0.0, stop=["a", "b"], ebnf="g", seed=3)), temperature=0.9
    )
    params = script.calls[-1][2]
    assert (params.max_new_tokens, params.temperature, params.stops(), params.ebnf, params.seed) == (2, 0.0, ["a", "b"], "g", 3)


def test_defaults_are_sglangs(script: ScriptedBackend) -> None:
    one.run("a", backend=script)
    given = {name: value for name, value in vars(script.calls[-1][2]).items() if value is not None}
    assert given == {
        "max_new_tokens": 128, "n": 1, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "frequency_penalty": 0.0,
        "presence_penalty": 0.0, "ignore_eos": False,
    }  # fmt: skip


def test_n_makes_a_list_and_text_goes_on_with_the_first(script: ScriptedBackend) -> None:
    """DS-02."""
    script.answer = lambda prompt, params: ["A", "B", "C"][: params.n]
    state = run(script, lambda s: s.__iadd__("p" + bn.gen("x", n=3) + "q" + bn.gen("y")))
    assert state["x"] == ["A", "B", "C"]
    assert state["y"] == "A"
    assert state.text() == "pAqA"
    assert len(state.get_meta_info("x")) == 3


def test_a_run_s_seed_gives_each_gen_its_own_and_the_same_in_every_run(script: ScriptedBackend) -> None:
    def body(s: Any) -> None:
        s += bn.gen("a") + bn.gen("b")
        forks = s.fork(2)
        forks += bn.gen("c")
        forks.join()

    seeds = []
    for seed in (5, 5, 6):
        script.calls.clear()
        run(script, body, seed=seed)
        seeds.append(sorted(params.seed for kind, _, params in script.calls if kind == "generate"))
    assert seeds[0] == seeds[1]
    assert len(set(seeds[0])) == 4
    assert not set(seeds[0]) & set(seeds[2])
    assert all(0 <= seed < 1 << 63 for seed in seeds[0])


def test_set_var_and_scopes(script: ScriptedBackend) -> None:
    def body(s: Any) -> None:
        s += "a"
        with s.var_scope("inner"):
            s += "b" + bn.gen("x") + "c"
        s["mine"] = 5
        s.set_var("x", "new")

    state = run(script, body)
    assert state["inner"] == "b<2>c"
    assert state["mine"] == 5
    assert state["x"] == "new"
    assert state.text() == "ab<2>c"


def test_the_latest_of_several_writes_is_read(script: ScriptedBackend) -> None:
    def body(s: Any) -> list[str]:
        seen = []
        for _ in range(3):
            s += "word" + bn.gen("x")
            seen.append(s["x"])
        return seen

    assert run(script, body).ret_value == ["<4>", "<11>", "<19>"]


@pytest.mark.parametrize("use_thread", [True, False])
def test_with_and_without_threads(script: ScriptedBackend, use_thread: bool) -> None:
    def body(s: Any) -> None:
        s += "a" + bn.gen("x")
        forks = s.fork(3)
        forks += lambda i: str(i) + bn.gen("y")
        forks.join()
        s += "".join(s["y"])

    state = run(script, body, use_thread=use_thread)
    assert state.text() == "a<1><5><5><5>"


# --- select -----------------------------------------------------------------------------------------------------------------------


def test_select_appends_its_choice(script: ScriptedBackend) -> None:
    state = run(script, lambda s: s.__iadd__("p" + bn.select("x", ["b", "i", "c"]) + "!"))
    assert state["x"] == "b"  # ord("b") % 7 == 0
    assert state.text() == "pb!"
    assert state.get_meta_info("x")["normalized_prompt_logprobs"] == [0.0, 0.0, -1.0]


# --- roles ------------------------------------------------------------------------------------------------------------------------


def test_roles_in_all_their_forms(script: ScriptedBackend) -> None:
    def body(s: Any) -> None:
        s += bn.system("S") + bn.user("U")
        s += bn.assistant_begin() + bn.gen("x") + bn.assistant_end()
        s.user("V")
        with s.assistant():
            s += "pre" + bn.gen("y")
        s += bn.user_begin()
        s += "W" + bn.user_end() + bn.assistant()

    state = run(script, body)
    assert state.messages() == [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "U"},
        {"role": "assistant", "content": state["x"]},
        {"role": "user", "content": "V"},
        {"role": "assistant", "content": "pre" + state["y"]},
        {"role": "user", "content": "W"},
        {"role": "assistant", "content": ""},
    ]
    turns = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in state.messages())
    assert state.text() == turns
    assert script.calls[0][2].stops() == ["<|im_end|>"]


def test_a_default_system_prompt_is_inserted() -> None:
    script = ScriptedBackend(template="qwen")
    state = run(script, lambda s: s.__iadd__(bn.user("hi") + bn.assistant(bn.gen("x"))))
    assert state.messages()[0] == {"role": "system", "content": "You are a helpful assistant."}
    assert state.text().startswith("<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\nhi")
    assert len(run(script, lambda s: s.__iadd__(bn.system("S") + bn.user("hi"))).messages()) == 2


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        (lambda: bn.user_begin() + bn.assistant_begin(), "inside a turn of 'user'"),
        (bn.user_end, "'user', but none is open"),
        (lambda: bn.user_begin() + bn.system_end(), "but 'user' is open"),
    ],
)
def test_wrong_order_of_roles(script: ScriptedBackend, steps: Any, message: str) -> None:
    with pytest.raises(bn.StepError, match=message) as caught:
        run(script, lambda s: s.__iadd__(steps()))
    assert caught.value.step in ("rolebegin", "roleend")
    assert isinstance(caught.value.__cause__, LangError)


def test_separate_reasoning(script: ScriptedBackend) -> None:
    script.answer = lambda prompt, params: "<think>\nhard\n</think>\n\n42"

    def body(s: Any) -> None:
        s += bn.user("q")
        s += bn.assistant(bn.separate_reasoning("so: " + bn.gen("x"), model_type="qwen3"))

    for stream in (False, True):
        state = bn.function(lambda s: body(s)).run(backend=script, stream=stream)
        assert state["x"] == "42"
        assert state["x_reasoning_content"] == "hard"
        assert state.messages()[-1]["content"] == "so: 42"
    script.answer = lambda prompt, params: ["a</think>b", "never ends"]
    state = run(script, lambda s: s.__iadd__(bn.separate_reasoning(bn.gen("x", n=2), "deepseek-r1")))
    assert (state["x"], state["x_reasoning_content"]) == (["b", ""], ["a", "never ends"])


# --- images -----------------------------------------------------------------------------------------------------------------------

PNG = b"\x89PNG\r\n\x1a\n123"


def test_images(script: ScriptedBackend, tmp_path: Any) -> None:
    seen: list[Prompt] = []

    def answer(prompt: Prompt, params: Any) -> str:
        seen.append(prompt)
        return "a cat"

    script.answer = answer
    (tmp_path / "cat.png").write_bytes(PNG)
    state = run(script, lambda s: s.__iadd__(bn.user(bn.image(str(tmp_path / "cat.png")) + "what?") + bn.assistant(bn.gen("x"))))
    assert "<image>what?" in state.text()
    assert seen[0].images[0].startswith("data:image/png;base64,")
    assert [part["type"] for part in seen[0].messages[0]["content"]] == ["image_url", "text"]
    for source, error in ((b"no picture", "PNG, JPEG"), (7, "not int"), ("/no/such/file", "No such file")):
        with pytest.raises(bn.StepError, match=error) as caught:
            run(script, lambda s, source=source: s.__iadd__(bn.image(source)))
        assert caught.value.step == "image"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(script, lambda s: s.__iadd__(bn.image("https://example.org/cat.png") + bn.image(PNG)))


# --- errors -----------------------------------------------------------------------------------------------------------------------


def failing(prompt: Prompt, params: Any) -> Any:
    return BackendError("too hot", status=503) if "bad" in prompt.text else "good"


def test_a_failing_step_is_named_wherever_one_looks() -> None:
    script = ScriptedBackend(failing)
    kept: list[Any] = []

    @bn.function
    def program(s: Any) -> None:
        kept.append(s)
        s += "fine " + bn.gen("a")
        s += "bad " + bn.gen("b") + bn.gen("c")
        s["b"]

    with pytest.raises(bn.StepError, match="program, step gen 'b': too hot") as caught:
        program.run(backend=script)
    assert (caught.value.step, caught.value.program) == ("gen 'b'", "program")
    assert isinstance(caught.value.__cause__, BackendError)
    assert caught.value.__cause__.status == 503
    (state,) = kept
    assert state["a"] == "good"
    for look in (lambda: state["b"], lambda: state["c"], state.text, state.messages, state.sync, lambda: state.get_meta_info("c")):
        with pytest.raises(bn.StepError, match="too hot"):
            look()
    with pytest.raises(bn.StepError, match="too hot"):
        state += "more"
    with pytest.raises(bn.StepError, match="too hot"):
        state.fork(2)
    assert isinstance(state.error(), bn.StepError)
    assert len(script.calls) == 2


def test_a_step_that_fails_after_the_function_has_returned_fails_the_run() -> None:
    with pytest.raises(bn.StepError, match="gen 'x'"):
        run(ScriptedBackend(failing), lambda s: s.__iadd__("bad" + bn.gen("x")))


def test_what_the_function_raises_comes_out_as_it_is(script: ScriptedBackend) -> None:
    with pytest.raises(ZeroDivisionError):
        run(script, lambda s: 1 / 0)


# --- what a backend lacks ---------------------------------------------------------------------------------------------------------


@bn.function
def chooser(s: Any) -> None:
    s += "p" + bn.gen("a")
    s += bn.select("x", ["a", "b"])


@bn.function
def constrained(s: Any) -> None:
    s += "p" + bn.gen("a")
    s += bn.gen("x", regex="[0-9]")


@bn.function
def typed(s: Any) -> None:
    s += "p" + bn.gen("a") + bn.gen("x", dtype=int)


@bn.function
def filmed(s: Any) -> None:
    s += "p" + bn.gen("a") + bn.video("film", 3)


@bn.function
def neutral(s: Any) -> None:
    s += "p" + bn.gen("x", n=1, top_k=-1, regex=None, choices=None)


def helper() -> Any:
    return bn.gen("x", json_schema="{}")


@bn.function
def hidden(s: Any) -> None:
    s += "p" + helper()


LACKS = dict.fromkeys(("select", "regex", "json_schema", "n", "top_k"), "it cannot")


@pytest.mark.parametrize(
    ("program", "feature"),
    [(chooser, "select"), (constrained, "regex"), (typed, "regex"), (filmed, "video"), (hidden, "json_schema")],
)
def test_a_program_that_cannot_run_fails_before_its_first_call(program: Any, feature: str) -> None:
    script = ScriptedBackend(lacks=LACKS)
    with pytest.raises(bn.UnsupportedError, match=f"the script cannot run this program: {feature}: ") as caught:
        program.run(backend=script)
    assert caught.value.feature == feature
    assert script.calls == []
    with pytest.raises(bn.UnsupportedError):
        one.run("a", backend=script, top_k=3)
    neutral.run(backend=script)
    assert len(script.calls) == 1


def test_a_step_in_a_helper_is_refused_when_it_is_appended() -> None:
    script = ScriptedBackend(lacks=LACKS)

    @bn.function
    def program(s: Any) -> None:
        s += "p" + bn.gen("a")
        s += helper()

    with pytest.raises(bn.UnsupportedError, match="json_schema"):
        program.run(backend=script)


# --- programs in programs, bind ---------------------------------------------------------------------------------------------------


def test_a_program_may_call_another_on_the_same_backend(script: ScriptedBackend) -> None:
    @bn.function
    def outer(s: Any) -> str:
        inner = one("inner ")
        s += "outer " + inner.ret_value + bn.gen("x")
        return str(s["x"])

    assert outer.run(backend=script).ret_value == "<9>"
    assert script.texts() == ["inner ", "outer <6>"]


def test_bind(script: ScriptedBackend) -> None:
    @bn.function(num_api_spec_tokens=7)
    def program(s: Any, a: str, b: str) -> None:
        s += a + b + bn.gen("x")

    bound = program.bind(a="A")
    assert bound.num_api_spec_tokens == 7
    assert bound.run(b="B", backend=script).text() == "AB<2>"
    assert bound.run(a="ignored", b="B", backend=script).text() == "AB<2>"
    with pytest.raises(TypeError, match="no argument 'c'"):
        program.bind(c=1)
