"""The comparison of engines: its loads over a real server, the wire of engines without one, its table."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import compare
import compare_workloads
import pytest
from compare_workloads import WORKLOADS, Figures, Source, WorkloadFailed, warm_up
from http_load import Client, LlamaBackend, NativeBackend, Reply
from server import Server, until

BENCHMARKS = Path(compare.__file__).parent


def run(url: str, name: str) -> Figures:
    async def body() -> Figures:
        client = Client(url, NativeBackend(ignore_eos=True), headers={}, timeout=60)
        try:
            await warm_up(client, Source(1, 200))
            return await WORKLOADS[name](client, Source(0, 200))
        finally:
            await client.close()

    return asyncio.run(body())


@pytest.mark.parametrize(
    ("name", "figures"),
    [
        ("W1", ["W1 time per token", "W1 time to first token"]),
        ("W4", ["W4 total", "W4 first token, turn 1", "W4 first token, turn 5"]),
        ("W5", ["W5 worst gap", "W5 first token of the prompt"]),
    ],
)
def test_loads(plain: Server, monkeypatch: pytest.MonkeyPatch, name: str, figures: list[str]) -> None:
    monkeypatch.setattr(compare_workloads, "LONG_PROMPT", 2048)
    found = run(plain.url, name)
    assert list(found.seconds) == figures
    assert all(seconds > 0 for seconds in found.seconds.values())
    assert [len(ids) for ids in found.outputs] == ([128] * 3 if name == "W1" else [])


def test_a_load_that_fails_has_no_numbers(narrow: Server) -> None:
    with pytest.raises(WorkloadFailed, match="400"):
        run(narrow.url, "W3")  # its prompts are longer than the context


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_an_engine_without_a_server(tmp_path: Path) -> None:
    """Each step gives every request its next number; the prompts' lengths tell the requests apart."""
    script = tmp_path / "counting.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import sys
            sys.path.insert(0, {str(BENCHMARKS)!r})
            from peer_wire import serve

            class Counting:
                def __init__(self):
                    self.live = {{}}
                def add(self, number, input_ids, max_new_tokens):
                    self.live[number] = [len(input_ids), max_new_tokens]
                def step(self):
                    for number, left in list(self.live.items()):
                        left[0], left[1] = left[0] + 1, left[1] - 1
                        if not left[1]:
                            del self.live[number]
                        yield number, [left[0]], not left[1]
                def busy(self):
                    return bool(self.live)

            serve(Counting(), int(sys.argv[1]))
            """
        )
    )
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen([sys.executable, str(script), str(port)])
    try:
        until(lambda: listens(port))

        async def body() -> list[Reply]:
            client = Client(f"http://127.0.0.1:{port}", NativeBackend(ignore_eos=True), headers={}, timeout=20)
            try:
                return await asyncio.gather(*(client.send([1] * length, 5) for length in (3, 10, 20)))
            finally:
                await client.close()

        replies = asyncio.run(body())
    finally:
        process.kill()
        process.wait()
    assert [reply.error for reply in replies] == [None] * 3
    assert [reply.output_ids for reply in replies] == [[length + i for i in range(1, 6)] for length in (3, 10, 20)]


def test_events_of_llama_cpp() -> None:
    backend, reply = LlamaBackend(), Reply(wanted=2)
    backend.read(b'{"content":"a","tokens":[5],"stop":false}', 1.0, reply)
    backend.read(b'{"content":"b","tokens":[6],"stop":false}', 2.0, reply)
    backend.read(b'{"content":"","tokens":[],"stop":true,"tokens_predicted":2,"tokens_evaluated":7}', 3.0, reply)
    assert (reply.output_ids, reply.token_times, reply.end) == ([5, 6], [1.0, 2.0], 3.0)
    assert (reply.prompt_tokens, reply.output_tokens) == (7, 2)


def test_the_table() -> None:
    ours = compare.Measured({"W1 time per token": [0.010, 0.012], "W2 total": [5.0]}, [[1, 2, 3, 4]])
    other = compare.Measured({"W1 time per token": [0.020, 0.022]}, [[1, 2, 9, 4]])
    third = compare.Measured({"W1 time per token": [0.030]}, failures=["W2: no"])
    lines = compare.rows({"banyan": ours, "a": other, "b": third}, "bf16")
    assert lines == [
        ["W1 time per token, ms", "11.00 (10.00-12.00)", "21.00 (20.00-22.00)", "30.00", "0.52", "0.80"],
        ["W2 total, s", "5.00", "-", "-", "-", "0.85"],
        [compare.SAME_IDS, "4", "2", "-", "-", "-"],
    ]


def test_engines_that_lack_a_precision_are_left_out() -> None:
    assert "vllm" in compare.parse([]).engines
    assert "vllm" not in compare.parse(["--precision", "int4"]).engines
    with pytest.raises(SystemExit):
        compare.parse(["--engines", "nobody"])
