"""Record and replay: the same decisions come again, a tampered record shows where not, and a record holds no prompt."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from grammars import FIRST, WORDS, grammar
from harness import CONFIG, IPC, SCRIPT, VOCAB, prompt_of

from banyan.managers import control as control_module
from banyan.managers.config import RunnerConfig, SchedulerConfig
from banyan.managers.constrained.constraint import Constraint
from banyan.managers.constrained.jump_forward import JumpForward
from banyan.managers.constrained.thinking import Thinking, ThinkingParams
from banyan.managers.control import Control
from banyan.managers.decisions.file import DecisionFile, NoFile, Subject, write_crash
from banyan.managers.decisions.log import Disguise, NoDisguise, Recorder, TurnRecord, disguised
from banyan.managers.decisions.replay import Difference, RecordError, read_record, replay
from banyan.managers.errors import StartError
from banyan.managers.event_loop import make_loop
from banyan.managers.faults import Faults
from banyan.managers.invariants import MemoryBreach
from banyan.managers.io_struct import (
    AbortReq,
    CacheHint,
    CacheReportReq,
    ContinueReq,
    DropGrammarReq,
    FlushCacheReq,
    GenerateReq,
    LoadGrammarReq,
    LogprobParams,
    PauseReq,
    ReleaseHoldReq,
    Tick,
    TokenOutput,
    pack_ids,
    unpack_ids,
)
from banyan.managers.sampling_params import GRAMMAR_FIELDS, SamplingParams
from banyan.managers.scheduler_process import build_memory, build_scheduler
from banyan.model_executor.factory import create_runner
from banyan.srt.cli import main

TOKENIZER: Any = SimpleNamespace(
    eos_token_ids=[],
    byte_table=None,
    vocab_size=VOCAB,
    special_ids=frozenset(),
    decode=lambda ids, skip_special_tokens=True: "".join(f"<{id}>" for id in ids),
)


class Recorded:
    """A scheduler with its Control, recorded to a file, turned by hand over the token oracle. ``time`` is its clock."""

    def __init__(
        self,
        folder: Path,
        path: Path | None,
        *,
        overlap: bool,
        page_size: int,
        faults: dict[str, float] | None = None,
        **options: Any,
    ) -> None:
        runner = RunnerConfig(
            model_path=str(folder),
            load_format="oracle",
            page_size=page_size,
            overlap=overlap,
            max_total_tokens=options.pop("total", 368),
        )
        self.config = SchedulerConfig(ipc=IPC, runner=runner, tokenizer_path="", **{"max_running_requests": 6, **options})
        self.runner = create_runner(runner)
        info, self.memory = build_memory(self.config, self.runner, TOKENIZER)
        self.scheduler = build_scheduler(self.config, info, self.memory, self.runner, self._sent)
        self.scheduler.faults = Faults(faults)
        self.subject = Subject(self.config, info, self.memory.table.eos_mask, self.scheduler.faults)
        self.recorder = Recorder(self.scheduler, DecisionFile(str(path), self.subject) if path else NoFile())
        self.inbox: list[Any] = []
        self.time = 100.0
        self.control = Control(
            self.scheduler,
            self,  # type: ignore[arg-type]
            lambda reply: None,
            TOKENIZER,
            self.config,
            clock=lambda: self.time,
            tap=self.recorder.take,
        )
        self.loop = make_loop(self.recorder, self.control.receive, overlap=overlap, model=info.model)

    def _sent(self, output: TokenOutput) -> None:
        self.recorder.sent(output)

    def wait(self, timeout: float) -> bool:
        return bool(self.inbox)

    def take(self, own: Any) -> list[Any]:
        messages, self.inbox = self.inbox, []
        return [*own(), *messages]

    def ask(self, rid: str, prompt: list[int], **options: Any) -> None:
        fields = {name: options.pop(name) for name in GenerateReq.__struct_fields__ if name in options}
        params = SamplingParams.parse({"max_new_tokens": 20, "temperature": 0, **options}, VOCAB)
        self.inbox.append(GenerateReq(rid=rid, input_ids=pack_ids(prompt), sampling_params=params, **fields))

    def turn(self, times: int = 1) -> None:
        for _ in range(times):
            self.loop.turn()
            self.time += 0.03

    def drain(self) -> None:
        for _ in range(3000):
            self.turn()
            if self.scheduler.is_idle() and not self.inbox:
                self.turn(3)
                return
        raise AssertionError("the scheduler does not come to rest")

    def close(self) -> None:
        self.recorder.close()
        self.runner.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("oracle")
    (path / "config.json").write_text(json.dumps(CONFIG))
    return path


def traffic(recorded: Recorded, seed: int, *, num_requests: int = 40) -> None:
    """Shared and own prompts, chunks, priorities, stop strings and tokens, aborts, pauses, flushes, pins, sessions, pauses."""
    rng = np.random.default_rng(seed)
    for index in range(num_requests):
        prompt = prompt_of(int(rng.integers(4)), 160)[: int(rng.integers(1, 160))] + prompt_of(100 + index, 5)
        options: dict[str, Any] = {"max_new_tokens": int(rng.integers(0, 60)), "ignore_eos": bool(rng.integers(2))}
        if index % 5 == 1:
            options["stop"] = [f"{rng.integers(10)}>"]
        if index % 5 == 2:
            options["stop_token_ids"] = rng.integers(3, VOCAB, 20).tolist()
        recorded.ask(
            f"request-{index}",
            prompt,
            priority=int(rng.integers(0, 40)),
            extra_key="tenant" if index % 7 == 0 else "",
            routing_key=f"route-{rng.integers(3)}",
            cache_hint=CacheHint(pin_seconds=float(rng.integers(0, 3)), priority=int(rng.integers(3))),
            session_hold=f"session-{index % 3}" if index % 6 == 0 else "",
            timeout=0.4 if index % 9 == 0 else None,
            **options,
        )
        if index % 4 == 3:
            recorded.inbox.append(AbortReq(rid=f"request-{rng.integers(index + 1)}"))
        if index % 13 == 5:
            recorded.inbox += [FlushCacheReq(call_id=index, timeout=0.1), CacheReportReq(call_id=1000 + index)]
        if index % 17 == 9:
            recorded.inbox.append(PauseReq(call_id=2000 + index, mode=str(rng.choice(["retract", "in_place", "abort"]))))
            recorded.turn(3)
            recorded.inbox.append(ContinueReq(call_id=3000 + index))
        recorded.turn(int(rng.integers(0, 6)))
    recorded.drain()
    recorded.inbox.append(ReleaseHoldReq(session="session-0"))
    recorded.time += 5
    recorded.turn(4)
    recorded.ask("last", prompt_of(1, 80))
    recorded.drain()


@pytest.mark.parametrize("overlap", [False, True], ids=["normal", "overlap"])
@pytest.mark.parametrize(
    ("page_size", "options"),
    [
        (1, {"chunked_prefill_size": 32, "schedule_policy": "lpm"}),
        (16, {"enable_priority_scheduling": True, "priority_scheduling_preemption_threshold": 5, "chunked_prefill_size": 48}),
        (
            1,
            {
                "enable_mixed_chunk": True,
                "chunked_prefill_size": 32,
                "schedule_policy": "dfs-weight",
                "radix_eviction_policy": "lfu",
            },
        ),
        (16, {"schedule_policy": "random", "faults": {"retract_every": 5, "alloc_fail": 0.1}}),
        (1, {"schedule_policy": "routing-key", "faults": {"step_fail": 20}, "max_queued_requests": 3}),
        (1, {"disable_radix_cache": True, "schedule_policy": "hrrn", "request_queue_timeout": 0.5}),
    ],
    ids=["lpm", "priority", "mixed", "faults", "routing", "no-cache"],
)
def test_a_random_run_is_replayed_without_difference(
    folder: Path, tmp_path: Path, overlap: bool, page_size: int, options: dict[str, Any]
) -> None:
    path = tmp_path / "record.jsonl"
    recorded = Recorded(folder, path, overlap=overlap, page_size=page_size, schedule_conservativeness=0.1, **options)
    traffic(recorded, seed=page_size + overlap)
    recorded.close()
    assert recorded.scheduler.stats.num_aborted > 0
    assert recorded.scheduler.stats.num_retracted > 0
    result = replay(str(path))
    assert result.difference is None, str(result.difference)
    assert result.num_turns == recorded.recorder.num_turns > 100


class _DeadEnd:
    """A matcher that has nothing to offer at its fourth token."""

    is_terminated = False

    def __init__(self) -> None:
        self.count = 0

    def fill_mask(self, row: np.ndarray) -> None:
        row[:] = 0 if self.count == 3 else -1

    def accept(self, token_id: int) -> bool:
        self.count += 1
        return True

    def forced_text(self) -> str:
        return ""


@pytest.mark.parametrize("overlap", [False, True], ids=["normal", "overlap"])
@pytest.mark.parametrize("options", [{}, {"faults": {"retract_every": 5, "alloc_fail": 0.1}}, {"enable_mixed_chunk": True}])
def test_requests_with_grammars_are_replayed(folder: Path, tmp_path: Path, overlap: bool, options: dict[str, Any]) -> None:
    """Jumps, dead ends, thinking with a budget, and what ends by its grammar: a record holds no grammar, and needs none."""
    path = tmp_path / "record.jsonl"
    recorded = Recorded(folder, path, overlap=overlap, page_size=1, chunked_prefill_size=32, **options)
    jumper = JumpForward(lambda text: [FIRST + byte for byte in text.encode()], WORDS.tokens)
    compiled = grammar("regex", '\\{"a_long_key": [0-9]{1,4}, "another_one": (true|false)\\}')

    def constraint(message: GenerateReq) -> Constraint | None:
        if message.thinking is not None:
            return Constraint(None, (), Thinking(message.thinking, WORDS.tokens.__getitem__))
        if message.grammar_key == "dead":
            return Constraint(_DeadEnd(), WORDS.stop_ids)  # type: ignore[arg-type]
        return Constraint(compiled.matcher(), WORDS.stop_ids, jumper=jumper) if message.grammar_key else None

    recorded.control._constraint = constraint  # type: ignore[method-assign]
    budget = ThinkingParams(start_ids=[FIRST], end_ids=[FIRST + 1, FIRST + 2], is_open=True, budget=4)
    for index in range(24):
        kind: dict[str, Any] = {}
        if index % 2:
            kind = {"grammar_key": "dead" if index % 6 == 5 else "k"}
        elif index % 8 == 2:
            kind = {"thinking": budget}
        recorded.ask(f"r{index}", prompt_of(index % 5, 40 + index), max_new_tokens=50, ignore_eos=index % 3 == 0, **kind)
        if index % 7 == 6:
            recorded.inbox.append(AbortReq(rid=f"r{index - 1}"))
        recorded.turn(index % 4)
    recorded.drain()
    recorded.close()
    lines = lines_of(path)
    kinds = {kind for line in lines[1:] for _, kind, _ in line.get("finished", [])}
    assert kinds == {"stop", "length", "abort"}
    assert sum(len(line.get("jumps", [])) for line in lines[1:]) >= 8
    assert b"a_long_key" not in path.read_bytes()
    result = replay(str(path))
    assert result.difference is None, str(result.difference)


def lines_of(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def record(folder: Path, tmp_path: Path) -> Callable[..., Path]:
    def make(*, overlap: bool = True, **options: Any) -> Path:
        path = tmp_path / "record.jsonl"
        recorded = Recorded(folder, path, overlap=overlap, page_size=1, schedule_conservativeness=0.1, **options)
        traffic(recorded, seed=3, num_requests=16)
        recorded.close()
        return path

    return make


def tampered(path: Path, change: Callable[[list[Any]], int]) -> tuple[int, Difference]:
    """The turn that was changed and the difference that is found."""
    lines = lines_of(path)
    turn = change(lines)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = replay(str(path)).difference
    assert found is not None
    return turn, found


def some_turn(lines: list[Any], wanted: Callable[[Any], Any], skip: int = 3) -> Any:
    return [line for line in lines[1:] if wanted(line)][skip]


def test_a_tampered_row_is_shown(record: Callable[..., Path]) -> None:
    def change(lines: list[Any]) -> int:
        line = some_turn(lines, lambda line: line.get("batch"))
        line["batch"]["rows"][0] += 1
        return int(line["turn"])

    turn, found = tampered(record(), change)
    assert (found.turn, found.what) == (turn, "batch.rows")
    assert found.recorded[0] == found.replayed[0] + 1
    assert f"turn {turn} differs in batch.rows:\n  recorded: [" in str(found)


def test_a_tampered_slot_and_finish_are_shown(record: Callable[..., Path]) -> None:
    def change_slot(lines: list[Any]) -> int:
        line = some_turn(lines, lambda line: line.get("batch"), skip=9)
        line["batch"]["slots"] ^= 1
        return int(line["turn"])

    def change_finish(lines: list[Any]) -> int:
        line = some_turn(lines, lambda line: line.get("finished"))
        line["finished"][0][2] += 1
        return int(line["turn"])

    for change, what in [(change_slot, "batch.slots"), (change_finish, "finished")]:
        turn, found = tampered(record(), change)
        assert (found.turn, found.what) == (turn, what)


def test_a_prompt_that_was_changed_differs_later(record: Callable[..., Path]) -> None:
    """A longer prompt: the first step that computes it is another."""

    def change(lines: list[Any]) -> int:
        line = some_turn(lines, lambda line: any(message[0] == "GenerateReq" for message in line.get("messages", [])), skip=1)
        message = next(message for message in line["messages"] if message[0] == "GenerateReq")
        fields = msgspec.json.decode(json.dumps(message), type=GenerateReq)
        fields.input_ids += fields.input_ids[:4]
        line["messages"][line["messages"].index(message)] = json.loads(msgspec.json.encode(fields))
        return int(line["turn"])

    turn, found = tampered(record(), change)
    assert found.turn >= turn
    assert found.what.startswith("batch")


def test_a_dropped_turn_differs(record: Callable[..., Path]) -> None:
    def change(lines: list[Any]) -> int:
        line = some_turn(lines, lambda line: line.get("ids"), skip=5)
        lines.remove(line)
        return int(line["turn"])

    turn, found = tampered(record(), change)
    assert found.turn <= turn + 2


def test_a_line_cut_off_by_the_death_of_the_process_is_ignored(record: Callable[..., Path]) -> None:
    path = record()
    data = path.read_bytes()
    num_turns = replay(str(path)).num_turns
    path.write_bytes(data[:-9])
    result = replay(str(path))
    assert (result.difference, result.num_turns) == (None, num_turns - 1)


# --- what a file may hold


def secret_run(folder: Path, path: Path, **options: Any) -> list[int]:
    recorded = Recorded(folder, path, overlap=True, page_size=1, **options)
    script = [400, 401, 402, 403, 404, 405, *prompt_of(7, 60)]
    prompt = [SCRIPT, len(script), *script]
    recorded.ask(
        "rid-secret",
        prompt,
        stop=["<405>"],
        stop_token_ids=[VOCAB - 3],
        extra_key="key-secret",
        cache_salt="salt-secret",
        routing_key="route-secret",
        session_hold="session-secret",
    )
    recorded.turn(2)
    recorded.inbox.append(AbortReq(rid="rid-unknown-secret"))
    recorded.drain()
    recorded.inbox.append(ReleaseHoldReq(session="session-secret"))
    recorded.drain()
    recorded.close()
    return prompt


def test_a_record_holds_no_prompt_and_no_name(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    prompt = secret_run(folder, path)
    text = path.read_text()
    assert "secret" not in text
    assert "405>" not in text
    header, turns = read_record(str(path))
    (message,) = [message for turn in turns for message in turn.messages if isinstance(message, GenerateReq)]
    hidden = unpack_ids(message.input_ids).tolist()
    pairs = set(zip(prompt, hidden, strict=True))
    assert len(pairs) == len(set(prompt)) == len(set(hidden)), "equal ids stay equal, different ones different"
    assert sum(a == b for a, b in pairs) < 5, "a fixed point or two may be"
    assert replay(str(path)).difference is None
    assert (path.stat().st_mode & 0o777) == 0o600
    assert header.info.model.eos_token_ids == []
    again = tmp_path / "again.jsonl"
    secret_run(folder, again)
    (other,) = [m for turn in read_record(str(again))[1] for m in turn.messages if isinstance(m, GenerateReq)]
    assert other.input_ids != message.input_ids, "each file has its own key"


def test_a_stop_string_is_an_event_of_the_record(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    secret_run(folder, path)
    (finish,) = [finish for turn in read_record(str(path))[1] for finish in turn.finished]
    assert finish[1:] == ("stop_string", 6)


def test_record_prompts_shows_all(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    prompt = secret_run(folder, path, record_prompts=True)
    (message,) = [m for turn in read_record(str(path))[1] for m in turn.messages if isinstance(m, GenerateReq)]
    assert unpack_ids(message.input_ids).tolist() == prompt
    assert message.rid == "rid-secret"
    assert replay(str(path)).difference is None


def test_every_field_of_a_request_is_recorded_or_known_not_to_matter() -> None:
    """A new field fails here until somebody decides whether a decision depends on it."""
    not_needed = {
        "stream",
        "data_parallel_rank",
        "bootstrap_room",
        "bad_word_ids",
        "logit_processor",
        "thinking",
        "input_embeds",  # their digest is kept
    }  # of thinking, that a mask binds it is kept
    params_not_needed = {
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "n",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "no_stop_trim",
        "stream_interval",
        "sampling_seed",
        "frequency_penalty",
        "presence_penalty",
        "repetition_penalty",
        "logit_bias",
        "allowed_token_ids",
        "bad_words",
        "custom_params",
        "stop_regex",  # kept as a stop string
        *GRAMMAR_FIELDS,  # taken out before the scheduler gets the request
    }
    full = GenerateReq(
        rid="a",
        input_ids=pack_ids([1]),
        sampling_params=SamplingParams(max_new_tokens=7, min_new_tokens=3, stop=["x"], stop_token_ids=[4], ignore_eos=True),
        extra_key="b",
        cache_salt="c",
        priority=1,
        cache_hint=CacheHint(priority=1),
        routing_key="d",
        session_hold="e",
        grammar_key="?",
        logprobs=LogprobParams(start_len=1, after_prompt=True),
        timeout=1.0,
        probe=True,
        embeds_key="f",
        return_hidden_states=True,
    )
    kept = disguised(full, NoDisguise())
    assert isinstance(kept, GenerateReq)
    for name in set(GenerateReq.__struct_fields__) - not_needed - {"sampling_params"}:
        assert getattr(kept, name) == getattr(full, name), name
        assert getattr(full, name) != getattr(GenerateReq(rid="", input_ids=b"", sampling_params=SamplingParams()), name), name
    for name in set(SamplingParams.__struct_fields__) - params_not_needed - {"stop", "stop_regex"}:
        assert getattr(kept.sampling_params, name) == getattr(full.sampling_params, name), name
        assert getattr(full.sampling_params, name) != getattr(SamplingParams(), name), name
    for params in (SamplingParams(stop=["secret"]), SamplingParams(stop_regex=["secret"])):
        hidden = disguised(GenerateReq(rid="", input_ids=b"", sampling_params=params), NoDisguise())
        assert isinstance(hidden, GenerateReq) and hidden.sampling_params.stop == ["?"]


def test_a_disguise_is_a_bijection() -> None:
    disguise = Disguise(1000)
    ids = disguise.ids(np.arange(1000))
    assert sorted(ids.tolist()) == list(range(1000))
    assert disguise.ids(np.array([-1, 5, -1])).tolist() == [-1, ids[5], -1]
    assert disguise.name("") == ""
    assert disguise.name("a") == disguise.name("a") != disguise.name("b")
    assert Disguise(1000).name("a") != disguise.name("a")


# --- the recorder


def test_idle_turns_do_not_grow_the_file(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    recorded = Recorded(folder, path, overlap=True, page_size=1)
    recorded.ask("a", prompt_of(1, 20))
    recorded.drain()
    size, num_turns = path.stat().st_size, recorded.recorder.num_turns
    recorded.turn(500)
    recorded.close()
    assert recorded.recorder.num_turns <= num_turns + 1
    assert path.stat().st_size <= size + 300
    assert size > 500, "it is flushed when nothing happens"


def test_no_compiled_grammar_stays_in_memory(folder: Path) -> None:
    """They have up to a hundred megabytes each, and the last turns are kept."""
    recorded = Recorded(folder, None, overlap=False, page_size=1)
    message = LoadGrammarReq(call_id=1, key="k", backend="xgrammar", data=b"large")
    assert recorded.recorder.take([message]) == [message]
    recorded.recorder.end_turn()
    kept = [each for turn in recorded.recorder.ring for each in turn.messages]
    assert [type(each) for each in kept if not isinstance(each, Tick)] == [DropGrammarReq]
    recorded.close()


def test_a_full_disk_ends_the_recording_only(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    recorded = Recorded(folder, Path("/dev/full"), overlap=False, page_size=1)
    recorded.ask("a", prompt_of(1, 20))
    recorded.drain()
    recorded.close()
    assert "recording to /dev/full ends: No space left" in caplog.text


def test_a_file_that_cannot_be_made_is_a_start_error(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(StartError, match="--record-decisions: cannot write"):
        Recorded(folder, tmp_path / "none" / "record.jsonl", overlap=False, page_size=1)


# --- crash dumps


def crash(recorded: Recorded, folder: Path, error: BaseException) -> Path:
    recorded.recorder.end_turn()
    path = write_crash(str(folder), recorded.subject, recorded.recorder.ring, error)
    assert path is not None
    recorded.close()
    return path


def test_a_breach_is_dumped_and_happens_again_in_the_replay(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A breach that follows from the decisions: here the check says that there is one as soon as anything is cached."""

    def breach(memory: Any, *, strict: bool) -> None:
        if memory.cache.evictable_size and strict:
            raise MemoryBreach("slots do not balance")

    recorded = Recorded(folder, None, overlap=False, page_size=1, strict=True)
    monkeypatch.setattr(control_module, "check_memory", breach)
    recorded.ask("a", prompt_of(1, 20))
    with pytest.raises(MemoryBreach) as caught:
        recorded.drain()
    path = crash(recorded, tmp_path / "dumps", caught.value)
    assert path.name.startswith("banyan-crash-")
    header = lines_of(path)[0]
    assert header["crash"].startswith("MemoryBreach: slots do not balance\n")
    result = replay(str(path))
    assert (result.difference, result.num_turns) == (None, len(lines_of(path)) - 1)
    assert "so does the replay" in result.note
    monkeypatch.undo()
    assert "the replay does not" in replay(str(path)).note


def test_only_the_last_turns_are_dumped(folder: Path, tmp_path: Path) -> None:
    recorded = Recorded(folder, None, overlap=True, page_size=1)
    for index in range(30):
        recorded.ask(f"r{index}", prompt_of(index, 20), ignore_eos=True)
        recorded.drain()
    path = crash(recorded, tmp_path, ValueError("a prompt, maybe"))
    lines = lines_of(path)
    assert len(lines) == 201
    assert lines[-1]["turn"] == lines[1]["turn"] + 199 == recorded.recorder.num_turns - 1 or lines[0]["first_turn"] > 0
    assert lines[0]["crash"].startswith("ValueError") and "prompt" not in lines[0]["crash"]
    with pytest.raises(RecordError, match=r"begins with turn \d+"):
        replay(str(path))


# --- reading


@pytest.mark.parametrize("text", ["", "no json\n", '{"format": 1}\n', "[]\n"])
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "file"
    path.write_text(text)
    with pytest.raises(RecordError, match="is no record of decisions"):
        replay(str(path))


def test_a_broken_line_is_named(record: Callable[..., Path]) -> None:
    path = record()
    lines = path.read_text().splitlines()
    lines[5] = "{"
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(RecordError, match="line 6"):
        replay(str(path))


def test_the_command(record: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    path = record()
    assert main(["replay", str(path)]) == 0
    assert capsys.readouterr().out == f"{len(lines_of(path)) - 1} turns checked, no difference\n"
    lines = lines_of(path)
    some_turn(lines, lambda line: line.get("batch"))["batch"]["slots"] ^= 1
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["replay", str(path)]) == 1
    assert "differs in batch.slots" in capsys.readouterr().out
    assert main(["replay", "/nowhere"]) == 1
    assert "cannot read /nowhere" in capsys.readouterr().err


def test_ticks_are_kept_as_they_are() -> None:
    record = TurnRecord(turn=3, messages=[Tick(now=0.1 + 0.2)])
    assert msgspec.json.decode(msgspec.json.encode(record), type=TurnRecord) == record
