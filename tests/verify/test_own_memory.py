"""What the engine's own processes take: of which processes, which pages, and when the host counts all the same."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from scripts.verify.decide import GIB, OWN_FIGURE, Action, Limits, Sample, decide
from scripts.verify.errors import MemguardError
from scripts.verify.own_memory import OwnMemory, judged_bytes

MIB = 2**20
ENGINE, SCHEDULER, WORKER, STRANGER = 100, 101, 102, 900


def write_process(proc: Path, pid: int, parent: int, name: str = "python", **kib: int) -> None:
    """A process as /proc shows it. kib: RssAnon and others; without them it has ended and is not yet reaped."""
    folder = proc / str(pid)
    folder.mkdir(exist_ok=True)
    (folder / "stat").write_text(f"{pid} ({name}) S {parent} {pid} 0\n")
    (folder / "status").write_text(
        "".join([f"Name:\t{name}\n", *(f"{field}:\t{value:>8} kB\n" for field, value in kib.items()), "Threads:\t1\n"])
    )


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    write_process(tmp_path, ENGINE, 1, RssAnon=1024, RssFile=4096, RssShmem=512, VmSwap=256)
    write_process(tmp_path, SCHEDULER, ENGINE, "sglang) (x", RssAnon=2048, RssFile=1, RssShmem=0, VmSwap=0)
    write_process(tmp_path, WORKER, SCHEDULER, RssAnon=1024)
    write_process(tmp_path, STRANGER, 1, RssAnon=999_999)
    (tmp_path / "meminfo").write_text("")
    return tmp_path


@pytest.fixture
def own(proc: Path) -> Iterator[OwnMemory]:
    with closing(OwnMemory(ENGINE, proc)) as own:
        assert own.judged_bytes(8 * GIB) == 8 * GIB  # nothing has been taken yet
        yield own


def taken_kib(own: OwnMemory, host_bytes: int = 8 * GIB) -> int:
    """What the engine has taken since the first reading."""
    return (8 * GIB - own.judged_bytes(host_bytes)) // 1024


def test_pages_of_its_own_are_counted_and_files_are_not(proc: Path, own: OwnMemory) -> None:
    """Anonymous, shared and swapped-out memory of a process count; files it maps are page cache."""
    write_process(proc, ENGINE, 1, RssAnon=1024 + 1, RssFile=9999, RssShmem=512 + 10, VmSwap=256 + 100)
    assert taken_kib(own) == 111


def test_children_and_theirs_are_counted_and_strangers_are_not(proc: Path, own: OwnMemory) -> None:
    """Whatever a process calls itself, who has started it decides."""
    write_process(proc, SCHEDULER, ENGINE, RssAnon=2048 + 1)
    write_process(proc, WORKER, SCHEDULER, RssAnon=1024 + 10)
    write_process(proc, STRANGER, 1, RssAnon=1)
    assert taken_kib(own) == 11


def test_what_others_take_and_give_back_is_not_judged(own: OwnMemory) -> None:
    """With the engine at rest the figure stays, however the host's MemAvailable moves."""
    assert [own.judged_bytes(host) for host in (7 * GIB, 12 * GIB, 3 * GIB)] == [8 * GIB] * 3


def test_a_child_that_ends_gives_its_memory_back(proc: Path, own: OwnMemory) -> None:
    """At once, not reaped yet or gone; a stranger that gets its number later is not the engine's."""
    write_process(proc, WORKER, SCHEDULER)
    assert taken_kib(own) == -1024
    own.follow()
    write_process(proc, WORKER, 1, RssAnon=4096)
    own.follow()
    assert taken_kib(own) == -1024


def test_a_child_that_starts_later_is_counted(proc: Path, own: OwnMemory) -> None:
    """From the next look for children on."""
    write_process(proc, 103, WORKER, RssAnon=10)
    assert taken_kib(own) == 0
    own.follow()
    assert taken_kib(own) == 10


def test_a_process_whose_parent_ends_stays_the_engines(proc: Path, own: OwnMemory) -> None:
    """It is somebody else's child then; what it holds it has all the same."""
    write_process(proc, SCHEDULER, ENGINE)
    write_process(proc, WORKER, 1, RssAnon=1024 + 5)
    own.follow()
    assert taken_kib(own) == 5 - 2048


def test_a_host_in_danger_is_judged_itself() -> None:
    """Below 1.5 GiB the smaller figure counts, whoever has taken the memory; above, the engine's alone."""
    assert judged_bytes(round(1.4 * GIB), 20 * GIB) == round(1.4 * GIB)
    assert judged_bytes(round(1.4 * GIB), 1 * GIB) == 1 * GIB
    assert judged_bytes(round(1.5 * GIB), 20 * GIB) == 20 * GIB
    assert judged_bytes(2 * GIB, 1 * GIB) == 1 * GIB


def test_what_was_judged_is_said() -> None:
    """A verdict on the engine alone does not pass for one on the host, nor the other way round."""
    limits = Limits.at(6 * GIB)
    alone = decide([Sample(1.0, 5 * GIB, 0, host_available_bytes=7 * GIB)], limits)
    assert alone == (Action.ABORT, f"{OWN_FIGURE} 5.00 GiB is below the guard of 6.00 GiB")
    host = decide([Sample(1.0, 1 * GIB, 0, host_available_bytes=1 * GIB)], limits)
    assert host.reason == "MemAvailable 1.00 GiB is below the guard of 6.00 GiB"


@pytest.mark.parametrize("pid", [77, WORKER])
def test_a_process_that_does_not_tell_is_refused(proc: Path, pid: int) -> None:
    """One that is gone, and a kernel without RssAnon, with the way out."""
    write_process(proc, WORKER, SCHEDULER, VmRSS=1)
    with pytest.raises(MemguardError, match=f"does not tell what process {pid} holds.*leave --own-memory out"):
        OwnMemory(pid, proc)


@pytest.mark.slow
def test_real_processes_are_counted() -> None:
    """On this kernel: what a grandchild takes is seen to the page, and is back when it ends."""
    code = (
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', sys.argv[1]])\n"
        "child.wait(); print('ended', flush=True); sys.stdin.readline()\n"
    )
    grandchild = (
        "import sys\nprint('ready', flush=True); sys.stdin.readline()\n"
        f"taken = b'1' * {256 * MIB}\nprint('taken', flush=True); sys.stdin.readline()\n"
    )
    engine = subprocess.Popen(
        [sys.executable, "-c", code, grandchild], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )
    assert engine.stdin is not None
    assert engine.stdout is not None
    try:
        assert engine.stdout.readline() == "ready\n"
        with closing(OwnMemory(engine.pid)) as own:
            own.judged_bytes(8 * GIB)
            engine.stdin.write("\n")
            assert engine.stdout.readline() == "taken\n"
            assert taken_kib(own) / 1024 == pytest.approx(256, abs=8)
            engine.stdin.write("\n")
            assert engine.stdout.readline() == "ended\n"
            assert taken_kib(own) <= 0
    finally:
        engine.kill()
        engine.communicate()
