"""Grammars compiled in worker processes: what goes wrong there is the request's own loss."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from tiny_tokenizers import byte_fallback_folder, byte_level_folder

from banyan.managers.constrained.compiler import Compiled, GrammarCompiler, _Cache
from banyan.managers.constrained.grammar import BACKENDS, GrammarText, Vocabulary, create_backend
from banyan.managers.constrained.worker import WorkerConfig
from banyan.managers.errors import RequestError
from banyan.managers.tokenizer import Tokenizer

SCHEMA = GrammarText("json_schema", '{"type":"object","properties":{"ü":{"type":"integer"}},"required":["ü"]}')
HUGE = GrammarText("json_schema", json.dumps({"enum": [f"value{i} {i * 7919 % 10007}" for i in range(20_000)]}))
STOP = 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(byte_level_folder(tmp_path_factory.mktemp("tokenizer")))


def config_of(folder: str, **options: Any) -> WorkerConfig:
    return WorkerConfig(tokenizer_path=folder, vocab_size=400, stop_ids=(STOP,), **{"timeout": 10.0, "memory": 1 << 30, **options})


@pytest.fixture(scope="module")
def compiler(folder: str) -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(config_of(folder, timeout=2.0), num_workers=2)
    yield compiler
    compiler.close()


def workers() -> set[int]:
    return {child.pid for child in psutil.Process().children() if "banyan.managers.constrained.worker" in child.cmdline()}


def gone(pids: set[int]) -> bool:
    deadline = time.monotonic() + 20
    while pids & workers() and time.monotonic() < deadline:
        time.sleep(0.02)
    return not pids & workers()


@pytest.mark.parametrize("make", [byte_level_folder, byte_fallback_folder])
@pytest.mark.parametrize("name", list(BACKENDS))
def test_every_backend_over_real_tokenizers(tmp_path: Path, make: Any, name: str) -> None:
    tokenizer = Tokenizer.load(str(make(tmp_path)))
    vocabulary = Vocabulary.of(tokenizer, vocab_size=400, stop_ids=(STOP,))
    backend = create_backend(name, vocabulary)
    matcher = backend.load(backend.compile("regex", "[hi]{2,4}")).matcher()
    copy, row = matcher.fork(), np.zeros(vocabulary.mask_width, np.int32)
    text = b""
    rng = np.random.default_rng(0)
    while not matcher.is_terminated:
        matcher.fill_mask(row)
        allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little", count=400))
        assert set(allowed) <= {STOP} | {index for index, token in enumerate(vocabulary.tokens) if token}
        token = int(rng.choice(allowed))
        assert not matcher.fork().accept(vocabulary.tokens.index(b"b"))
        assert matcher.accept(token)
        text += vocabulary.tokens[token]
    assert 2 <= len(text) <= 4 and set(text) <= set(b"hi")
    assert copy.accept(vocabulary.tokens.index(b"h"))
    copy.rollback(1)
    assert copy.accept(vocabulary.tokens.index(b"h"))


def test_neither_torch_nor_transformers_is_loaded(folder: str) -> None:
    code = (
        "import sys\nfrom banyan.managers.constrained.grammar import Vocabulary, create_backend\n"
        "for name in ('xgrammar', 'llguidance', 'outlines'):\n"
        "    backend = create_backend(name, Vocabulary(tokens=[b'a', b''], stop_ids=(1,)))\n"
        "    backend.load(backend.compile('regex', 'a+'))\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)\n"
    )
    import subprocess

    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_equal_grammars_are_compiled_once(compiler: GrammarCompiler) -> None:
    with ThreadPoolExecutor(8) as pool:
        futures = list(pool.map(lambda _: compiler.compile(SCHEMA), range(8)))
    assert len({id(future) for future in futures}) == 1
    compiled = futures[0].result()
    assert compiled.backend == "xgrammar" and compiler.compile(SCHEMA).result() is compiled


def test_a_wrong_grammar_is_a_400_and_stays_one(compiler: GrammarCompiler) -> None:
    wrong = GrammarText("ebnf", "root ::= nowhere")
    for _ in range(2):
        with pytest.raises(RequestError) as caught:
            compiler.compile(wrong).result()
        assert caught.value.status_code == 400 and caught.value.param == "ebnf"


def test_what_takes_too_long_is_a_400_while_others_go_on(compiler: GrammarCompiler) -> None:
    slow = compiler.compile(HUGE)
    assert compiler.compile(GrammarText("regex", "a+b")).result().data
    with pytest.raises(RequestError, match="time limit") as caught:
        slow.result()
    assert caught.value.status_code == 400
    assert compiler.compile(HUGE) is not slow, "another try may succeed: this is not kept"
    assert compiler.compile(GrammarText("regex", "a+c")).result().data


@pytest.mark.parametrize(("fault", "message"), [("hang", "time limit"), ("crash", "not survive"), ("raise", "not survive")])
def test_a_broken_worker_is_replaced(folder: str, fault: str, message: str) -> None:
    """GR-04, GR-06."""
    compiler = GrammarCompiler(config_of(folder, timeout=0.5, fault=fault), num_workers=1)
    before = workers()
    try:
        for text in ("a", "b"):
            with pytest.raises(RequestError, match=message):
                compiler.compile(GrammarText("regex", text)).result()
    finally:
        compiler.close()
    assert gone(workers() - before)


def test_too_little_memory_is_a_400(folder: str) -> None:
    compiler = GrammarCompiler(config_of(folder, memory=8 << 20), num_workers=1)
    try:
        with pytest.raises(RequestError) as caught:
            compiler.compile(GrammarText("regex", "[a-z]{1,100000}")).result()
        assert caught.value.status_code == 400
    finally:
        compiler.close()


def test_workers_end_with_their_parent(folder: str) -> None:
    before = workers()
    compiler = GrammarCompiler(config_of(folder), num_workers=1)
    compiler.compile(SCHEMA).result()
    own = workers() - before
    assert own
    compiler.close()
    compiler.close()
    assert gone(own)
    with pytest.raises(RequestError):
        compiler.compile(GrammarText("regex", "z"))
    assert all(not psutil.pid_exists(pid) or pid == os.getpid() for pid in own)


def test_the_queue_is_bounded(folder: str) -> None:
    compiler = GrammarCompiler(config_of(folder, fault="hang", timeout=1.0), num_workers=1, max_waiting=2)
    try:
        for text in ("a", "b"):
            compiler.compile(GrammarText("regex", text))
        with pytest.raises(RequestError) as caught:
            compiler.compile(GrammarText("regex", "c"))
        assert caught.value.status_code == 503
    finally:
        compiler.close()


def test_the_cache_is_bounded_in_bytes() -> None:
    cache = _Cache(10_000)
    texts = [GrammarText("regex", f"{index}" * 10) for index in range(9)]
    for text in texts:
        done: Future[Compiled] = Future()
        done.set_result(Compiled(key="", backend="", data=b"x" * 1500))
        cache.put(text, done)
        cache.get(texts[0])
    assert len(cache) == 4 and cache.get(texts[0]) and cache.get(texts[-1]) and not cache.get(texts[1])
