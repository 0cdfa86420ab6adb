"""TokenizerManager over real sockets, against a scheduler and a detokenizer that the test plays by hand on the same loop."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import aclosing, asynccontextmanager
from typing import Any, TypeVar

import msgspec
import numpy as np
import pytest
import zmq
import zmq.asyncio

from banyan.managers.config import ModelInfo, SchedulerInfo, TokenizerManagerConfig
from banyan.managers.errors import EngineDeadError, RequestError
from banyan.managers.generation import GenerateInput, Generation
from banyan.managers.io_struct import (
    AbortReq,
    ContinueReq,
    ControlReply,
    FinishReason,
    FlushCacheReq,
    GenerateReq,
    Heartbeat,
    InternalStateReq,
    LogprobColumns,
    LogprobParams,
    PauseReq,
    RowLogprobs,
    ShutdownReq,
    TextOutput,
    ToDetokenizer,
    ToScheduler,
    pack_ids,
    unpack_ids,
)
from banyan.managers.ipc import AsyncReceiver, IpcNames, Sender
from banyan.managers.processes.health import HealthMonitor
from banyan.managers.tokenizer_manager import TokenizerManager

T = TypeVar("T")
DEADLINE = 20.0
LENGTH = FinishReason(kind="length", length=2)


class ByteTokenizer:
    """One id per byte. A text that holds "!" waits for ``gate``."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.threads: set[str] = set()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        self.threads.add(threading.current_thread().name)
        if "!" in text:
            self.gate.wait(DEADLINE)
        return list(text.encode())


class Fake:
    """What stands behind the sockets."""

    def __init__(self, ipc: IpcNames) -> None:
        self.context = zmq.Context()
        shadow = zmq.asyncio.Context.shadow(self.context.underlying)
        self.scheduler: AsyncReceiver[Any] = AsyncReceiver(shadow, ipc.scheduler, ToScheduler)
        self.detokenizer: AsyncReceiver[Any] = AsyncReceiver(shadow, ipc.detokenizer, ToDetokenizer)
        self.sender = Sender(self.context, ipc.tokenizer)

    async def expect(self, kind: type[T]) -> T:
        """The next message to the scheduler, which must be of this kind."""
        message = await soon(self.scheduler.receive())
        assert isinstance(message, kind), message
        return message

    async def silent(self) -> bool:
        """True if nothing has arrived."""
        try:
            return not await asyncio.wait_for(self.scheduler.receive(), 0.1)
        except TimeoutError:
            return True

    def rows(self, *rows: tuple[str, str, list[int], FinishReason | None], completion_tokens: int = 2) -> None:
        """Send one TextOutput with rows of (rid, text, ids, finish_reason)."""
        self.sender.send(
            TextOutput(
                rids=[row[0] for row in rows],
                token_ids=pack_ids([id for row in rows for id in row[2]]),
                num_ids=[len(row[2]) for row in rows],
                finish_reasons=[row[3] for row in rows],
                prompt_tokens=[1] * len(rows),
                completion_tokens=[completion_tokens] * len(rows),
                cached_tokens=[0] * len(rows),
                num_retractions=[0] * len(rows),
                texts=[row[1] for row in rows],
            )
        )

    def close(self) -> None:
        self.sender.close()
        self.scheduler.close()
        self.detokenizer.close()
        self.context.term()


async def soon(awaitable: Awaitable[T]) -> T:
    return await asyncio.wait_for(awaitable, DEADLINE)


async def until(condition: Callable[[], Any]) -> None:
    async def poll() -> None:
        while not condition():
            await asyncio.sleep(0.005)

    await soon(poll())


def info() -> SchedulerInfo:
    model = ModelInfo(
        model_type="llama",
        architectures=["LlamaForCausalLM"],
        vocab_size=300,
        context_len=1000,
        eos_token_ids=[2],
        bos_token_id=1,
        dtype="float32",
        device="cpu",
        attention_backend="torch_native",
        load_format="oracle",
    )
    return SchedulerInfo(
        model=model,
        max_total_num_tokens=5000,
        max_req_input_len=999,
        max_req_len=1000,
        max_running_requests=8,
        page_size=1,
        chunked_prefill_size=None,
        overlap=True,
    )


@asynccontextmanager
async def engine(**options: Any) -> AsyncIterator[tuple[TokenizerManager, Fake, ByteTokenizer]]:
    ipc = IpcNames.create()
    tokenizer = ByteTokenizer()
    config = TokenizerManagerConfig(ipc=ipc, model_path="m", served_model_name="m", tokenizer_path="m", **options)
    manager, fake = TokenizerManager(config, info(), tokenizer), Fake(ipc)
    manager.start_loop()
    try:
        yield manager, fake, tokenizer
    finally:
        tokenizer.gate.set()
        await manager.close()
        fake.close()
        ipc.remove()


def run(test: Callable[..., Coroutine[Any, Any, None]], **options: Any) -> None:
    """Run an async test body with a manager, its fake and its tokenizer; no request may be left."""

    async def body() -> None:
        async with engine(**options) as parts:
            await test(*parts)
            assert parts[0].num_live == 0 or parts[0].draining

    asyncio.run(body())


def ask(text: str | list[str] = "a", rid: str | list[str] | None = "r", **more: Any) -> GenerateInput:
    return GenerateInput.parse({"text": text, "rid": rid, **more})


async def finish(fake: Fake, *rids: str) -> None:
    fake.rows(*[(rid, "", [], LENGTH) for rid in rids])


# --- what a request gives ---------------------------------------------------------------------------------------------------------


def test_a_single_answer() -> None:
    async def body(manager: TokenizerManager, fake: Fake, tokenizer: ByteTokenizer) -> None:
        answer = asyncio.create_task(
            manager.generate(ask("hi", sampling_params={"max_new_tokens": 3}, return_prompt_token_ids=True))
        )
        message = await fake.expect(GenerateReq)
        assert unpack_ids(message.input_ids).tolist() == [104, 105]
        assert message.sampling_params.max_new_tokens == 3
        fake.rows(("r", " th", [7], None), completion_tokens=1)
        fake.rows(("r", "ere", [8, 9], FinishReason(kind="stop", matched=9)), completion_tokens=3)
        item = await soon(answer)
        assert isinstance(item, dict)
        meta = item.pop("meta_info")
        assert item == {"text": " there", "output_ids": [7, 8, 9], "prompt_token_ids": [104, 105]}
        assert meta.pop("e2e_latency") >= 0
        assert meta.pop("response_sent_to_client_ts") > 1e9
        assert meta.pop("time_to_first_token") >= 0
        assert meta.pop("tokenize_time") >= 0
        assert meta == {
            "id": "r",
            "finish_reason": {"type": "stop", "matched": 9},
            "prompt_tokens": 1,
            "weight_version": "v7",
            "num_retractions": 0,
            "reasoning_tokens": 0,
            "completion_tokens": 3,
            "cached_tokens": 0,
        }
        assert all(name.startswith("tokenize") for name in tokenizer.threads)

    run(body, weight_version="v7")


@pytest.mark.parametrize(
    ("request_", "rids"),
    [
        ({"text": "a"}, None),
        ({"text": ["a"]}, ["r_0"]),
        ({"text": "a", "sampling_params": {"n": 2}}, ["r_0", "r_1"]),
        ({"text": ["a", "b"], "sampling_params": {"n": 2}}, ["r_0", "r_1", "r_2", "r_3"]),
    ],
)
def test_shape_table(request_: dict[str, Any], rids: list[str] | None) -> None:
    """A dict for one prompt with n == 1, else a list, prompt-major, whatever the order of arrival."""

    async def body(manager: TokenizerManager, fake: Fake, tokenizer: ByteTokenizer) -> None:
        answer = asyncio.create_task(manager.generate(ask(**request_)))
        sent = [(await fake.expect(GenerateReq)).rid for _ in rids or ["r"]]
        for rid in reversed(sent):
            fake.rows((rid, rid, [1, 2], LENGTH))
        result = await soon(answer)
        if rids is None:
            assert isinstance(result, dict)
            assert result["text"] == "r"
        else:
            assert isinstance(result, list)
            assert [item["text"] for item in result] == [item["meta_info"]["id"] for item in result] == rids
            assert all("index" not in item for item in result)

    run(body)


@pytest.mark.parametrize(("by_request", "by_server"), [(None, False), (None, True), (True, False), (False, True)])
def test_streams_are_cumulative_unless_asked(by_request: bool | None, by_server: bool) -> None:
    async def body(manager: TokenizerManager, fake: Fake, tokenizer: ByteTokenizer) -> None:
        request = ask(stream=True, incremental=by_request)
        chunks = manager.stream(await manager.start(request), request)
        fake.rows(("r", "one ", [1], None), completion_tokens=1)
        first = await soon(anext(chunks))
        fake.rows(("r", "two", [2], LENGTH))
        second = await soon(anext(chunks))
        assert [item async for item in chunks] == []
        incremental = by_server if by_request is None else by_request
        assert (first["text"], first["output_ids"]) == ("one ", [1])
        assert (second["text"], second["output_ids"]) == (("two", [2]) if incremental else ("one two", [1, 2]))
        assert first["meta_info"]["finish_reason"] is None
        assert "e2e_latency" not in first["meta_info"]
        assert second["meta_info"]["finish_reason"] == {"type": "length", "length": 2}
        assert second["meta_info"]["completion_tokens"] == 2
        assert "index" not in first

    run(body, incremental_streaming_output=by_server)


def test_a_stream_of_several_choices_says_which() -> None:
    async def body(manager: TokenizerManager, fake: Fake, tokenizer: ByteTokenizer) -> None:
        request = ask(["a", "b"], stream=True)
        chunks = manager.stream(await manager.start(request), request)
        fake.rows(("r_1", "x", [1], None), ("r_0", "y", [2], LENGTH))
        fake.rows(("r_1", "z", [3], LENGTH))
        got = [(item["index"], item["meta_info"]["id"], item["text"]) async for item in chunks]
        assert {(index, rid): text for index, rid, text in got} == {(0, "r_0"): "y", (1, "r_1"): "xz"}

    run(body)


def test_deltas_that_queued_up_are_merged() -> None:
    async def body(manager: TokenizerManager, fake: Fake, tokenizer: ByteTokenizer) -> None:
        generation = await manager.start(ask(stream=True))
        for index in range(50):
            fake.rows(("r", chr(97 + index % 26), [index], None), completion_tokens=index + 1)
        await finish(fake, "r")
        await until(lambda: generation.finished)
        outputs = [output async for output in generation]
        assert len(outputs) == 1
        assert outputs[0].token_ids == list(range(50))
        assert len(outputs[0].text) == 50
        assert outputs[0].finish_reason == LENGTH

    run(body)


def test_messages_that_pour_in_do_not_starve_the_consumers() -> None:
    async def body(manager: TokenizerManager, fake: Fake, tokenizer: ByteTokenizer) -> None:
        generation = await manager.start(ask(stream=True))
        await fake.expect(GenerateReq)
        for index in range(50):
            fake.rows(("r", "x", [index], None), completion_tokens=index + 1)
        await finish(fake, "r")
        outputs = [output async for output in generation]
        assert len(outputs) > 10
        assert [id for output in outputs for id in output.token_ids] == list(range(50))

    run(body)


def test_rows_of_many_requests_in_one_message() -> None:
    async def body(manager: TokenizerManager, fake: Fake, tokenizer: ByteTokenizer) -> None:
        a, b = await manager.start(ask(rid="a")), await manager.start(ask(rid="b"))
        fake.rows(("b", "B", [1, 2, 3], LENGTH), ("a", "", [], None), ("a", "A", [4], LENGTH))
        assert [(output.text, output.token_ids) async for output in b] == [("B", [1, 2, 3])]
        assert [(output.text, output.token_ids) async for output in a] == [("A", [4])]
        assert a.prompts == [[97]]

    run(body)


# --- continuations that are scored ------------------------------------------------------------------------------------------------


SCORED: dict[str, Any] = {"sampling_params": {"max_new_tokens": 0}, "return_logprob": True}


def tell(fake: Fake, message: GenerateReq, reason: FinishReason, *, cached: int = 0) -> None:
    """The row of a carrier: the log-probability of a token is minus its id, less a hundred for each position."""
    assert message.logprobs is not None
    ids = unpack_ids(message.input_ids).tolist()
    positions = range(message.logprobs.start_len, len(ids) + 1)
    values = [-100 * at - (ids[at] if at < len(ids) else 0) for at in positions]
    named = [[-100 * at - token for token in message.logprobs.token_ids] for at in positions]
    columns = LogprobColumns(values=np.array(values, "<f4").tobytes(), id_values=np.array(named, "<f4").tobytes())
    fake.sender.send(
        TextOutput(
            rids=[message.rid],
            token_ids=b"",
            num_ids=[0],
            finish_reasons=[reason],
            prompt_tokens=[len(ids)],
            completion_tokens=[0],
            cached_tokens=[cached],
            num_retractions=[0],
            texts=[""],
            logprobs=[] if reason.kind == "abort" else [(0, RowLogprobs(output=LogprobColumns(), input=columns))],
        )
    )


NOTHING = FinishReason(kind="length", length=0)


def test_scores_of_continuations_take_as_few_requests_as_can_be() -> None:
    async def body(manager: TokenizerManager, fake: Fake, tokenizer: ByteTokenizer) -> None:
        answer = asyncio.create_task(manager.generate(ask("ab", continuations=["c", "de", "d", "fg"], **SCORED)))
        first, second = await fake.expect(GenerateReq), await fake.expect(GenerateReq)
        assert [(one.rid, unpack_ids(one.input_ids).tolist()) for one in (first, second)] == [
            ("r_1", list(b"abd")),
            ("r_3", list(b"abf")),
        ]
        assert first.logprobs == LogprobParams(start_len=2, token_ids=list(b"cef"), after_prompt=True)
        assert second.logprobs == LogprobParams(start_len=3, token_ids=list(b"g"), after_prompt=True)
        assert manager.num_live == 2
        tell(fake, second, NOTHING, cached=1)
        tell(fake, first, NOTHING, cached=1)
        items = await soon(answer)
        assert isinstance(items, list)
        metas = [item["meta_info"] for item in items]
        assert [meta["id"] for meta in metas] == ["r_0", "r_1", "r_2", "r_3"]
        assert [[entry[:2] for entry in meta["input_token_logprobs"]] for meta in metas] == [
            [(-200.0 - ord(char) - 100 * index, ord(char)) for index, char in enumerate(text)] for text in ("c", "de", "d", "fg")
        ]
        assert [meta["prompt_tokens"] for meta in metas] == [3, 4, 3, 4]
        assert [meta["cached_tokens"] for meta in metas] == [3, 2, 3, 2], "what was computed counts once"
        assert all(meta["finish_reason"] == {"type": "length", "length": 0} for meta in metas)

    run(body)


@pytest.mark.parametrize(
    "more",
    [
        {"sampling_params": {"max_new_tokens": 1}},
        {"return_logprob": False},
        {"top_logprobs_num": 1},
        {"token_ids_logprob": [5]},
        {"logprob_start_len": 0},
        {"extra_key": ["x", "y"]},
        {"cache_hint": {"pin_seconds": 1}},
    ],
)
def test_whoever_wants_more_than_scores_gets_a_request_per_continuation(more: dict[str, Any]) -> None:
    async def body(manager: TokenizerManager, fake: Fake, tokenizer: ByteTokenizer) -> None:
        generation = await manager.start(ask("ab", continuations=["c", "d"], **{**SCORED, **more}))
        assert [unpack_ids((await fake.expect(GenerateReq)).input_ids).tolist() for _ in "cd"] == [list(b"abc"), list(b"abd")]
        await finish(fake, "r_0", "r_1")
        await until(lambda: generation.finished)

    run(body)


@pytest.mark.parametrize(
    ("name", "hit", "ended"),
    [
        ("r", {"r_0", "r_2", "r_3"}, [0, 1, 2, 3]),
        ("r_0", {"r_0"}, [0, 1, 2, 3]),  # it tells of the prompt's end, which all need
        ("r_1", {"r_0"}, [0, 1, 2, 3]),
        ("r_2", {"r_2"}, [2]),
    ],
)
def test_an_aborted_carrier_takes_along_what_needs_it(name: str, hit: set[str], ended: list[int]) -> None:
    """A rid that is not computed itself stands for those that tell of it."""

    async def body(manager: TokenizerManager, fake: Fake, tokenizer: ByteTokenizer) -> None:
        generation = await manager.start(ask("ab", continuations=["fg", "d", "de", "hi"], **SCORED))
        sent = [await fake.expect(GenerateReq) for _ in range(3)]
        assert [message.rid for message in sent] == ["r_0", "r_2", "r_3"]
        with pytest.raises(RequestError, match="is in use"):
            await manager.start(ask("x", rid="r_1"))
        assert manager.abort(name) == len(hit)
        assert {(await fake.expect(AbortReq)).rid for _ in hit} == hit
        for message in sent:
            tell(fake, message, FinishReason(kind="abort", message="Aborted.") if message.rid in hit else NOTHING)
        outputs = {output.index: output async for output in generation}
        assert sorted(outputs) == [0, 1, 2, 3]
        assert [i for i in range(4) if (reason := outputs[i].finish_reason) and reason.kind == "abort"] == ended
        assert [i for i in range(4) if outputs[i].logprobs is None] == ended
        await until(lambda: manager.num_live == 0)

    run(body)


def test_an_abort_while_continuations_are_tokenised() -> None:
    async def body(manager: TokenizerManager, fake: Fake, tokenizer: ByteTokenizer) -> None:
        starting = asyncio.create_task(manager.start(ask("ab!", continuations=["c", "d"], **SCORED)))
        await until(lambda: manager.num_live == 2)
        assert manager.abort("r_1") == 1
        tokenizer.gate.set()
        outputs = [output async for output in await soon(starting)]
        assert [output.finish_reason and output.finish_reason.kind for output in outputs] == ["abort", "abort"]
        assert await fake.silent()

    run(body)


# --- refusals ---------------------------------------------------------------------------------------------------------------------


def test_nothing_is_sent_of_a_batch_with_one_bad_prompt() -> None:
    async def body(manager: TokenizerManager, fake: Fake, tokenizer: ByteTokenizer) -> None:
        with pytest.raises(RequestError, match="longer than the model's context"):
            await manager.start(ask(["a", "b" * 2000]))
        assert manager.num_live == 0
        assert await fake.silent()

    run(body)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"rid": "a"}, {"rid": "a"}),
        ({"rid": "a"}, {"rid": ["b", "a"], "text": ["a", "b"]}),
        ({"rid": "a", "text": ["a", "b"]}, {"rid": "a_1"}),
        ({"rid": "a", "text": ["a", "b"]}, {"rid": "a"}),
        ({"rid": "a"}, {"rid": "a", "text": ["a", "b"]}),
    ],
)
def test_a_rid_that_lives_is_refused_and_free_again_after(first: dict[str, Any], second: dict[str, Any]) -> None:
    async def body(manager: TokenizerManager, fake: Fake, tokenizer: ByteTokenizer) -> None:
        generation = await manager.start(ask(**first))
        with pytest.raises(RequestError, match="in use") as caught:
            await manager.start(ask(**second))
        assert caught.value.param == "rid"
        assert manager.num_live == len(generation.rids)
        await finish(fake, *generation.rids)
        assert [output.finish_reason async for output in generation] == [LENGTH] * len(generation.rids)
        again = await manager.start(ask(**second))
        await finish(fake, *again.rids)
        await until(lambda: manager.num_live == 0)

    run(body)


def test_a_rid_is_taken_while_its_prompt_is_tokenised() -> None:
    async def body(manager: TokenizerManager, fake: Fake, tokenizer: ByteTokenizer) -> None:
        slow = asyncio.create_task(manager.start(ask("!")))
        await until(lambda: manager.num_live)
        with pytest.raises(RequestError, match="in use"):
            await manager.start(ask())
        tokenizer.gate.set()
        await soon(slow)
        await finish(fake, "r")
        await until(lambda: manager.num_live == 0)

    run(body)


def test_the_loop_runs_while_a_prompt_is_tokenised() -> None:
    async def body(manager: TokenizerManager, fake: Fake, tokenizer: ByteTokenizer) -> None:
        slow = asyncio.create_task(manager.start(ask("!", rid="slow")))
        await until(lambda: manager.num_live)
        other = asyncio.create_task(manager.generate(ask(rid="fast")))
        assert (await fake.expect(GenerateReq)).rid == "fast"
        await finish(fake, "fast")
        await soon(other)
        slow.cancel()
        with pytest.raises(asyncio.CancelledError):
            await slow
        assert manager.num_live == 0
        assert await fake.silent()

    run(body)


def test_an_abort_with_a_status_is_raised_when_not_streaming() -> None:
    async def body(manager: TokenizerManager, fake: Fake, tokenizer: ByteTokenizer) -> None:
        full = FinishReason(kind="abort", message="The request queue is full.", status_code=503, err_type="ServiceUnavailable")
        answer = asyncio.create_task(manager.generate(ask()))
        await fake.expect(GenerateReq)
        fake.rows(("r", "", [], full))
        with pytest.raises(RequestError, match="queue is full") as caught:
            await soon(answer)
        assert (caught.value.status_code, caught.value.err_type) == (503, "ServiceUnavailable")
        request = ask(stream=True)
        generation = await manager.start(request)
        fake.rows(("r", "", [], full))
        (chunk,) = [item async for item in manager.stream(generation, request)]
        assert chunk["meta_info"]["finish_reason"] == {
            "type": "abort",
            "message": "The request queue is full.",
            "status_code": 503,
            "err_type": "ServiceUnavailable",
        }

    run(body)


def test_one_failed_item_of_a_batch_spares_the_others() -> None:
    async def body(manager: TokenizerManager, fake: Fake, tokenizer: ByteTokenizer) -> None:
        answer = asyncio.create_task(manager.generate(ask(["a", "b"])))
        await fake.expect(GenerateReq)
        fake.rows(("r_0", "", [], FinishReason(kind="abort", message="broken", status_code=500)), ("r_1", "fine", [1], LENGTH))
        result = await soon(answer)
        assert isinstance(result, list)
        assert [item["meta_info"]["finish_reason"]["type"] for item in result] == ["abort", "length"]

    run(body)


# --- aborts -----------------------------------------------------------------------------------------------------------------------


async def consume(generation: Generation) -> None:
    async for _ in generation:
        pass


async def leave_by_break(manager: TokenizerManager, generation: Generation, request: GenerateInput) -> None:
    async for _ in generation:
        break
    gc.collect()
    await asyncio.sleep(0)


async def leave_by_close(manager: TokenizerManager, generation: Generation, request: GenerateInput) -> None:
    async with aclosing(manager.stream(generation, request)) as chunks:
        async for _ in chunks:
            break


async def leave_by_cancel(manager: TokenizerManager, generation: Generation, request: GenerateInput) -> None:
    task = asyncio.create_task(consume(generation))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def leave_by_abort(manager: TokenizerManager, generation: Generation, request: GenerateInput) -> None:
    generation.abort()
    generation.abort()


@pytest.mark.parametrize("leave", [leave_by_break, leave_by_close, leave_by_cancel, leave_by_abort])
def test_a_consumer_that_leaves_aborts_what_has_not_finished(leave: Any) -> None:
    async def body(manager: TokenizerManager, fake: Fake, tokenizer: ByteTokenizer) -> None:
        request = ask(["a", "b"], stream=True)
        generation = await manager.start(request)
        await fake.expect(GenerateReq)
        await fake.expect(GenerateReq)
        fake.rows(("r_0", "x", [1], LENGTH), ("r_1", "x", [1], None))
        await until(lambda: manager.num_live == 1)
        await leave(manager, generation, request)
        assert (await fake.expect(AbortReq)).rid == "r_1"
        assert await fake.silent()
        with pytest.raises(RequestError, match="in use"):  # until the scheduler has let go of it
            await manager.start(ask(rid="r_1"))
        fake.rows(("r_1", "", [], FinishReason(kind="abort")))
        await until(lambda: manager.num_live == 0)

    run(body)


def test_a_cancelled_generate_aborts() -> None:
    async def body(manager: TokenizerManager, fake: Fake, tokenizer: ByteTokenizer) -> None:
        answer = asyncio.create_task(manager.generate(ask()))
        await fake.expect(GenerateReq)
        answer.cancel()
        assert (await fake.expect(AbortReq)).rid == "r"
        fake.rows(("r", "", [], FinishReason(kind="abort")))
        await until(lambda: manager.num_live == 0)

    run(body)


@pytest.mark.parametrize(
    ("rid", "hit"), [("req-1", ["req-1"]), ("b", ["b_0", "b_1"]), ("b_1", ["b_1"]), ("req", []), ("b_", []), ("nope", [])]
)
def test_abort_by_exact_rid_or_that_of_the_batch(rid: str, hit: list[str]) -> None:
    async def body(manager: TokenizerManager, fake: Fake, tokenizer: ByteTokenizer) -> None:
        for request in (ask(rid="req-1"), ask(rid="req-10"), ask(["a", "b"], rid="b")):
            await manager.start(request)
        for _ in range(4):
            await fake.expect(GenerateReq)
        assert manager.abort(rid) == len(hit)
        assert [(await fake.expect(AbortReq)).rid for _ in hit] == hit
        assert await fake.silent()
        await finish(fake, "req-1", "req-10", "b_0", "b_1")
        await until(lambda: manager.num_live == 0)

    run(body)


def test_abort_of_nothing_in_particular() -> None:
    async def body(manager: TokenizerManager, fake: Fake, tokenizer: ByteTokenizer) -> None:
        answers = [asyncio.create_task(manager.generate(ask(rid=rid))) for rid in "ab"]
        for _ in answers:
            await fake.expect(GenerateReq)
        with pytest.raises(RequestError, match="rid must not be empty"):
            manager.abort("")
        assert await fake.silent()
        assert manager.abort("", abort_all=True) == 2
        for _ in answers:
            fake.rows(((await fake.expect(AbortReq)).rid, "", [], FinishReason(kind="abort", message="Abort by client request.")))
        for answer in answers:
            item = await soon(answer)
            assert isinstance(item, dict)
            assert item["meta_info"]["finish_reason"] == {"type": "abort", "message": "Abort by client request."}

    run(body)


def test_abort_while_the_prompt_is_tokenised() -> None:
    async def body(manager: TokenizerManager, fake: Fake, tokenizer: ByteTokenizer) -> None:
        answer = asyncio.create_task(manager.generate(ask("abc!")))
        await until(lambda: manager.num_live)
        assert manager.abort("r") == 1
        tokenizer.gate.set()
        item = await soon(answer)
        assert isinstance(item, dict)
        assert item["meta_info"]["finish_reason"]["type"] == "abort"
        assert item["meta_info"]["prompt_tokens"] == 4
        assert await fake.silent()

    run(body)


def test_late_and_unknown_rows_are_dropped_with_one_log_line(caplog: pytest.LogCaptureFixture) -> None:
    async def body(manager: TokenizerManager, fake: Fake, tokenizer: ByteTokenizer) -> None:
        generation = await manager.start(ask())
        await finish(fake, "r")
        for _ in range(20):
            fake.rows(("r", "late", [1], LENGTH), ("never", "x", [2], None))
        fake.sender.send(ControlReply(call_id=12345))
        answer = asyncio.create_task(manager.generate(ask(rid="next")))
        await fake.expect(GenerateReq)
        fake.rows(("next", "ok", [3], LENGTH))
        item = await soon(answer)
        assert isinstance(item, dict)
        assert item["text"] == "ok"
        assert [output.text async for output in generation] == [""]

    with caplog.at_level(logging.WARNING):
        run(body)
    assert len(caplog.records) == 1


# --- control, health, the end -----------------------------------------------------------------------------------------------------


def test_control_calls_find_their_replies() -> None:
    async def body(manager: TokenizerManager, fake: Fake, tokenizer: ByteTokenizer) -> None:
        calls = [asyncio.create_task(manager.internal_state()) for _ in range(5)]
        asked = [await fake.expect(InternalStateReq) for _ in calls]
        for message in reversed(asked):
            fake.sender.send(ControlReply(call_id=message.call_id, state={"id": message.call_id}))
        assert [(await soon(call))["id"] for call in calls] == [message.call_id for message in asked]

    run(body)


def test_flush_cache_waits_for_the_scheduler() -> None:
    async def body(manager: TokenizerManager, fake: Fake, tokenizer: ByteTokenizer) -> None:
        for timeout, success in ((0.0, False), (DEADLINE, True)):
            call = asyncio.create_task(manager.flush_cache(timeout))
            message = await fake.expect(FlushCacheReq)
            assert message.timeout == timeout
            fake.sender.send(ControlReply(call_id=message.call_id, success=success, message="said"))
            reply = await soon(call)
            assert (reply.success, reply.message) == (success, "said")

    run(body)


def test_pause_and_continue() -> None:
    async def body(manager: TokenizerManager, fake: Fake, tokenizer: ByteTokenizer) -> None:
        call = asyncio.create_task(manager.pause_generation("retract"))
        message: Any = await fake.expect(PauseReq)
        assert message.mode == "retract"
        fake.sender.send(ControlReply(call_id=message.call_id))
        assert (await soon(call)).success
        call = asyncio.create_task(manager.continue_generation())
        message = await fake.expect(ContinueReq)
        fake.sender.send(ControlReply(call_id=message.call_id))
        assert (await soon(call)).success

    run(body)


def test_overload_is_answered_at_once() -> None:
    """3 may be alive; the fourth is refused here, unless its priority may displace another."""

    async def body(manager: TokenizerManager, fake: Fake, tokenizer: ByteTokenizer) -> None:
        manager.info = msgspec.structs.replace(manager.info, max_running_requests=1, max_queued_requests=2)
        for rid in "abc":
            await manager.start(ask(rid=rid))
            await fake.expect(GenerateReq)
        for priority in (None, 5):
            with pytest.raises(RequestError, match="queue is full") as caught:
                await manager.start(ask(rid="d", priority=priority))
            assert caught.value.status_code == 503
        manager.info = msgspec.structs.replace(manager.info, priority_scheduling=True)
        with pytest.raises(RequestError, match="queue is full"):
            await manager.start(ask(rid="d"))
        await manager.start(ask(rid="d", priority=5))
        assert (await fake.expect(GenerateReq)).priority == 5
        await finish(fake, *"abcd")
        await until(lambda: manager.num_live == 0)
        await manager.start(ask(rid="e"))
        await finish(fake, "e")
        await until(lambda: manager.num_live == 0)

    run(body)


def test_a_deadline_counts_from_the_arrival() -> None:
    async def body(manager: TokenizerManager, fake: Fake, tokenizer: ByteTokenizer) -> None:
        await manager.start(ask("a", rid="a", timeout=100, routing_key="k"))
        message = await fake.expect(GenerateReq)
        assert 90 < message.timeout < 100
        assert message.routing_key == "k"
        slow = asyncio.create_task(manager.generate(ask("!", rid="b", timeout=0.01)))
        await asyncio.sleep(0.02)
        tokenizer.gate.set()
        with pytest.raises(RequestError, match="deadline") as caught:
            await soon(slow)
        assert caught.value.status_code == 504
        assert await fake.silent()
        await finish(fake, "a")
        await until(lambda: manager.num_live == 0)

    run(body)


def test_health_from_heartbeats() -> None:
    async def body(manager: TokenizerManager, fake: Fake, tokenizer: ByteTokenizer) -> None:
        assert manager.health().alive
        fake.sender.send(Heartbeat(loop_age=0.1, forward_age=0.5, num_running=3, num_waiting=4))
        await until(lambda: manager.health().num_running == 3)
        health = manager.health()
        assert (health.alive, health.ready, health.num_waiting, health.forward_age) == (True, True, 4, 0.5)
        manager.draining = True
        assert (manager.health().alive, manager.health().ready, manager.health().reason) == (True, False, "draining")
        manager.fail(EngineDeadError("the scheduler process died"))
        assert (manager.health().alive, manager.health().reason) == (False, "the scheduler process died")

    run(body)


@pytest.mark.parametrize(
    ("loop_age", "forward_age", "silence", "alive"),
    [
        (0.0, 0.0, 0.0, True),
        (60.0, 60.0, 0.0, True),  # a long prefill is no death
        (60.0, 0.0, 0.0, False),
        (400.0, 400.0, 0.0, False),
        (0.0, 0.0, 60.0, False),
    ],
)
def test_liveness(monkeypatch: pytest.MonkeyPatch, loop_age: float, forward_age: float, silence: float, alive: bool) -> None:
    now = 1000.0
    monkeypatch.setattr("banyan.managers.processes.health.time.monotonic", lambda: now)
    monitor = HealthMonitor()
    monitor.take(Heartbeat(loop_age=loop_age, forward_age=forward_age, num_running=0, num_waiting=0))
    now += silence
    assert monitor.health().alive is alive
    assert bool(monitor.health().reason) is not alive


def test_draining_refuses_new_requests_and_finishes_old_ones() -> None:
    async def body(manager: TokenizerManager, fake: Fake, tokenizer: ByteTokenizer) -> None:
        generation = await manager.start(ask())
        manager.draining = True
        with pytest.raises(RequestError) as caught:
            await manager.start(ask(rid="s"))
        assert (caught.value.status_code, caught.value.err_type) == (503, "ServiceUnavailable")
        assert not await manager.wait_idle(0.05)
        await finish(fake, "r")
        assert await manager.wait_idle(DEADLINE)
        assert [output.finish_reason async for output in generation] == [LENGTH]

    run(body)


def test_a_death_reaches_every_waiter_and_later_calls() -> None:
    async def body(manager: TokenizerManager, fake: Fake, tokenizer: ByteTokenizer) -> None:
        request = ask(stream=True, rid="s")
        stream = manager.stream(await manager.start(request), request)
        fake.rows(("s", "so far", [1], None))
        assert (await soon(anext(stream)))["text"] == "so far"
        slow = manager.start(ask("!", rid="slow"))
        waiters = [asyncio.create_task(call) for call in (manager.generate(ask()), manager.internal_state(), slow, anext(stream))]
        await until(lambda: manager.num_live == 3)
        await fake.expect(GenerateReq)
        threading.Thread(target=manager.fail, args=[EngineDeadError("the scheduler process died", "its traceback")]).start()
        await until(lambda: manager.num_live == 0)
        tokenizer.gate.set()
        results = await soon(asyncio.gather(*waiters, return_exceptions=True))
        errors = [result for result in results if isinstance(result, EngineDeadError)]
        assert len(errors) == len(waiters) == len({id(error) for error in errors})
        assert {(str(error), error.detail) for error in errors} == {("the scheduler process died", "its traceback")}
        for later in (manager.start(ask()), manager.internal_state(), manager.flush_cache(5)):
            with pytest.raises(EngineDeadError):
                await soon(later)

    run(body)


def test_a_message_that_cannot_be_read_is_a_death_not_silence() -> None:
    async def body(manager: TokenizerManager, fake: Fake, tokenizer: ByteTokenizer) -> None:
        generation = await manager.start(ask())
        fake.sender.send(ShutdownReq())  # not for the tokenizer manager
        with pytest.raises(EngineDeadError, match="cannot receive"):
            await soon(consume(generation))

    run(body)


def test_shutdown_tells_the_others_and_fails_the_waiters(caplog: pytest.LogCaptureFixture) -> None:
    async def body(manager: TokenizerManager, fake: Fake, tokenizer: ByteTokenizer) -> None:
        answer = asyncio.create_task(manager.generate(ask()))
        await fake.expect(GenerateReq)
        manager.begin_shutdown()
        await fake.expect(ShutdownReq)
        assert isinstance(await soon(fake.detokenizer.receive()), ShutdownReq)
        with pytest.raises(EngineDeadError, match="shut down"):
            await soon(answer)
        fake.rows(("r", "under way still", [1], None))
        fake.sender.send(Heartbeat(loop_age=0, forward_age=0, num_running=77, num_waiting=0))
        await until(lambda: manager.health().num_running == 77)
        assert caplog.records == []
        await manager.close()
        await manager.close()
        with pytest.raises(EngineDeadError, match="shut down"):
            await manager.start(ask())

    run(body)
