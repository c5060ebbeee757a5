"""The thread that reads memory: it keeps reading, touches nothing new, triggers at once, does not die silently."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from scripts.verify.decide import GIB, Action, Decision, Limits, Sample
from scripts.verify.errors import MemguardError
from scripts.verify.guard import Guard
from scripts.verify.sampler import SLOWEST_PROMISED_S, Meminfo, Sampler
from tests.conftest import ROOT, run_python

MIB = 2**20
TOLERANCE_BUSY_MACHINE = 3  # tests run beside other programs
TOLERANCE_MEMORY = 512 * MIB  # other programs come and go between two readings


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
def trips() -> list[tuple[Decision, Sample, float]]:
    return []


@pytest.fixture
def sampler(meminfo: Path, trips: list[tuple[Decision, Sample, float]]) -> Iterator[Sampler]:
    sampler = Sampler(Meminfo(meminfo), lambda d, s: trips.append((d, s, time.monotonic())), 0.01)
    sampler.start()
    yield sampler
    sampler.end()


def wait_for(condition: object, at_most_s: float = 2.0) -> None:
    deadline_s = time.monotonic() + at_most_s
    while not condition() and time.monotonic() < deadline_s:  # type: ignore[operator]
        time.sleep(0.002)


def test_it_reads_what_psutil_reads() -> None:
    """The real /proc/meminfo, against an independent reader of it."""
    available, free, swap_free = Meminfo().read()
    assert available == pytest.approx(psutil.virtual_memory().available, abs=TOLERANCE_MEMORY)
    assert free == pytest.approx(psutil.virtual_memory().free, abs=TOLERANCE_MEMORY)
    assert swap_free == pytest.approx(psutil.swap_memory().free, abs=TOLERANCE_MEMORY)


def test_it_keeps_reading_while_the_program_is_busy(sampler: Sampler) -> None:
    """A main thread that computes without a pause does not slow it below four readings a second."""
    until_s = time.monotonic() + 0.6
    while time.monotonic() < until_s:
        sum(range(2_000))
    sampler.end()
    gaps = [later.t_s - earlier.t_s for earlier, later in itertools.pairwise(sampler.samples)]
    assert sum(gaps) / len(gaps) < SLOWEST_PROMISED_S / 4
    assert max(gaps) < SLOWEST_PROMISED_S * TOLERANCE_BUSY_MACHINE


def test_it_triggers_at_once_and_once(
    sampler: Sampler, meminfo: Path, trips: list[tuple[Decision, Sample, float]]
) -> None:
    """Below the guard the trigger is pulled within a few readings, in the sampler's thread, and never again."""
    sampler.arm(Limits.at(2 * GIB))
    time.sleep(0.05)
    assert not trips
    write_meminfo(meminfo, 1 * GIB)
    below_s = time.monotonic()
    wait_for(lambda: trips)
    decision, sample, tripped_s = trips[0]
    assert decision.action is Action.ABORT
    assert sample.available_bytes == 1 * GIB
    assert tripped_s - below_s < SLOWEST_PROMISED_S * TOLERANCE_BUSY_MACHINE
    time.sleep(0.05)
    assert len(trips) == 1


def test_it_decides_nothing_before_it_is_armed(
    sampler: Sampler, meminfo: Path, trips: list[tuple[Decision, Sample, float]]
) -> None:
    """The baseline is read without a guard."""
    write_meminfo(meminfo, 1)
    time.sleep(0.05)
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
        Meminfo(tmp_path / "none")
    (tmp_path / "old").write_text("MemFree: 1 kB\nSwapFree: 0 kB\n")
    with pytest.raises(MemguardError, match="no MemAvailable"):
        Meminfo(tmp_path / "old")


def test_nothing_is_opened_imported_or_forked_once_it_runs(meminfo: Path) -> None:
    """The host may be about to freeze: from its start to the trigger the thread uses what it already has."""
    done = run_python(
        f"""
import sys, threading, time
from pathlib import Path
from scripts.verify.decide import Limits
from scripts.verify.guard import Guard
from scripts.verify.sampler import Meminfo, Sampler
touched = []
def audit(event, arguments):
    if threading.current_thread().name.startswith("memguard") and event.split(".")[0] in (
        "open", "import", "os", "subprocess", "socket", "ctypes", "exec", "compile"
    ):
        touched.append((event, arguments))
posted = threading.Event()
guard = Guard(lambda rid: posted.set())
sampler = Sampler(Meminfo(Path({str(meminfo)!r})), guard.trip, 0.01)
sys.addaudithook(audit)
guard.start()
guard.watch("probe")
sampler.start()
time.sleep(0.1)
sampler.arm(Limits.at(9 * 2**30))
assert posted.wait(2)
sampler.end()
assert len(sampler.samples) > 5
print(touched)
""",
        path=(ROOT,),
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def a_trip() -> tuple[Decision, Sample]:
    return Decision(Action.ABORT, "why"), Sample(1.0, GIB, GIB, 0)


def test_an_abort_that_came_too_early_is_sent_again() -> None:
    """The engine ignores the abort of a request it does not know yet: it is repeated until the request is over."""
    posted: list[str] = []
    guard = Guard(posted.append, repeat_s=0.01)
    guard.start()
    guard.watch("probe")
    guard.trip(*a_trip())
    wait_for(lambda: len(posted) >= 3)
    guard.release()
    time.sleep(0.03)
    count = len(posted)
    time.sleep(0.05)
    assert count >= 3
    assert len(posted) == count
    assert set(posted) == {"probe"}


def test_an_abort_that_fails_is_sent_again() -> None:
    """A server that does not answer in time is asked again; the last reason is kept for the report."""
    answers = iter([MemguardError("busy"), None, None, None])
    tried = threading.Semaphore(0)

    def post(rid: str) -> None:
        tried.release()
        answer = next(answers, None)
        if answer is not None:
            raise answer

    guard = Guard(post, repeat_s=0.01)
    guard.start()
    guard.watch("probe")
    guard.trip(*a_trip())
    assert tried.acquire(timeout=2)
    assert tried.acquire(timeout=2)
    guard.end()


def test_a_trip_between_two_prompts_aborts_nothing() -> None:
    """Without a request there is nothing to abort; the trip still ends the ramp."""
    posted: list[str] = []
    guard = Guard(posted.append)
    guard.start()
    guard.trip(*a_trip())
    time.sleep(0.05)
    assert guard.tripped
    assert guard.trip_seen is not None
    assert guard.trip_seen.rid is None
    assert not posted
