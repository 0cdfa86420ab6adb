"""The borders of THREATS.md on a running server, and that every test that it names exists."""

from __future__ import annotations

import ast
import http.server
import json
import os
import re
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from server import Server, oracle_folder, until

import banyan

ROOT = Path(banyan.__file__).parent
KEY = "sk-very-secret-1"
ADMIN = "sk-very-secret-2"
PROBE = """
import os, pickle, threading, time
def probe():
    folder = os.environ["UNPICKLE_PROBE"]
    while not os.path.exists(folder + "/go"):
        time.sleep(0.05)
    try:
        pickle.loads(pickle.dumps(os.getcwd))
        told = "unpickled"
    except Exception as error:
        told = type(error).__name__
    with open(f"{folder}/{os.getpid()}.new", "w") as file:
        file.write(told)
    os.replace(file.name, f"{folder}/{os.getpid()}")
threading.Thread(target=probe, daemon=True).start()
"""  # runs in every process of the server before its own code
EVIL = "from pathlib import Path\nPath({marker!r}).write_text('ran')\n"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("security")
    model = Path(oracle_folder(folder / "model", auto_map={"AutoModelForCausalLM": "evil.Model", "AutoConfig": "evil.Config"}))
    (model / "evil.py").write_text(EVIL.format(marker=str(folder / "ran")))
    config = json.loads((model / "tokenizer_config.json").read_text()) if (model / "tokenizer_config.json").exists() else {}
    (model / "tokenizer_config.json").write_text(json.dumps({**config, "auto_map": {"AutoTokenizer": ["evil.Tokenizer", None]}}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BANYAN_API_KEY", KEY)
        patch.setenv("BANYAN_ADMIN_API_KEY", ADMIN)
        (folder / "probe").mkdir()
        (folder / "probe" / "sitecustomize.py").write_text(PROBE)
        patch.setenv("UNPICKLE_PROBE", str(folder / "probe"))
        patch.setenv("PYTHONPATH", f"{folder / 'probe'}:{os.environ.get('PYTHONPATH', '')}")
        server = Server(str(model), folder / "run", "--enable-metrics", "--log-requests", "--log-level", "debug")
    server.http.headers["Authorization"] = f"Bearer {ADMIN}"
    try:
        server.wait_ready()
        yield server
        server.check()
        server.terminate()
    finally:
        server.close()


def test_listens_on_one_loopback_port_and_private_sockets(server: Server) -> None:
    listening = set()
    for process in (psutil.Process(server.process.pid), *server.children().values()):
        listening |= {item.laddr for item in process.net_connections("inet") if item.status == psutil.CONN_LISTEN}
    assert {tuple(address) for address in listening} == {("127.0.0.1", server.port)}
    (directory,) = server.directories()
    assert stat.S_IMODE(os.stat(directory).st_mode) == 0o700


def test_keys_are_in_no_reply_log_or_dump(server: Server) -> None:
    texts = [server.http.get(path).text for path in ("/server_info", "/model_info", "/metrics", "/openapi.json")]
    texts.append(server.http.post("/dump").text)
    assert all(reply for reply in texts)
    assert not [text for text in [*texts, server.text()] if "very-secret" in text]
    for process in (psutil.Process(server.process.pid), *server.children().values()):
        assert "very-secret" not in " ".join(process.cmdline())


def test_code_in_a_model_folder_never_runs(server: Server) -> None:
    server.generate(text="a", sampling_params={"max_new_tokens": 2})
    assert not (server.folder.parent / "ran").exists()


def test_a_short_id_aborts_nobody_else(server: Server) -> None:
    body = {"text": "a", "rid": "abcdef", "stream": True, "sampling_params": {"max_new_tokens": 50, "ignore_eos": True}}
    with server.http.stream("POST", "/generate", json=body) as reply:
        lines = reply.iter_lines()
        next(lines)
        for rid in ("a", "abc", "abcde"):
            assert server.http.post("/abort_request", json={"rid": rid}).json() == {"aborted": 0}
        last = [json.loads(line[6:]) for line in lines if line.startswith("data: {")][-1]
    assert last["meta_info"]["finish_reason"] == {"type": "length", "length": 50}


@pytest.mark.parametrize("params", [{"n": 10**6}, {"max_new_tokens": 10**12}, {"min_new_tokens": 10**9}, {"top_k": 2**70}])
def test_numbers_without_bound_are_a_400(server: Server, params: dict[str, int]) -> None:
    assert server.post({"text": "a", "sampling_params": params}).status_code == 400


@pytest.mark.parametrize("salt", ["", "\0", "a" * 100_000, "\U0001f642" * 9, "../../etc/passwd", "%s%n{0}"])
def test_odd_salts_are_served_or_refused(server: Server, salt: str) -> None:
    reply = server.post({"text": "a", "cache_salt": salt, "sampling_params": {"max_new_tokens": 1}})
    assert reply.status_code in (200, 400)
    server.check()


def test_no_url_of_a_request_is_fetched(server: Server) -> None:
    asked: list[str] = []

    class Trap(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(200)
            self.end_headers()

    trap = http.server.HTTPServer(("127.0.0.1", 0), Trap)
    thread = threading.Thread(target=trap.serve_forever)
    thread.start()
    try:
        url = f"http://127.0.0.1:{trap.server_port}/x.png"
        parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "what is it"}]
        chat = {"model": "m", "messages": [{"role": "user", "content": parts}]}
        assert server.post(chat, "/v1/chat/completions").status_code == 400
        assert server.post({"text": "a", "image_data": url}).status_code == 400
    finally:
        trap.shutdown()
        thread.join()
        trap.server_close()
    assert asked == []


def test_unpickling_is_refused() -> None:
    code = (
        "import os, pickle\nfrom banyan.managers.processes.no_pickle import PickleRefusedError, forbid_unpickling\n"
        "plain, evil = pickle.dumps([1, 'a']), pickle.dumps(os.system)\n"
        "forbid_unpickling()\nassert pickle.loads(plain) == [1, 'a']\n"
        "try:\n    pickle.loads(evil)\nexcept PickleRefusedError:\n    print('refused')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "refused\n"


def test_the_processes_that_read_what_clients_send_refuse_to_unpickle(server: Server) -> None:
    probe = server.folder.parent / "probe"
    (probe / "go").touch()
    pids = [server.process.pid, server.children()["detokenizer"].pid]
    until(lambda: all((probe / str(pid)).exists() for pid in pids))
    assert {(probe / str(pid)).read_text() for pid in pids} == {"PickleRefusedError"}


def test_one_module_renders_templates_and_none_evaluates_text() -> None:
    renders, evaluates = [], []
    for folder in ("lang", "srt", "managers", "model_executor", "layers", "mem_cache"):
        for path in (ROOT / folder).rglob("*.py"):
            tree = ast.parse(path.read_text())
            calls = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
            named = calls & {"eval", "exec", "torch.load", "yaml.load", "jinja2.Template", "jinja2.Environment"}
            evaluates += [f"{path}: {named}"] if named else []
            froms = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and "jinja2" in (node.module or "")]
            names = {alias.name for node in froms for alias in node.names if alias.name.endswith(("Environment", "Template"))}
            renders += [(path.name, names)] if names else []
    assert renders == [("chat_template.py", {"ImmutableSandboxedEnvironment"})]
    assert evaluates == []


def test_every_test_that_the_manual_names_exists() -> None:
    text = (ROOT / "THREATS.md").read_text()
    named = set(re.findall(r"(tests/[\w/]+\.py)::(test_\w+)", text + (ROOT / "docs" / "operations.md").read_text()))
    assert len(named) > 30
    missing = [f"{path}::{name}" for path, name in named if f"def {name}(" not in (ROOT / path).read_text()]
    assert missing == []
    rows = [line for line in text.splitlines() if line.startswith(("| CVE", "| GHSA"))]
    assert all(re.search(r"::test_\w+ \|$", row) for row in rows)
