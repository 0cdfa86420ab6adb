"""Ranks over the token oracle, turned by hand: rank 0's messages are everyone's, and everyone decides alike, or it is found out."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
from harness import CONFIG, IPC, TOKENIZER, VOCAB, expected, prompt_of

from banyan.managers.config import Layout, RankLinks, RunnerConfig, SchedulerConfig
from banyan.managers.control import Control
from banyan.managers.decisions.log import Recorder, TurnSink
from banyan.managers.errors import StartError
from banyan.managers.event_loop import make_loop
from banyan.managers.faults import Faults
from banyan.managers.inbox import CheckedSink, FollowerInbox, LeaderInbox, RanksDifferError, TurnCheck
from banyan.managers.invariants import check_memory
from banyan.managers.io_struct import AbortReq, FinishReason, GenerateReq, TokenOutput, pack_ids, unpack_ids
from banyan.managers.ipc import curve_keys
from banyan.managers.ranks.group import digests
from banyan.managers.ranks.io import follower_socket, leader_socket, numeric
from banyan.managers.ranks.layout import rank_configs, rank_name
from banyan.managers.ranks.watch import RankWatch
from banyan.managers.sampling_params import SamplingParams
from banyan.managers.scheduler_process import build_memory, build_scheduler
from banyan.model_executor.factory import create_runner
from banyan.model_executor.step import RankSpec


class Outside:
    """What rank 0 is sent."""

    def __init__(self) -> None:
        self.messages: list[Any] = []

    def wait(self, timeout: float) -> bool:
        return bool(self.messages)

    def take(self, own: Any) -> list[Any]:
        messages, self.messages = self.messages, []
        return [*own(), *messages]


class Rank:
    """A scheduler with its Control and loop."""

    def __init__(self, config: SchedulerConfig, inbox: Any, sink: TurnSink, *, faults: dict[str, float] | None = None) -> None:
        self.inbox = inbox
        self.runner = create_runner(config.runner)
        info, self.memory = build_memory(config, self.runner, TOKENIZER)
        self.ids: dict[str, list[int]] = {}
        self.reasons: dict[str, FinishReason] = {}
        self.scheduler = build_scheduler(config, info, self.memory, self.runner, self._sent)
        self.scheduler.faults = Faults(faults)
        self.recorder = Recorder(self.scheduler, sink, compares=True)
        self.time = 0.0
        self.control = Control(
            self.scheduler, inbox, lambda reply: None, TOKENIZER, config, clock=lambda: self.time, tap=self.recorder.take
        )
        self.loop = make_loop(self.recorder, self.control.receive, overlap=info.overlap, model=info.model)
        self.most_in_flight = 0

    def _sent(self, output: TokenOutput) -> None:
        self.recorder.sent(output)
        ids = iter(unpack_ids(output.token_ids).tolist())
        for rid, count, reason in zip(output.rids, output.num_ids, output.finish_reasons, strict=True):
            self.ids.setdefault(rid, []).extend(next(ids) for _ in range(count))
            if reason is not None:
                self.reasons[rid] = reason


class Ranks:
    """All ranks of an engine, in this process. Their clocks differ on purpose."""

    def __init__(
        self, folder: Path, place: Path, *, tp: int = 1, pp: int = 1, odd: dict[str, float] | None = None, **options: Any
    ) -> None:
        """odd: faults of the last rank only."""
        self.context = zmq.Context()
        self.outside = Outside()
        address = f"ipc://{place}/turns-{time.monotonic_ns()}"
        runner = RunnerConfig(
            model_path=str(folder),
            load_format="oracle",
            overlap=options.pop("overlap", True),
            page_size=options.pop("page_size", 1),
            max_total_tokens=options.pop("total", 368),
        )
        faults = options.pop("faults", None)
        base = SchedulerConfig(ipc=IPC, runner=runner, tokenizer_path="", **{"max_running_requests": 6, **options})
        configs = rank_configs(base, Layout(tp_size=tp, pp_size=pp))
        self.check = TurnCheck(tp * pp)
        leader = LeaderInbox(self.outside, self.context, address, "", tp * pp)  # type: ignore[arg-type]
        leader.check = self.check
        self.ranks = [Rank(configs[0], leader, CheckedSink(TurnSink(), self.check.add), faults=faults)]
        for config in configs[1:]:
            follower = FollowerInbox(self.context, address, "", config.runner.ranks.rank)
            follower.meet({})
            last = config is configs[-1]
            own = {**(faults or {}), **(odd or {})} if last else faults
            self.ranks.append(Rank(config, follower, CheckedSink(TurnSink(), follower.tell), faults=own))
        leader.meet({}, timeout=20)

    def ask(self, rid: str, prompt: list[int], **options: Any) -> None:
        params = SamplingParams.parse({"max_new_tokens": 20, "temperature": 0, **options}, VOCAB)
        self.outside.messages.append(GenerateReq(rid=rid, input_ids=pack_ids(prompt), sampling_params=params))

    def turn(self) -> None:
        for number, rank in enumerate(self.ranks):
            rank.time += 0.013 * (number + 1)
            rank.loop.turn()
            check_memory(rank.memory, strict=True)

    def drain(self) -> None:
        for _ in range(6000):
            self.turn()
            if self.ranks[0].scheduler.is_idle() and not self.outside.messages:
                for _ in range(4):
                    self.turn()
                return
        raise AssertionError("the schedulers do not come to rest")

    def close(self) -> None:
        for rank in self.ranks:
            rank.runner.close()
        self.context.destroy(linger=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("oracle")
    (path / "config.json").write_text(json.dumps(CONFIG))
    return path


@pytest.fixture
def ranks(folder: Path, tmp_path: Path) -> Iterator[Any]:
    made: list[Ranks] = []

    def make(**options: Any) -> Ranks:
        made.append(Ranks(folder, tmp_path, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


SHAPES = {
    "tp2": {"tp": 2},
    "tp2 normal pages": {"tp": 2, "overlap": False, "page_size": 16},
    "tp3 mixed": {"tp": 3, "enable_mixed_chunk": True},
    "pp3": {"pp": 3},
    "tp2 pp2 mixed pages": {"tp": 2, "pp": 2, "page_size": 16, "enable_mixed_chunk": True},
}


@pytest.mark.parametrize("shape", [*(pytest.param(s, marks=pytest.mark.nightly) for s in SHAPES if s != "tp2"), "tp2"])
def test_300_random_requests_with_aborts_and_retractions(ranks: Any, shape: str) -> None:
    group = ranks(**SHAPES[shape], chunked_prefill_size=32, faults={"retract_every": 7, "alloc_fail": 0.05})
    rng = np.random.default_rng(5)
    prompts: dict[str, list[int]] = {}
    lengths: dict[str, int] = {}
    aborted: set[str] = set()
    while len(prompts) < 300:
        for _ in range(int(rng.integers(0, 4))):
            rid = f"r{len(prompts)}"
            prompts[rid] = prompt_of(int(rng.integers(0, 40)), int(rng.integers(3, 90)))
            lengths[rid] = int(rng.integers(1, 24))
            group.ask(rid, prompts[rid], max_new_tokens=lengths[rid], ignore_eos=bool(rng.random() < 0.5))
        if prompts and rng.random() < 0.15:
            rid = f"r{rng.integers(0, len(prompts))}"
            aborted.add(rid)
            group.outside.messages.append(AbortReq(rid=rid))
        for _ in range(int(rng.integers(1, 8))):
            group.turn()
    group.drain()
    leader = group.ranks[0]
    assert leader.scheduler.stats.num_retracted > 20
    assert len(leader.reasons) == 300
    complete = [rid for rid in prompts if leader.reasons[rid].kind != "abort"]
    assert len(complete) > 200 and set(prompts) - set(complete) <= aborted
    for rid in complete[:60]:
        ids = expected(prompts[rid], lengths[rid])
        assert leader.ids[rid][: len(ids)] == ids
    for rank in group.ranks[1:]:
        assert rank.ids == leader.ids
    assert group.check.num_agreed > 300


def test_micro_batches_fill_the_pipeline(ranks: Any) -> None:
    group = ranks(pp=3)
    for number in range(6):
        group.ask(f"r{number}", prompt_of(number, 20), ignore_eos=True)
    sizes: list[int] = []
    scheduler = group.ranks[0].scheduler
    launch = scheduler.launch

    def counting(batch: Any) -> Any:
        if not batch.num_prefill:
            sizes.append(len(batch.rows))
        return launch(batch)

    scheduler.launch = counting
    group.drain()
    assert max(sizes) == 2, "six rows in three micro-batches"
    assert sizes.count(2) >= 3 * 19 - 6


def test_a_rank_that_decides_otherwise_is_named_with_the_decision(ranks: Any) -> None:
    group = ranks(tp=2, odd={"retract_every": 3})
    for number in range(4):
        group.ask(f"r{number}", prompt_of(number, 20))
    with pytest.raises(RanksDifferError, match=r"rank 1 and rank 0 differ in turn \d+, first in its batch: .+ there, .+ here"):
        group.drain()


def test_time_is_rank_0s(ranks: Any) -> None:
    """A follower's clock runs at another speed and is never asked."""
    group = ranks(tp=2, request_queue_timeout=0.5, max_running_requests=1)
    for number in range(12):
        group.ask(f"r{number}", prompt_of(number, 20), max_new_tokens=40, ignore_eos=True)
    group.drain()
    kinds = [group.ranks[0].reasons[f"r{number}"].status_code for number in range(12)]
    assert kinds.count(503) > 3
    assert group.ranks[1].reasons == group.ranks[0].reasons


def test_ranks_that_were_started_otherwise_do_not_meet(tmp_path: Path) -> None:
    runner = RunnerConfig(model_path="m")
    config = SchedulerConfig(ipc=IPC, runner=runner, tokenizer_path="")
    other = msgspec.structs.replace(config, schedule_policy="lpm", runner=msgspec.structs.replace(runner, page_size=16))
    elsewhere = msgspec.structs.replace(config, tokenizer_path="t", runner=msgspec.structs.replace(runner, model_path="n"))
    assert digests(config) == digests(elsewhere)
    with zmq.Context() as context:
        address = f"ipc://{tmp_path}/t"
        leader = LeaderInbox(Outside(), context, address, "", 2)  # type: ignore[arg-type]
        follower = FollowerInbox(context, address, "", 1)
        follower.meet(digests(other))
        with pytest.raises(StartError, match="rank 1 was started with another page_size, schedule_policy than rank 0"):
            leader.meet(digests(config), timeout=20)
        with pytest.raises(StartError, match=r"rank 1 did not come within 0 s"):
            leader.meet(digests(config), timeout=0.01)
        context.destroy(linger=0)


# --- signs of life


class Watched:
    """Watches over one address; what ended them."""

    def __init__(self, place: Path, size: int, limit: float) -> None:
        self.why: dict[int, str] = {}
        self.ended = threading.Event()
        self.watches = [
            RankWatch(f"ipc://{place}/watch", "", rank=rank, size=size, limit=limit, fatal=self._fatal(rank))
            for rank in range(size)
        ]

    def _fatal(self, rank: int) -> Any:
        def fatal(why: str) -> None:
            self.why[rank] = why
            if len(self.why) == len(self.watches) - 1:
                self.ended.set()

        return fatal


def test_a_failure_is_told_to_all(tmp_path: Path) -> None:
    watched = Watched(tmp_path, 3, limit=60)
    for watch in watched.watches:
        watch.start()
    watched.watches[1].stop("Oops: no memory")
    assert watched.ended.wait(20)
    assert watched.why == {0: "rank 1 failed: Oops: no memory", 2: "rank 0 failed: rank 1 failed: Oops: no memory"}


def test_silence_ends_both_sides(tmp_path: Path) -> None:
    watched = Watched(tmp_path, 2, limit=1.5)
    watched.watches[0].start()
    assert watched.ended.wait(20)
    assert "rank 1 gave no sign of life for" in watched.why[0]
    watched = Watched(tmp_path, 2, limit=1.5)
    watched.watches[1].start()
    assert watched.ended.wait(20)
    assert "rank 0 gave no sign of life for" in watched.why[1]


def test_a_stop_is_no_failure(tmp_path: Path) -> None:
    watched = Watched(tmp_path, 2, limit=1.5)
    for watch in watched.watches:
        watch.start()
    time.sleep(0.5)
    for watch in watched.watches:
        watch.stop()
    assert not watched.why


# --- between machines


def test_who_does_not_know_the_token_is_not_heard() -> None:
    assert curve_keys("a") == curve_keys("a") != curve_keys("b")
    with zmq.Context() as context:
        leader = leader_socket(context, "tcp://127.0.0.1:*", "the right token")
        address = leader.get(zmq.LAST_ENDPOINT).decode()
        strangers = [follower_socket(context, address, token, 1) for token in ("another token", "")]
        for stranger in strangers:
            stranger.send(b"hello")
        assert not leader.poll(500)
        friend = follower_socket(context, address, "the right token", 2)
        friend.send(b"hello")
        assert leader.poll(10_000)
        assert leader.recv_multipart() == [b"r2", b"hello"]
        for socket in (leader, friend, *strangers):
            socket.close(linger=0)
        context.destroy(linger=0)


def test_rank_0_listens_where_its_name_leads() -> None:
    assert numeric("tcp://localhost:7001") == "tcp://127.0.0.1:7001"
    for address in ("tcp://10.0.0.1:7001", "tcp://*:7001", "tcp://[fe80::1]:7001", "ipc:///tmp/a:b"):
        assert numeric(address) == address


def test_the_ranks_of_each_machine() -> None:
    base = SchedulerConfig(
        ipc=msgspec.structs.replace(IPC, directory="/d", scheduler="ipc:///d/scheduler"),
        runner=RunnerConfig(model_path="m"),
        tokenizer_path="",
        record_decisions="/r",
    )
    assert rank_configs(base, Layout()) == [base]
    two = rank_configs(base, Layout(tp_size=2, pp_size=2, nnodes=2, node_rank=1, address="h:7000", token="x" * 16))
    assert [(c.runner.ranks.pp_rank, c.runner.ranks.tp_rank, c.runner.ranks.local_rank) for c in two] == [(1, 0, 0), (1, 1, 1)]
    assert two[0].links == RankLinks(turns="tcp://h:7001", watch="tcp://h:7002", token="x" * 16)
    assert two[0].runner.ranks.init_method == "tcp://h:7000"
    assert two[1].record_decisions == "/r.rank3"
    local = rank_configs(base, Layout(tp_size=2))[1]
    assert (local.links.turns, local.runner.ranks.init_method) == ("ipc:///d/scheduler-turns", "file:///d/scheduler-meet")
    assert rank_name(local) == "scheduler rank 1 (tp 1 of 2, pp 0 of 1)" and rank_name(base) == "scheduler"
    assert RankSpec(tp_rank=1, tp_size=2, pp_rank=1, pp_size=2).rank == 3


@pytest.mark.parametrize(
    ("layout", "why"),
    [
        ({"nnodes": 3}, "--nnodes: 4 ranks"),
        ({"nnodes": 2, "node_rank": 2}, "--node-rank must be below --nnodes 2, got 2"),
        ({"nnodes": 2}, "--dist-init-addr must be host:port"),
        ({"nnodes": 2, "address": "h:70000"}, "--dist-init-addr must be host:port"),
        ({"nnodes": 2, "address": "h:7000", "token": "short"}, "needs a --dist-token"),
    ],
)
def test_layouts_that_do_not_do(layout: dict[str, Any], why: str) -> None:
    with pytest.raises(StartError, match=why):
        Layout(tp_size=4, **layout).check_sizes()
