"""Where requests go: every method, ties, pins, replicas that are down."""

from __future__ import annotations

import numpy as np
import pytest

from banyan.managers.data_parallel.replies import Call, Reports, merge_heartbeats
from banyan.managers.data_parallel.routing import BLOCK, METHODS, Load, PrefixMap, Router
from banyan.managers.io_struct import ControlReply, ExplainCacheReq, Heartbeat, InternalStateReq, SchedulerReport, pack_ids


def router(method: str, size: int = 2) -> Router:
    return Router(method, [Load() for _ in range(size)])


def ids(seed: int, length: int) -> bytes:
    return pack_ids(np.random.default_rng(seed).integers(0, 1000, length))


@pytest.mark.parametrize("method", METHODS)
def test_sequential_requests_take_turns(method: str) -> None:
    """All replicas are idle each time: a fixed tie-break would send everything to the first."""
    for size in (2, 3):
        one = router(method, size)
        counts = [0] * size
        for number in range(50):
            index = one.route(f"r{number}", ids(number, 40), 10)
            assert index is not None
            counts[index] += 1
            one.ended(f"r{number}")
        assert max(counts) - min(counts) <= 1


def test_the_fewest_requests_or_tokens() -> None:
    one = router("total_requests")
    assert [one.route(rid, ids(1, length), 1) for rid, length in (("a", 1000), ("b", 10))] == [0, 1]
    one.ended("b")
    assert one.route("c", ids(1, 10), 1) == 1
    two = router("total_tokens")
    assert [two.route(rid, ids(1, length), 1) for rid, length in (("a", 1000), ("b", 10), ("c", 10), ("d", 10))] == [0, 1, 1, 1]
    two.ended("a")
    assert two.route("e", ids(1, 10), 1) == 0
    assert [replica.tokens for replica in two.replicas] == [11, 33]


def test_a_pinned_request_goes_where_it_says_and_moves_no_turn() -> None:
    one = router("round_robin", 3)
    assert [one.route("a", ids(0, 4), 1), one.route("b", ids(0, 4), 1, pinned=0), one.route("c", ids(0, 4), 1)] == [0, 0, 1]
    one.down(2)
    assert one.route("d", ids(0, 4), 1, pinned=2) is None
    assert "d" not in one.pending


def test_a_room_names_its_replica_only_where_rooms_are_followed() -> None:
    follows, other = router("follow_bootstrap_room", 3), router("round_robin", 3)
    assert [follows.pinned(None, room) for room in (0, 4, 2**63 - 1)] == [0, 1, (2**63 - 1) % 3]
    assert (follows.pinned(0, 1), follows.pinned(None, None), other.pinned(None, 1), other.pinned(2, 1)) == (0, None, None, 2)


@pytest.mark.parametrize("method", METHODS)
def test_a_replica_that_is_down_gets_nothing_and_comes_back_empty(method: str) -> None:
    one = router(method)
    prompt = ids(3, 200)
    first = one.route("a", prompt, 5)
    assert first is not None
    lost = one.down(first)
    assert list(lost) == ["a"] and lost["a"].num_prompt == 200
    assert {one.route(f"b{number}", prompt, 5) for number in range(4)} == {1 - first}
    one.down(1 - first)
    assert one.route("c", prompt, 5) is None
    one.up(first)
    assert one.route("d", prompt, 5) == first
    assert (one.replicas[first].requests, one.replicas[1 - first].requests) == (1, 0)


def test_the_prefix_map_is_a_tree_of_blocks_for_each_replica() -> None:
    tree = PrefixMap(2, max_blocks=8)
    prompt = ids(1, 4 * BLOCK + 3)
    tree.add(tree.keys("", prompt), 1)
    longer = tree.keys("", prompt[: 4 * 3 * BLOCK] + ids(2, 100))
    assert tree.matched(longer) == [0, 3 * BLOCK]
    assert tree.matched(tree.keys("other", prompt)) == [0, 0], "another namespace"
    assert tree.matched(tree.keys("", prompt[4:])) == [0, 0], "shifted by a token"
    tree.add(tree.keys("", ids(5, 5 * BLOCK)), 0)
    assert len(tree) == 9, "each has a bound of its own"
    tree.add(tree.keys("", ids(6, 6 * BLOCK)), 1)
    assert len(tree) == 13
    assert tree.matched(tree.keys("", prompt)) == [0, 2 * BLOCK], "the end of a path is forgotten before its beginning"
    tree.forget(0)
    tree.forget(1)
    assert len(tree) == 0


def test_an_idle_replica_is_taken_when_the_one_with_the_prefix_has_more_to_do() -> None:
    one = router("cache_aware")
    prompt = ids(1, 320)
    assert one.route("a", prompt, 10) == 0
    one.ended("a")
    assert one.route("b", prompt, 10) == 0, "the cache pays"
    assert one.route("c", ids(2, 1000), 10, pinned=0) == 0
    assert one.route("d", prompt, 10) == 1, "waiting would cost more than computing"


def test_a_prefix_that_all_share_does_not_gather_everybody() -> None:
    one, system = router("cache_aware", 4), ids(1, 8 * BLOCK)
    counts = [0] * 4
    for number in range(80):
        index = one.route(f"r{number}", system + ids(2 + number, 400), 20)
        assert index is not None
        counts[index] += 1
        one.ended(f"r{number}")
    assert max(counts) - min(counts) <= 4, counts


def test_reports_are_merged_and_totals_never_fall() -> None:
    reports = Reports()
    first = SchedulerReport(gauges={"page_size": 16, "num_queue_reqs": 2, "utilization": 0.5}, counters={"evicted_tokens": 10})
    second = SchedulerReport(gauges={"page_size": 16, "num_queue_reqs": 1, "utilization": 1}, counters={"evicted_tokens": 5})
    merged = reports.merged([first, second])
    assert merged.gauges == {"page_size": 16, "num_queue_reqs": 3, "utilization": 0.75}
    assert merged.counters == {"evicted_tokens": 15}
    reports.lost(second)
    assert reports.merged([first]).counters == {"evicted_tokens": 15}
    again = SchedulerReport(gauges={}, counters={"evicted_tokens": 1, "num_refused": 1})
    assert reports.merged([first, again]).counters == {"evicted_tokens": 16, "num_refused": 1}
    reports.lost(None)
    assert reports.past == {"evicted_tokens": 5}


def test_answers_are_merged() -> None:
    call = Call(InternalStateReq(call_id=4), {0, 1})
    for index, running in ((1, 3), (0, 2)):
        state = {"num_running_reqs": running, "token_usage": 0.1 * running, "paused": False, "memory_balanced": running == 2}
        call.replies[index] = ControlReply(call_id=4, message="ok", state=state)
    merged = call.merged()
    assert (merged.call_id, merged.success, merged.message) == (4, True, "ok")
    assert merged.state["num_running_reqs"] == 5 and merged.state["token_usage"] == 0.25
    assert merged.state["memory_balanced"] is False
    assert [replica["dp_rank"] for replica in merged.state["replicas"]] == [0, 1]
    call.replies[1].success, call.replies[1].message = False, "busy"
    assert (call.merged().success, call.merged().message) == (False, "busy")
    best = Call(ExplainCacheReq(call_id=5, input_ids=b""), {0, 1})
    best.replies = {index: ControlReply(call_id=5, state={"would_hit": hit}) for index, hit in ((0, 3), (1, 9))}
    assert best.merged().state == {"would_hit": 9, "dp_rank": 1}
    assert Call(InternalStateReq(call_id=6), set()).merged().success is False
    beats = {rank: Heartbeat(loop_age=age, forward_age=0.0, num_running=2, num_waiting=1) for rank, age in ((0, 9.0), (2, 0.1))}
    beat = merge_heartbeats(beats)
    assert (beat.loop_age, beat.num_running, beat.replicas) == (0.1, 4, beats)
    assert merge_heartbeats({}).replicas == {}
