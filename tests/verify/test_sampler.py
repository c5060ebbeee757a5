"""The thread that reads memory: it keeps reading, touches nothing new, triggers at once, does not die silently."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from scripts.verify.decide import GIB, Action, Decision, Limits, Sample
from scripts.verify.errors import MemguardError
from scripts.verify.host import Host
from scripts.verify.sampler import SLOWEST_PROMISED_S, Sampler
from tests.conftest import ROOT, run_python
from tests.verify.engine_programs import until

MIB = 2**20


def write_meminfo(path: Path, available_bytes: int) -> None:
    text = f"MemFree: {1 * GIB // 1024:>12} kB\nMemAvailable: {available_bytes // 1024:>12} kB\nSwapFree: 0 kB\n"
    with path.open("r+" if path.exists() else "w") as file:
        file.write(text)


@pytest.fixture
def meminfo(tmp_path: Path) -> Path:
    path = tmp_path / "meminfo"
    write_meminfo(path, 8 * GIB)
    return path


@pytest.fixture
def trips() -> list[tuple[Decision, Sample]]:
    return []


@pytest.fixture
def sampler(meminfo: Path, trips: list[tuple[Decision, Sample]]) -> Iterator[Sampler]:
    sampler = Sampler(Host(meminfo.parent, meminfo), lambda d, s: trips.append((d, s)), 0.01)
    sampler.start()
    yield sampler
    sampler.end()


def wait_for(condition: Callable[[], object]) -> None:
    assert until(condition)


def read_on(sampler: Sampler, times: int = 5) -> None:
    """Wait until the sampler has read so often again."""
    wanted = len(sampler.samples) + times
    wait_for(lambda: len(sampler.samples) >= wanted)


def test_it_reads_what_psutil_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What this kernel says, at one moment, against an independent reader of it."""
    for name in ("meminfo", "vmstat"):
        (tmp_path / name).write_bytes(Path("/proc", name).read_bytes())
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(tmp_path))
    reading = Host(tmp_path).read()
    assert reading.available_bytes == psutil.virtual_memory().available
    assert reading.free_bytes == psutil.virtual_memory().free
    # psutil counts pages of 4 KiB.
    assert reading.swap_in_pages == psutil.swap_memory().sin // 4096
    assert Host().read().available_bytes > 0


def test_what_this_kernel_does_not_tell_is_unknown(meminfo: Path) -> None:
    """Only MemAvailable has to be there; pressure that is not told is not 0."""
    assert Host(meminfo.parent, meminfo.parent / "none").read() == (8 * GIB, GIB, 0, None, 0)


def test_pressure_swap_and_the_kernels_words_are_read(meminfo: Path) -> None:
    """Each from its file: pages swapped in, the pressure of 10 s, kills and out-of-memory lines since it was opened."""
    folder = meminfo.parent
    (folder / "vmstat").write_text("nr_free_pages 1\npswpin 300\npswpout 9\noom_kill 2\n")
    (folder / "pressure").mkdir()
    (folder / "pressure" / "memory").write_text(
        "some avg10=9.00 avg60=0.00 avg300=0.00 total=1\nfull avg10=2.50 avg60=0.00 avg300=0.00 total=1\n"
    )
    kmsg = folder / "kmsg"
    kmsg.write_text("4,1,1,-;Out of memory: Killed process 7\n")
    host = Host(folder, kmsg)
    assert host.read() == (8 * GIB, GIB, 300, 2.5, 2)
    with kmsg.open("a") as file:
        file.write("4,2,2,-;NVRM: ... NV_ERR_NO_MEMORY (0x51)\n")
    assert host.read().kernel_oom == 3
    host.close()


def test_it_keeps_reading_while_the_program_is_busy(sampler: Sampler) -> None:
    """A main thread that computes without a pause does not slow it below four readings a second.

    By the time that the main thread has computed, which it does not where others have the CPU.
    """
    longest_s, seen, since_s = 0.0, len(sampler.samples), time.thread_time()
    until_s = since_s + 0.6
    while (now_s := time.thread_time()) < until_s:
        sum(range(2_000))
        if len(sampler.samples) > seen:
            seen, since_s = len(sampler.samples), now_s
        longest_s = max(longest_s, now_s - since_s)
    assert seen > 0.6 / (SLOWEST_PROMISED_S / 4)
    assert longest_s < SLOWEST_PROMISED_S


def test_it_triggers_at_once_and_once(sampler: Sampler, meminfo: Path, trips: list[tuple[Decision, Sample]]) -> None:
    """Below the guard the trigger is pulled at the first reading, in the sampler's thread, and never again."""
    sampler.arm(Limits.at(2 * GIB))
    read_on(sampler)
    assert not trips
    write_meminfo(meminfo, 1 * GIB)
    wait_for(lambda: trips)
    decision, sample = trips[0]
    assert decision.action is Action.ABORT
    assert sample.available_bytes == 1 * GIB
    assert sample == next(sample for sample in sampler.samples if sample.available_bytes < 2 * GIB)
    read_on(sampler)
    assert len(trips) == 1


def test_it_decides_nothing_before_it_is_armed(
    sampler: Sampler, meminfo: Path, trips: list[tuple[Decision, Sample]]
) -> None:
    """The baseline is read without a guard."""
    write_meminfo(meminfo, 1)
    wait_for(lambda: sampler.samples and sampler.samples[-1].available_bytes == 0)
    read_on(sampler)
    assert not trips


def test_a_failure_is_not_silent(sampler: Sampler, meminfo: Path) -> None:
    """When memory can no longer be read, the next check raises: no ramp goes on unguarded."""
    sampler.check()
    meminfo.write_text("")
    wait_for(lambda: not sampler.is_alive())
    with pytest.raises(MemguardError, match="the memory sampler failed"):
        sampler.check()


def test_it_says_where_memory_cannot_be_read(tmp_path: Path) -> None:
    """No /proc/meminfo (another system) and one without MemAvailable (an ancient kernel) are errors with the reason."""
    with pytest.raises(MemguardError, match="needs Linux"):
        Host(tmp_path / "none")
    (tmp_path / "meminfo").write_text("MemFree: 1 kB\nSwapFree: 0 kB\n")
    with pytest.raises(MemguardError, match="no MemAvailable"):
        Host(tmp_path)


def test_a_worse_decision_is_told_and_a_milder_one_is_not(
    sampler: Sampler, meminfo: Path, trips: list[tuple[Decision, Sample]]
) -> None:
    """Abort, then escalate, each once; after it was armed anew, again."""
    limits = Limits(2 * GIB, 3 * GIB, escalate_s=0.05)
    write_meminfo(meminfo, 1 * GIB)
    sampler.arm(limits)
    wait_for(lambda: len(trips) >= 2)
    read_on(sampler)
    assert [decision.action for decision, _ in trips] == [Action.ABORT, Action.ESCALATE]
    write_meminfo(meminfo, 8 * GIB)
    read_on(sampler)
    sampler.arm(limits)
    read_on(sampler)
    assert len(trips) == 2
    write_meminfo(meminfo, 1 * GIB)
    wait_for(lambda: len(trips) >= 3)
    assert trips[2][0].action is Action.ABORT


def test_phase_and_requests_are_in_the_samples(sampler: Sampler) -> None:
    """What the main thread knows goes into the record, so that a replay decides alike."""
    sampler.phase, sampler.running = "load", 3
    wait_for(lambda: sampler.samples and sampler.samples[-1].running == 3)
    assert sampler.samples[-1].phase == "load"


def test_a_watch_without_end_keeps_the_newest_readings(meminfo: Path) -> None:
    """Memory of the watch itself stays bounded."""
    sampler = Sampler(Host(meminfo.parent, meminfo), lambda *_: None, 0.001, keep=10)
    sampler.start()
    wait_for(lambda: sampler.samples)
    oldest = sampler.samples[0]
    wait_for(lambda: oldest not in sampler.samples)
    sampler.end()
    assert 10 <= len(sampler.samples) <= 20
    assert oldest.t_s < sampler.samples[0].t_s


def test_its_memory_stays_in_place_where_that_is_permitted() -> None:
    """What it says of being locked is what the kernel says, also of memory that comes later; drawing is not locked."""
    done = run_python(
        """
import re
from scripts.verify import sampler
def locked_kib():
    return int(re.search(r"VmLck:\\s+(\\d+)", open("/proc/self/status").read())[1])
said = sampler.hold_ground()
first = locked_kib()
more = bytearray(64 * 2**20)
grown = locked_kib() - first
sampler.let_go()
print(said, first > 1000, grown > 60_000, locked_kib())
""",
        path=(ROOT, ROOT / "adapter"),
    )
    assert done.returncode == 0, done.stderr
    said, locked, future, after = done.stdout.split()
    assert (said, after) == (locked, "0")
    if os.geteuid() == 0:
        assert future == "True"


def test_nothing_is_opened_imported_or_forked_once_it_runs() -> None:
    """The host may be about to freeze: from its start to the trigger the thread uses what it already has."""
    done = run_python(
        """
import os, sys, threading, time
from scripts.verify.decide import Limits
from scripts.verify.guard import Guard
from scripts.verify.host import Host
from scripts.verify.own_memory import OwnMemory
from scripts.verify.sampler import Sampler
touched = []
def audit(event, arguments):
    if threading.current_thread().name.startswith("memguard") and event.split(".")[0] in (
        "open", "import", "os", "subprocess", "socket", "ctypes", "exec", "compile", "fcntl", "signal"
    ):
        touched.append((event, arguments))
posted = threading.Event()
guard = Guard(lambda rid: posted.set(), now_s=time.time, in_danger=lambda: True)
sampler = Sampler(Host(), guard.act, 0.01)
sampler.own = OwnMemory(os.getpid())
sys.addaudithook(audit)
guard.start()
guard.watch("probe")
sampler.start()
while len(sampler.samples) <= 5: time.sleep(0.01)
sampler.arm(Limits.at(2**60))
assert posted.wait(60)
sampler.end()
print(touched)
""",
        path=(ROOT, ROOT / "adapter"),
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
