"""DataParallelController: between the tokenizer manager and the replicas of a model. Each request goes to one replica, every other
message to all, and their answers become one. A replica that is lost is passed over until it was started again.

It sleeps until a message or a change comes, and once a second for the heartbeat.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import msgspec
import zmq

from ..config import ControllerConfig, SchedulerInfo
from ..io_struct import (
    AbortReq,
    ContinueReq,
    ControlReply,
    DecodeOptions,
    DropGrammarReq,
    Ended,
    FinishReason,
    FlushCacheReq,
    GenerateReq,
    Heartbeat,
    LoadGrammarReq,
    PauseReq,
    ReleaseHoldReq,
    SchedulerReport,
    ShutdownReq,
    TokenOutput,
    ToScheduler,
    UpdateWeightsReq,
    WeightsGroupReq,
)
from ..ipc import Receiver, Sender
from ..processes.recovery import REPLICA_LOST
from .replica_link import ReplicaLinks
from .replicas import Changes, Replica, ReplicaGroup
from .replies import NO_BEAT, Call, Reports, merge_heartbeats
from .routing import Load, Router

logger = logging.getLogger(__name__)

BEAT_INTERVAL = 1.0
STOP_TIMEOUT = 8.0


def run_controller(config: ControllerConfig, ready: Callable[[dict[str, Any]], None]) -> None:
    """Start the replicas and serve until ShutdownReq. Raises StartError, or RuntimeError when no replica is left."""
    context, changes = zmq.Context(), Changes()
    with replicas_of(config, changes.put) as groups:
        try:
            links = ReplicaLinks(context)
            addresses = [links.renew(index, group.new_ipc()) for index, group in enumerate(groups)]
            with ThreadPoolExecutor(len(groups)) as pool:
                for future in [pool.submit(group.start, ipc) for group, ipc in zip(groups, addresses, strict=True)]:
                    future.result()
            controller = Controller(config, context, groups, links, changes)
            ready(msgspec.to_builtins(merged_info(groups, config.load_balance_method)))
            controller.serve()
        finally:
            with ThreadPoolExecutor(len(groups)) as pool:
                list(pool.map(lambda group: group.stop(STOP_TIMEOUT), groups))
            context.destroy(linger=1000)


@contextmanager
def replicas_of(config: ControllerConfig, report: Callable[[int, str], None]) -> Iterator[Sequence[Replica]]:
    """The replicas, on this machine or in a Ray cluster; none has started yet."""
    if config.ray is None:
        yield [ReplicaGroup(config, index, report) for index in range(config.dp_size)]
        return
    from . import ray_replicas

    with ray_replicas.connected(config.ray) as cluster:
        yield [ray_replicas.RayReplica(config, cluster, index, report) for index in range(config.dp_size)]


def merged_info(groups: Sequence[Replica], method: str) -> SchedulerInfo:
    """What the engine can do: any replica may get a request, so the smallest one's limits hold."""
    infos = [group.info for group in groups if group.info]
    least = min(infos, key=lambda info: info.max_req_len)
    places = ", ".join(f"{index} on {group.where}" for index, group in enumerate(groups) if group.where)
    explained = f"{len(infos)}, each as told here; requests go by {method}" + (f"; {places}" if places else "")
    return msgspec.structs.replace(
        least,
        max_running_requests=sum(info.max_running_requests for info in infos),
        dp_size=len(infos),
        explain={**least.explain, "replicas": explained},
    )


class Controller:
    """The loop over all sockets."""

    def __init__(
        self,
        config: ControllerConfig,
        context: zmq.Context[Any],
        groups: Sequence[Replica],
        links: ReplicaLinks,
        changes: Changes,
    ) -> None:
        """The replicas have started."""
        self._config = config
        self._groups = groups
        self._links = links
        self._changes = changes
        sizes = [group.info.max_total_num_tokens for group in groups if group.info]
        self._router = Router(config.load_balance_method, [Load() for _ in groups], min(sizes))
        self._inbox: Receiver[ToScheduler] = Receiver(context, config.ipc.scheduler, ToScheduler)
        self._to_tokenizer = Sender(context, config.ipc.tokenizer).send
        self._detokenizer = Sender(context, config.ipc.detokenizer)
        self._calls: dict[int, Call] = {}
        self._news: dict[int, dict[type, Any]] = {}  # newest heartbeat and report of each replica
        self._reports = Reports()
        self._lasting: dict[str, Any] = {}  # what a replica that comes back must be told first: grammars, a pause
        self._sessions: dict[str, int] = {}  # the replica that holds a streaming session's KV
        self._returning: set[int] = set()  # replicas that are being started again
        self._shutdown = False
        for index, group in enumerate(groups):
            links[index].connect(group.address)

    def serve(self) -> None:
        """Until ShutdownReq."""
        poller = self._links.poller
        poller.register(self._inbox.socket, zmq.POLLIN)
        poller.register(self._changes.fd, zmq.POLLIN)
        due = time.monotonic()
        while not self._shutdown:
            poller.poll(max(round((due - time.monotonic()) * 1000), 0))
            for index, why in self._changes.take():
                self._changed(index, why)
            for index, link in self._links.items():
                for data in link.receive_output():
                    self._detokenizer.send_bytes(data)
                for reply in link.receive_all():
                    self._take_reply(index, reply)
            for message in self._inbox.receive_all():
                self._take(message)
            if time.monotonic() >= due:
                due = time.monotonic() + BEAT_INTERVAL
                self._beat()

    @property
    def _alive(self) -> list[int]:
        return [index for index, replica in enumerate(self._router.replicas) if replica.alive]

    # --- from the tokenizer manager

    def _take(self, message: Any) -> None:
        if isinstance(message, GenerateReq):
            self._route(message)
        elif isinstance(message, AbortReq) and not message.abort_all:
            pending = self._router.pending.get(message.rid)
            if pending:
                self._links[pending.replica].send(message)
        elif isinstance(message, WeightsGroupReq) and message.spec is not None and self._config.ray is not None:
            text = "Groups are not served with replicas in a Ray cluster; use update_weights_from_tensor."
            self._to_tokenizer(ControlReply(call_id=message.call_id, success=False, message=text))
        else:
            self._send_to_all(message)

    def _route(self, message: GenerateReq) -> None:
        pinned = self._router.pinned(message.data_parallel_rank, message.bootstrap_room)
        if message.session_hold:
            pinned = self._sessions.get(message.session_hold, pinned)
        namespace = f"{message.extra_key}\0{message.cache_salt}\0{message.embeds_key}"
        limit = message.sampling_params.max_new_tokens or 0
        index = self._router.route(message.rid, message.input_ids, limit, namespace=namespace, pinned=pinned)
        if index is None:
            text = "No replica is up." if pinned is None else f"Replica {pinned} is down."
            self._fail(message.rid, len(message.input_ids) // 4, text)
            return
        if message.session_hold:
            self._sessions[message.session_hold] = index
        self._links[index].send(message)

    def _send_to_all(self, message: Any) -> None:
        self._remember(message)
        alive = self._alive
        if hasattr(message, "call_id"):
            self._calls[message.call_id] = Call(message, set(alive))
        for index in alive:
            self._links[index].send(message)
        if hasattr(message, "call_id") and not alive:
            self._answer(message.call_id)
        self._shutdown = self._shutdown or isinstance(message, ShutdownReq)

    def _remember(self, message: Any) -> None:
        if isinstance(message, LoadGrammarReq):
            self._lasting[f"grammar {message.key}"] = message
        elif isinstance(message, DropGrammarReq):
            self._lasting.pop(f"grammar {message.key}", None)
        elif isinstance(message, PauseReq):
            self._lasting["pause"] = message
        elif isinstance(message, ContinueReq):
            self._lasting.pop("pause", None)
        elif isinstance(message, UpdateWeightsReq):
            self._remember_weights(message)
        elif isinstance(message, ReleaseHoldReq):
            self._sessions.pop(message.session, None)
        elif isinstance(message, FlushCacheReq):
            for index in self._alive:
                self._router.prefixes.forget(index)

    def _remember_weights(self, message: UpdateWeightsReq) -> None:
        """For a replica that starts anew: the newest checkpoint, and what was laid over it since."""
        if message.path and not message.partial:
            for key in [key for key in self._lasting if key.startswith("weights ")]:
                del self._lasting[key]
        if message.group and self._alive:  # no trainer sends again what the ranks have kept; all got the same
            own = f"{message.path}/rank{self._alive[0] * self._config.layout.world_size}"
            message = msgspec.structs.replace(message, path=own, group="", tensors=[])
        self._lasting[f"weights {message.call_id}"] = message
        for index in self._alive:
            self._router.prefixes.forget(index)

    # --- from the replicas

    def _take_reply(self, index: int, reply: Any) -> None:
        if isinstance(reply, Ended):
            for rid in reply.rids:
                self._router.ended(rid)
        elif isinstance(reply, ControlReply):
            call = self._calls.get(reply.call_id)
            if call and index in call.waiting:
                call.waiting.discard(index)
                call.replies[index] = reply
                if not call.waiting:
                    self._answer(reply.call_id)
        else:
            self._news.setdefault(index, {})[type(reply)] = reply

    def _answer(self, call_id: int) -> None:
        reply = self._calls.pop(call_id).merged()
        for state in reply.state.get("replicas", []):
            replica = self._router.replicas[state["dp_rank"]]
            state.update(num_routed_reqs=replica.requests, num_routed_tokens=replica.tokens)
        self._to_tokenizer(reply)

    def _beat(self) -> None:
        for index in self._alive:
            limit, silent = self._groups[index].silence, time.monotonic() - self._links[index].heard
            if limit is not None and silent > limit:
                self._groups[index].lose(f"it gave no sign of life for {silent:.0f} s")
        self._to_tokenizer(merge_heartbeats({index: self._news.get(index, {}).get(Heartbeat, NO_BEAT) for index in self._alive}))
        reports = [news[SchedulerReport] for news in self._news.values() if SchedulerReport in news]
        if reports:
            self._to_tokenizer(self._reports.merged(reports))

    # --- replicas come and go

    def _changed(self, index: int, why: str) -> None:
        if not why:
            logger.warning("replica %d serves again", index)
            self._links[index].connect(self._groups[index].address)
            for message in self._lasting.values():
                self._links[index].send(message)
            self._router.up(index)
            self._returning.discard(index)
            self._beat()
            return
        logger.error("replica %d is lost: %s", index, why)
        self._reports.lost(self._news.pop(index, {}).get(SchedulerReport))
        for rid, pending in self._router.down(index).items():
            self._fail(rid, pending.num_prompt, f"Replica {index}, which computed this request, was lost.", REPLICA_LOST)
        self._sessions = {session: replica for session, replica in self._sessions.items() if replica != index}
        for call_id in [call_id for call_id, call in self._calls.items() if index in call.waiting]:
            self._calls[call_id].waiting.discard(index)
            if not self._calls[call_id].waiting:
                self._answer(call_id)
        self._returning.discard(index)
        if self._groups[index].restart(self._links.renew(index, self._groups[index].new_ipc()), self._config.restart_budget):
            self._returning.add(index)
        elif not self._alive and not self._returning:
            raise RuntimeError(f"no replica is left; the last one, {index}, was lost: {why.splitlines()[0]}")

    def _fail(self, rid: str, num_prompt: int, why: str, err_type: str = "ServiceUnavailableError") -> None:
        """The last row of a request that its replica will not finish. Its text so far is dropped with its stream; the tokenizer
        manager sends it again if there was none."""
        reason = FinishReason(kind="abort", message=why, status_code=503, err_type=err_type)
        self._detokenizer.send(
            TokenOutput(
                rids=[rid],
                token_ids=b"",
                num_ids=[0],
                finish_reasons=[reason],
                prompt_tokens=[num_prompt],
                completion_tokens=[0],
                cached_tokens=[0],
                num_retractions=[0],
                options=[(0, DecodeOptions())],
            )
        )
