"""The parent's and the child's side of process handling, with real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from banyan.managers.errors import EngineDeadError, StartError
from banyan.managers.ipc import IpcNames
from banyan.managers.processes.process_group import ChildSpec, ProcessGroup

CHILDREN = Path(__file__).parent / "children"
DEADLINE = 30.0


class Config(msgspec.Struct, frozen=True, kw_only=True):
    ipc: IpcNames
    do: str
    log_level: str = "error"


@pytest.fixture
def ipc() -> Iterator[IpcNames]:
    names = IpcNames.create()
    yield names
    names.remove()


@pytest.fixture
def group() -> Iterator[ProcessGroup]:
    threads, fds = threading.active_count(), num_fds()
    group = ProcessGroup()
    yield group
    group.stop(0)
    assert group.pids() == []
    for child in group.children:
        assert gone(child.pid), "not reaped"
    assert threading.active_count() == threads
    assert num_fds() == fds


def num_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def gone(pid: int) -> bool:
    """True if there is no such process, not even a zombie of ours."""
    with suppress(ProcessLookupError):
        os.kill(pid, 0)
        return False
    return True


def wait_for(condition: Any) -> bool:
    deadline = time.monotonic() + DEADLINE
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def spec(ipc: IpcNames, do: str = "serve", name: str = "scheduler", more: tuple[str, ...] = ()) -> ChildSpec:
    return ChildSpec(name=name, config=Config(ipc=ipc, do=do), command=[sys.executable, str(CHILDREN / "child.py"), *more])


def test_ready_payloads_and_environment(group: ProcessGroup, ipc: IpcNames) -> None:
    payloads = group.start([spec(ipc), spec(ipc, name="detokenizer")], DEADLINE)
    assert sorted(payload["pid"] for payload in payloads.values()) == sorted(group.pids())
    assert payloads["scheduler"]["thp"] == "1"
    assert payloads["detokenizer"]["omp"] == "1"


@pytest.mark.parametrize(
    ("do", "message", "detail"),
    [
        ("start_error", "the scheduler failed to start: no such model: /nowhere", "StartError"),
        ("crash_early", "the scheduler failed to start: KeyError: 'weights'", "KeyError"),
        ("segfault_early", "the scheduler failed to start: killed by SIGSEGV", ""),
    ],
)
def test_a_failed_start_tells_why_and_stops_the_others(
    group: ProcessGroup, ipc: IpcNames, do: str, message: str, detail: str
) -> None:
    with pytest.raises(StartError) as caught:
        group.start([spec(ipc, name="detokenizer"), spec(ipc, do)], DEADLINE)
    assert str(caught.value) == message
    assert detail in caught.value.detail
    assert len(group.children) == 2
    assert group.pids() == []


def test_an_import_error_in_the_child_is_reported(group: ProcessGroup, ipc: IpcNames) -> None:
    with pytest.raises(StartError, match="no_such_module"):
        group.start([spec(ipc, more=("import_error",))], DEADLINE)


def test_a_bad_config_is_reported(group: ProcessGroup, ipc: IpcNames) -> None:
    child = ChildSpec(name="scheduler", config={"ipc": 5}, command=[sys.executable, str(CHILDREN / "child.py")])
    with pytest.raises(StartError, match="ValidationError"):
        group.start([child], DEADLINE)


def test_the_real_entry_point_reports_a_bad_config(group: ProcessGroup) -> None:
    with pytest.raises(StartError, match="the detokenizer failed to start: ValidationError"):
        group.start([ChildSpec(name="detokenizer", config={"tokenizer_path": 1})], DEADLINE)


def test_a_command_that_cannot_be_run(group: ProcessGroup, ipc: IpcNames) -> None:
    with pytest.raises(StartError, match="cannot start the scheduler process"):
        group.start([ChildSpec(name="scheduler", config=Config(ipc=ipc, do=""), command=["/no/such/program"])], DEADLINE)


def test_not_ready_in_time(group: ProcessGroup, ipc: IpcNames) -> None:
    with pytest.raises(StartError, match="the scheduler did not get ready within 1 s"):
        group.start([spec(ipc, "never_ready")], 1)


@pytest.mark.parametrize(
    ("do", "message", "detail"),
    [
        ("crash_late", "the scheduler process died: ValueError: lost my way", "in fail"),
        ("leave", "the scheduler process died: exited with status 0", ""),
        ("kill_with_heir", "the scheduler process died: killed by SIGKILL (out of memory?)", ""),
    ],
)
def test_a_death_is_told_once(group: ProcessGroup, ipc: IpcNames, do: str, message: str, detail: str) -> None:
    group.start([spec(ipc, name="detokenizer"), spec(ipc, do)], DEADLINE)
    errors: list[EngineDeadError] = []
    group.watch(errors.append)
    Path(ipc.directory, "go").touch()
    assert wait_for(lambda: errors)
    group.stop(0)
    assert [str(error) for error in errors] == [message]
    assert detail in errors[0].detail


def test_a_kill_is_noticed_within_two_seconds(group: ProcessGroup, ipc: IpcNames) -> None:
    group.start([spec(ipc)], DEADLINE)
    died = threading.Event()
    group.watch(lambda error: died.set())
    os.kill(group.pids()[0], signal.SIGKILL)
    assert died.wait(2)


def test_stopping_is_no_death_and_idempotent(group: ProcessGroup, ipc: IpcNames) -> None:
    group.start([spec(ipc, "stubborn")], DEADLINE)
    errors: list[EngineDeadError] = []
    group.watch(errors.append)
    group.stop(0)
    group.stop(0)
    assert group.pids() == []
    assert errors == []


def test_the_callback_may_stop_the_group(group: ProcessGroup, ipc: IpcNames) -> None:
    group.start([spec(ipc), spec(ipc, "crash_late", name="detokenizer")], DEADLINE)
    stopped = threading.Event()

    def stop(error: EngineDeadError) -> None:
        group.stop(0)
        stopped.set()

    group.watch(stop)
    Path(ipc.directory, "go").touch()
    assert stopped.wait(DEADLINE)
    assert group.pids() == []


def test_only_own_children_are_stopped(group: ProcessGroup, ipc: IpcNames) -> None:
    with subprocess.Popen(["sleep", "60"]) as other:
        group.start([spec(ipc)], DEADLINE)
        group.stop(0)
        assert other.poll() is None
        other.kill()


def test_sigint_is_ignored_by_children(group: ProcessGroup, ipc: IpcNames) -> None:
    group.start([spec(ipc)], DEADLINE)
    (pid,) = group.pids()
    os.kill(pid, signal.SIGINT)
    status = Path(f"/proc/{pid}/status").read_text()
    ignored = int(next(line for line in status.splitlines() if line.startswith("SigIgn")).split()[1], 16)
    assert ignored >> (signal.SIGINT - 1) & 1
    assert group.pids() == [pid]


@pytest.mark.parametrize("how", ["plain", "fork"])
def test_no_orphan_when_the_parent_is_killed(how: str) -> None:
    with subprocess.Popen([sys.executable, str(CHILDREN / "parent.py"), how], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        survivor, directory, *pids = parent.stdout.readline().split()
        assert len(pids) == 2
        assert os.path.isdir(directory)
        parent.kill()
        parent.wait()
        try:
            assert wait_for(lambda: all(gone(int(pid)) for pid in pids))
            assert not os.path.exists(directory)
        finally:
            if survivor != "0":
                os.kill(int(survivor), signal.SIGKILL)


def test_start_from_a_thread_that_ends(group: ProcessGroup, ipc: IpcNames) -> None:
    thread = threading.Thread(target=group.start, args=([spec(ipc)], DEADLINE))
    thread.start()
    thread.join()
    died = threading.Event()
    group.watch(lambda error: died.set())
    assert not died.wait(1.5)
    assert len(group.pids()) == 1
