"""`--launch`: the guard is armed before the engine starts, stays quiet on a healthy start, and ends a sick one."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.verify import launch
from scripts.verify.errors import MemguardError
from tests.verify.engine_programs import AT_MOST_S, World, alive, until

pytestmark = pytest.mark.slow

HEALTHY = [[0, 7.5], [0, 5.0], [0, 6.0]]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    world.close()


def phases(world: World) -> list[str]:
    lines = (world.report / "samples.jsonl").read_text().splitlines()
    return list(dict.fromkeys(json.loads(line)["phase"] for line in lines))


def engine_pid(world: World) -> int:
    """Of the engine that memguard has launched, from its log."""
    log = next(world.folder.glob("logs/*/server.log"))
    assert until(lambda: "fake engine" in log.read_text())
    return int(log.read_text().split()[2])


def test_a_healthy_start_and_a_ramp(world: World) -> None:
    """The engine starts, serves and is ended; every phase is in the readings, and its log and facts in the report."""
    process = world.memguard(
        *("--sizes", "1k,4k", "--guard-gib", "2", "--launch", "--", *world.command), start=HEALTHY, budget=4_000_000
    )
    assert process.wait(timeout=AT_MOST_S) == 0, world.shown
    assert phases(world) == ["idle", "start", "load", "idle", "ramp"] or phases(world) == [
        *("idle", "start", "load", "ramp"),
    ]
    report = (world.report / "REPORT.md").read_text()
    assert "dynchunk: all sizes passed" in report
    assert "SGLang 0.5.23" in report
    assert f"could reach the engine (process {engine_pid(world)}, started by memguard)" in report
    assert not alive(engine_pid(world))
    assert "4 of 1,000" in report
    samples = [json.loads(line) for line in (world.report / "samples.jsonl").read_text().splitlines()]
    assert min(s["mem_available_bytes"] for s in samples if s["phase"] == "load") < 5.1 * 2**30


def test_a_rehearsal_judges_the_engine_that_it_has_started(world: World) -> None:
    """By its processes from the first prompt on, by the host's memory while it starts."""
    options = ("--sizes", "1k,4k", "--headroom-gib", "1.4", "--own-memory", "--launch", "--", *world.command)
    fake = {"start": HEALTHY, "budget": 2_000_000, "pid": True, "neighbour": [0, 2]}
    assert world.memguard(*options, **fake).wait(timeout=AT_MOST_S) == 0, world.shown
    samples = [json.loads(line) for line in (world.report / "samples.jsonl").read_text().splitlines()]
    assert "host_mem_available_bytes" not in next(s for s in samples if s["phase"] == "start")
    assert all("host_mem_available_bytes" in s for s in samples if s["phase"] == "ramp")
    assert "judged by what the engine's own processes take" in (world.report / "REPORT.md").read_text()


def test_a_start_that_takes_all_memory_is_ended(world: World) -> None:
    """There is no request to abort: the engine gets SIGTERM at once, memory recovers, exit code 2 and a report."""
    process = world.memguard(
        *("--guard-gib", "2", "--launch", "--", *world.command), start=[[0, 7.0], [0, 4.0], [600, 1.0]]
    )
    assert process.wait(timeout=AT_MOST_S) == 2, world.shown
    report = (world.report / "REPORT.md").read_text()
    assert "It tripped while the engine started: MemAvailable 1.00 GiB is below the guard of 2.00 GiB" in report
    assert "there is no request to abort" in report
    assert "SIGTERM was sent to the engine (process" in report
    assert "SIGKILL" not in report
    assert "Memory recovered" in report


def test_the_start_has_a_guard_of_its_own(world: World) -> None:
    """What would be an abort while it serves may be healthy while it starts."""
    process = world.memguard(
        *("--sizes", "1k", "--guard-gib", "4", "--start-guard-gib", "1", "--launch", "--", *world.command),
        start=[[0, 7.0], [0, 2.0], [0, 7.0]],
    )
    assert process.wait(timeout=AT_MOST_S) == 0, world.shown


def test_signals_can_be_off(world: World) -> None:
    """Then the guard says what it would have done; the engine that memguard has started ends with it all the same."""
    process = world.memguard(
        *("--no-signals", "--guard-gib", "2", "--launch", "--", *world.command),
        start=[[0, 7.0], [600, 1.0]],
        pace={"recovery_s": 0.4},
    )
    assert process.wait(timeout=AT_MOST_S) == 2, world.shown
    report = (world.report / "REPORT.md").read_text()
    assert "nothing is signalled: signals are off (--no-signals)" in report
    assert "was sent" not in report


def test_an_engine_that_ends_while_it_starts(world: World) -> None:
    """Its exit code and where its log is; exit code 1."""
    process = world.memguard("--launch", "--", *world.command, start=[[0, 7.0]], exit_code=7)
    assert process.wait(timeout=AT_MOST_S) == 1
    assert "the engine ended with exit code 7 before it served; its log: " in world.shown
    assert (world.report / "server.log").exists()


def test_ctrl_c_ends_the_engine_too(world: World) -> None:
    """In the middle of a prompt: the request is aborted, the report written, no process left."""
    arguments = ("--sizes", "1k,100k", "--guard-gib", "2", "--launch", "--", *world.command)
    process = world.memguard(*arguments, bytes_per_pair=1, stalls_at_tokens=5_000)
    trace = world.folder / "trace.jsonl"
    assert until(lambda: trace.exists() and "memguard-100000-" in trace.read_text()), world.shown
    pid = engine_pid(world)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=AT_MOST_S) == 130, world.shown
    assert not alive(pid)
    assert "interrupted" in (world.report / "REPORT.md").read_text()


def test_ctrl_c_while_the_engine_starts(world: World) -> None:
    """Before there is a server: the engine is ended all the same."""
    process = world.memguard("--launch", "--", *world.command, start=[[0, 7.0], [600, 6.0]], deaf=False)
    assert world.says("the engine starts")
    assert until(lambda: list(world.folder.glob("logs/*/server.log")))
    children = f"/proc/{process.pid}/task/{process.pid}/children"
    assert until(lambda: Path(children).read_text().split())
    (child,) = map(int, Path(children).read_text().split())
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=AT_MOST_S) == 130, world.shown
    assert not alive(child)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--launch",), "--launch takes the engine's command behind it"),
        (("serve",), "--launch takes the engine's command behind it"),
        (("--launch", "--", "/nowhere/engine"), "cannot start /nowhere/engine: No such file or directory"),
        (("--attach", "--replay", "x"), "--replay and --attach: give one of them"),
        (("--attach", "--headroom-gib", "1"), "--headroom-gib is for a ramp"),
    ],
)
def test_what_does_not_go_together(world: World, arguments: tuple[str, ...], said: str) -> None:
    """One sentence, exit code 1."""
    process = world.memguard(*arguments)
    assert process.wait(timeout=AT_MOST_S) == 1
    assert said in world.shown
    assert "Traceback" not in world.shown


def test_the_engine_runs_at_its_own_priority(tmp_path: Path) -> None:
    """Its place in the queue for the CPUs is not handed on."""
    niceness = min(19, os.getpriority(os.PRIO_PROCESS, 0) + 11)  # nobody but root may take less than ours
    with launch.launched(["sleep", "600"], tmp_path / "log", niceness) as process:
        assert os.getpriority(os.PRIO_PROCESS, process.pid) == niceness
        assert launch.phase(process) == "start"
    assert process.returncode == -signal.SIGTERM


def test_waiting_for_the_engine_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that never serves is given up."""
    monkeypatch.setattr(launch, "LOOK_S", 0.01)
    with launch.launched(["sleep", "600"], None, 0) as process, pytest.raises(MemguardError, match=r"within 0\.1 s"):
        launch.wait_until_serving(
            process,
            lambda _: False,
            tripped=lambda: False,
            tick=lambda _: None,
            at_most_s=0.1,
            log=None,
        )
    assert process.returncode == -signal.SIGTERM


def test_an_abort_that_is_not_heard_ends_the_engine(world: World) -> None:
    """In a ramp: the request goes on, memory stays low, so the engine that serves there gets SIGTERM and ends."""
    engine = world.engine(hears_aborts=False, leaks=True, stalls_at_tokens=20_000)
    arguments = ("--sizes", "60k", "--guard-gib", "2", "--url", f"http://127.0.0.1:{world.port}")
    process = world.memguard(*arguments, pace={"escalate_s": 0.4})
    assert process.wait(timeout=AT_MOST_S) == 2, world.shown
    assert engine.wait(timeout=AT_MOST_S) == 0
    report = (world.report / "REPORT.md").read_text()
    assert "for 0.4 s, and no request ended" in report
    assert f"SIGTERM was sent to the engine (process {engine.pid})" in report
    assert "**The server's health check fails.**" in report
    assert "Memory recovered" in report
