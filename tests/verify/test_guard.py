"""What follows a decision: aborts until the request is over, then signals, to nothing but the verified engine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from scripts.verify import engine_process
from scripts.verify.decide import GIB, Action, Decision, Sample
from scripts.verify.engine_process import EngineProcess
from scripts.verify.errors import MemguardError
from scripts.verify.guard import Guard
from tests.conftest import ROOT, clean_environ
from tests.verify.engine_programs import AT_MOST_S, until

# Only written on command lines, which every process of this machine can see: no port, and no other process has it.
PORT = 1_000_000 + 10 * os.getpid()
NEVER_S = 600.0
Make = Callable[..., Guard]


def wait_for(condition: Callable[[], object]) -> None:
    assert until(condition)


def decided(action: Action) -> tuple[Decision, Sample]:
    return Decision(action, f"why {action.value}"), Sample(1.0, GIB, GIB)


@pytest.fixture
def a_guard() -> Iterator[Callable[..., Guard]]:
    """Make guards that run; their threads end with the test. They wait for an engine that is asked to end as long as
    it takes.
    """
    made: list[Guard] = []

    def make(
        post_abort: Callable[[str], None] = lambda rid: None,
        in_danger: Callable[[], bool] = lambda: True,
        engine: EngineProcess | str = "none",
        patience_s: float = NEVER_S,
    ) -> Guard:
        how: dict[str, Any] = {"in_danger": in_danger, "engine": engine, "patience_s": patience_s}
        made.append(Guard(post_abort, now_s=time.monotonic, repeat_s=0.01, **how))
        made[-1].start()
        return made[-1]

    yield make
    for guard in made:
        guard.end()


def said(guard: Guard) -> list[str]:
    return [step.what for step in guard.steps]


def test_an_abort_that_came_too_early_is_sent_again(a_guard: Make) -> None:
    """The engine ignores the abort of a request it does not know yet: it is repeated until the request is over."""
    posted: list[str] = []
    guard = a_guard(posted.append)
    guard.watch("probe")
    guard.act(*decided(Action.ABORT))
    wait_for(lambda: len(posted) >= 3)
    guard.release()
    count = len(posted)
    assert set(posted) == {"probe"}
    assert said(guard) == ["why abort", "the server is asked to abort probe"]
    # Another request is aborted as well; by then the first was asked about at most once more, in that very moment.
    guard.watch("next")
    guard.act(*decided(Action.ABORT))
    wait_for(lambda: posted.count("next") >= 3)
    assert posted.index("next") <= count + 1
    assert set(posted[posted.index("next") :]) == {"next"}


def test_an_abort_that_fails_is_sent_again(a_guard: Make) -> None:
    """A server that does not answer in time is asked again; the reason is kept, and written down once."""
    tried = threading.Semaphore(0)

    def post(rid: str) -> None:
        tried.release()
        raise MemguardError("busy")

    guard = a_guard(post)
    guard.watch("probe")
    guard.act(*decided(Action.ABORT))
    for _ in range(3):
        assert tried.acquire(timeout=AT_MOST_S)
    guard.end()
    assert guard.last_error == "busy"
    assert said(guard).count("the abort failed: busy") == 1


def test_a_trip_between_two_prompts_aborts_nothing(a_guard: Make) -> None:
    """Without a request there is nothing to abort; the trip still ends the ramp."""
    posted: list[str] = []
    guard = a_guard(posted.append)
    guard.act(*decided(Action.ABORT))
    assert guard.tripped
    assert guard.trip_seen is not None
    assert guard.trip_seen.rid is None
    guard.watch("later")
    guard.act(*decided(Action.ABORT))
    wait_for(lambda: posted)
    assert set(posted) == {"later"}


def test_it_trips_again_after_it_was_calmed(a_guard: Make) -> None:
    """A watch without end: each trip is answered."""
    posted: list[str] = []
    guard = a_guard(posted.append)
    for number in (1, 2, 3):
        guard.watch(f"probe-{number}")
        guard.act(*decided(Action.ABORT))
        wait_for(lambda wanted=f"probe-{number}": wanted in posted)  # type: ignore[misc]
        guard.release()
        guard.calm()
    assert {"probe-1", "probe-2", "probe-3"} == set(posted)


urls: dict[int, str] = {}  # where the fake engine of a process serves


@pytest.fixture
def start_process(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start fake engines whose command line is a real engine's: a fake package `sglang` runs the fake."""
    package = tmp_path / "sglang"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "launch_server.py").write_text("from tests.verify.fake_engine_process import main\nmain()\n")
    started: list[subprocess.Popen[str]] = []

    def start(
        *flags: str, deaf: bool = False, command: tuple[str, ...] = ("-m", "sglang.launch_server")
    ) -> subprocess.Popen[str]:
        fake = json.dumps({"folder": str(tmp_path / f"engine{len(started)}"), "deaf": deaf})
        process = subprocess.Popen(
            [sys.executable, *command, *flags],
            env=clean_environ(PYTHONPATH=f"{tmp_path}:{ROOT}:{ROOT}/adapter", FAKE_ENGINE=fake, PORT="0"),
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        assert process.stdout is not None
        said = process.stdout.readline()  # it serves
        urls[process.pid] = said.split()[-1] if said.startswith("fake engine") else ""
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


Start = Callable[..., subprocess.Popen[str]]


def found(port: int = PORT, *, here: bool | None = True) -> EngineProcess:
    engine = engine_process.find(port, here=here)
    assert isinstance(engine, EngineProcess), engine
    return engine


def test_the_ladder_stops_at_sigterm_where_that_helps(start_process: Start, a_guard: Make) -> None:
    """SIGTERM ends the engine; SIGKILL is not sent; each step is written down."""
    process = start_process("--port", str(PORT))
    guard = a_guard(engine=found())
    guard.act(*decided(Action.ABORT))
    guard.act(*decided(Action.ESCALATE))
    assert process.wait(timeout=AT_MOST_S) == 0
    wait_for(lambda: "the engine has ended" in said(guard))
    name = f"the engine (process {process.pid})"
    assert said(guard) == ["why abort", "why escalate", f"SIGTERM was sent to {name}", "the engine has ended"]


def test_the_ladder_goes_on_to_sigkill(start_process: Start, a_guard: Make) -> None:
    """An engine that does not hear SIGTERM is killed, with what it has started."""
    process = start_process("--port", str(PORT), deaf=True)
    guard = a_guard(engine=found(), patience_s=0.3)
    guard.act(*decided(Action.ESCALATE))
    assert process.wait(timeout=AT_MOST_S) == -signal.SIGKILL
    wait_for(lambda: "the engine has ended" in said(guard))
    assert [what.partition(" ")[0] for what in said(guard)] == ["why", "SIGTERM", "SIGKILL", "the"]


def test_the_ladder_ends_when_memory_is_back(start_process: Start, a_guard: Make) -> None:
    """An engine that still ends by itself when memory is back is not killed."""
    process = start_process("--port", str(PORT), deaf=True)
    guard = a_guard(engine=found(), in_danger=lambda: False, patience_s=0.3)
    guard.act(*decided(Action.ESCALATE))
    wait_for(lambda: "memory is back; the engine is left to end by itself" in said(guard))
    assert said(guard)[-1] == "memory is back; the engine is left to end by itself"
    assert process.poll() is None


def test_nothing_is_signalled_without_a_verified_engine(a_guard: Make) -> None:
    """The log says why instead."""
    guard = a_guard(engine="no SGLang server for port 1 runs where memguard can see it")
    guard.act(*decided(Action.ESCALATE))
    wait_for(lambda: len(guard.steps) == 2)
    assert said(guard)[1] == "nothing is signalled: no SGLang server for port 1 runs where memguard can see it"


def test_a_process_number_that_is_used_again_is_not_hit(start_process: Start) -> None:
    """What was held has ended: a signal goes nowhere, whoever has its number now."""
    process = start_process("--port", str(PORT))
    engine = found()
    process.kill()
    process.wait()
    other = start_process("--port", str(PORT))
    assert engine.ended()
    assert "was not sent" in engine.send(signal.SIGKILL)
    assert httpx.get(f"{urls[other.pid]}/health", timeout=AT_MOST_S, trust_env=False).is_success
    assert other.poll() is None


@pytest.mark.parametrize(
    "command",
    [
        ("-c", "import sys; print(); sys.stdin.read()", "sglang.launch_server"),
        ("-c", "import sys; print(); sys.stdin.read()", "-m", "sglang.launch_server"),
    ],
)
def test_what_only_mentions_the_engine_is_none(start_process: Start, command: tuple[str, ...]) -> None:
    """An editor, a shell or a script with the engine's name among its words is not the engine."""
    start_process("--port", str(PORT), command=command)
    assert engine_process.find(PORT, here=True) == (f"no SGLang server for port {PORT} runs where memguard can see it")


def test_two_engines_for_one_port_are_not_certain(start_process: Start) -> None:
    """Which of them is meant nobody knows, so neither is signalled; another port's engine does not count."""
    start_process("--port", str(PORT))
    start_process(f"--port={PORT + 1}")
    assert isinstance(engine_process.find(PORT, here=True), EngineProcess)
    start_process(f"--port={PORT}")
    assert "2 SGLang servers here were started for port" in str(engine_process.find(PORT, here=True))


def test_the_head_and_the_others_are_told_apart(start_process: Start) -> None:
    """An address of this host is served by a head; beside a head elsewhere, this host runs another node."""
    process = start_process("--port", str(PORT), "--node-rank", "1")
    assert isinstance(engine_process.find(PORT, here=True), str)
    for here in (False, None):
        engine = found(here=here)
        assert engine.pid == process.pid
        assert not engine.is_head


def test_the_engine_without_a_port_is_on_its_default(start_process: Start, tmp_path: Path) -> None:
    """As the engine itself has it. It is looked for among processes that are handed in: others may have the port."""
    process = start_process()
    proc = tmp_path / "proc"
    proc.mkdir()
    (proc / str(process.pid)).symlink_to(f"/proc/{process.pid}")
    engine = engine_process.find(30_000, here=True, proc=proc)
    assert isinstance(engine, EngineProcess), engine
    assert engine.pid == process.pid


def test_a_child_goes_with_its_engine(start_process: Start, tmp_path: Path) -> None:
    """SIGKILL reaches everything the engine has started, in sessions of their own too."""
    pid_file = tmp_path / "child"
    package = tmp_path / "sglang" / "launch_server.py"
    package.write_text(
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)\n"
        f"open({str(pid_file)!r}, 'w').write(str(child.pid))\n" + package.read_text()
    )
    process = start_process("--port", str(PORT))
    found().send(signal.SIGKILL)
    assert process.wait(timeout=AT_MOST_S) == -signal.SIGKILL
    child = int(pid_file.read_text())
    wait_for(lambda: not alive(child))
    assert not alive(child)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody who may not")
def test_another_users_engine_is_not_promised(start_process: Start) -> None:
    """Who may not signal it says so beforehand, not when it is needed."""
    process = start_process("--port", str(PORT))
    code = (
        "import os; from scripts.verify.engine_process import find; os.setresuid(65534, 65534, 65534); "
        f"print(find({PORT}, here=True))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=clean_environ(PYTHONPATH=f"{ROOT}:{ROOT}/adapter"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.strip() == f"process {process.pid} cannot be signalled: Operation not permitted", done.stderr


def test_ended_processes_cannot_be_held() -> None:
    """A number without a process is an error, not a wrong process."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    with pytest.raises(OSError, match=os.strerror(3)):
        EngineProcess(process.pid, "the engine")
