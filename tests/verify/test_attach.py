"""`--attach`: a watch beside an engine that others use."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.verify.engine_programs import AT_MOST_S, World, until
from tests.verify.test_replay import replay

pytestmark = pytest.mark.slow


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    world.close()


def ask(world: World, rid: str, tokens: int) -> dict[str, Any]:
    """What a user does -> how the request ended."""
    answer = httpx.post(
        f"http://127.0.0.1:{world.port}/generate", json={"rid": rid, "input_ids": [7] * tokens}, timeout=AT_MOST_S
    )
    return dict(answer.json()["meta_info"]["finish_reason"])


def test_it_is_quiet_beside_a_healthy_engine(world: World) -> None:
    """Requests that fit go through; told to end it ends with 0, and leaves no file behind."""
    engine = world.engine()
    watch = world.memguard("--attach", "--guard-gib", "2")
    assert world.says(f"signals to the engine: could reach the engine (process {engine.pid})")
    assert ask(world, "small", 4_000)["type"] == "length"
    watch.send_signal(signal.SIGTERM)
    assert watch.wait(timeout=AT_MOST_S) == 0, world.shown
    assert "ended; the guard has tripped 0 times" in world.shown
    assert engine.poll() is None
    assert not (world.folder / "logs").exists()


def test_it_aborts_what_runs_and_goes_on(world: World) -> None:
    """A prompt that takes too much is aborted, twice; memory recovers each time, the engine serves on. Exit code 2, and
    the readings of each abort can be replayed.
    """
    engine = world.engine()
    watch = world.memguard("--attach", "--guard-gib", "2")
    assert world.says("could reach the engine")
    for number in (1, 2):
        assert ask(world, f"large-{number}", 30_000)["type"] == "abort"
        assert world.says("recovered: MemAvailable 8.00 GiB", number), world.shown
        assert world.says("readings are in", number), world.shown
    assert ask(world, "small", 1_000)["type"] == "length"
    watch.send_signal(signal.SIGINT)
    assert watch.wait(timeout=AT_MOST_S) == 2, world.shown
    assert "the guard has tripped 2 times" in world.shown
    assert "the server is asked to abort all requests" in world.shown
    assert engine.poll() is None
    kept = sorted(world.folder.glob("logs/watch-*/abort-*.jsonl"))
    assert kept
    assert replay(kept[0], "--guard-gib", "2").returncode == 2


def test_memory_that_does_not_come_back_is_said(world: World) -> None:
    """The cache is emptied, 'not recovered' is said, and the watch goes on without aborting all day."""
    world.engine(leaks=True)
    pace = {"abort_wait_s": 3.0, "recovery_s": 0.4}
    watch = world.memguard("--attach", "--guard-gib", "2", "--no-signals", pace=pace)
    assert world.says("signals are off")
    assert ask(world, "large", 30_000)["type"] == "abort"
    assert world.says("emptying the server's cache"), world.shown
    assert world.says("not recovered: MemAvailable"), world.shown
    assert watch.poll() is None
    watch.send_signal(signal.SIGTERM)
    assert watch.wait(timeout=AT_MOST_S) == 2
    assert "the guard has tripped 1 times" in world.shown


def test_an_engine_that_does_not_hear_is_ended_and_the_next_one_watched(world: World) -> None:
    """SIGTERM where aborts do nothing; the engine that is started after it is found and held."""
    deaf = world.engine(hears_aborts=False, leaks=True, stalls_at_tokens=20_000)
    watch = world.memguard("--attach", "--guard-gib", "2", pace={"escalate_s": 0.4})
    assert world.says(f"could reach the engine (process {deaf.pid})")
    broken: list[Exception] = []

    def ask_for_too_much() -> None:
        try:
            ask(world, "large", 60_000)
        except httpx.HTTPError as error:
            broken.append(error)

    asking = threading.Thread(target=ask_for_too_much)
    asking.start()
    assert deaf.wait(timeout=AT_MOST_S) == 0, world.shown
    asking.join()
    assert broken
    assert world.says("the engine has ended"), world.shown
    after = world.engine()
    assert world.says(f"could reach the engine (process {after.pid})"), world.shown
    assert ask(world, "small", 1_000)["type"] == "length"
    watch.send_signal(signal.SIGTERM)
    assert watch.wait(timeout=AT_MOST_S) == 2


def test_it_may_come_before_the_engine(world: World) -> None:
    """Started first, it waits; an engine that takes all memory while it starts is ended."""
    # It starts before the watch asks anything again.
    watch = world.memguard("--attach", "--guard-gib", "2", pace={"look_s": 0.5})
    assert world.says("no SGLang server for port")
    process = subprocess.Popen(
        world.command, env=world.environ(start=[["found", 7.0], [600, 1.0]]), stdout=subprocess.PIPE, text=True
    )
    world.processes.append(process)
    assert world.says(f"could reach the engine (process {process.pid})"), world.shown
    (world.folder / "found").touch()
    assert process.wait(timeout=AT_MOST_S) == 0, world.shown
    assert world.says("there is no request to abort"), world.shown
    watch.send_signal(signal.SIGTERM)
    assert watch.wait(timeout=AT_MOST_S) == 2


def test_launched_and_watched(world: World) -> None:
    """With --launch the watch starts the engine, and ends when it does."""
    watch = world.memguard("--attach", "--launch", "--", *world.command)
    assert world.says("fake engine"), world.shown
    pid = int(world.shown.partition("fake engine ")[2].split()[0])
    assert until(lambda: ask(world, "small", 1_000)["type"] == "length")
    os.kill(pid, signal.SIGTERM)
    assert watch.wait(timeout=AT_MOST_S) == 0, world.shown
