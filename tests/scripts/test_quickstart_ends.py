"""However quickstart is told to end, its engine and memguard end too, and memguard keeps what it has measured.

The real programs, but for the engine: a fake process that goes by the real one's name, so that memguard finds it.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.conftest import ROOT, clean_environ

pytestmark = pytest.mark.slow

DRIVER = """
import sys
from pathlib import Path
from scripts import ending, quickstart, reference
folder, port = Path(sys.argv.pop(1)), sys.argv.pop(1)
quickstart.CACHE, quickstart.LOGS = folder / "cache", folder / "logs"
quickstart.SERVE = (sys.executable, "-m", "sglang.launch_server", "--port", port)
quickstart.MEMGUARD_ENDS_S = 600.0
quickstart._enough_memory = lambda headroom_gib: None  # the fake engine needs none
reference.free_port = lambda: int(port)
reference.make_model = lambda: None
ending.STOP_S = 0.2
reference.platform_environ = lambda: {
    "PYTHONPATH": f"{folder}:{quickstart.ROOT}/adapter:{quickstart.ROOT}",
    "FAKE_ENGINE": folder.joinpath("fake.json").read_text(),
}
quickstart.run()
"""
IN_FLIGHT = "memguard-60000"
STARTS = {"start": [[3600, 8]]}  # it has begun to start, and does not come to serve
RAMPS = {"stalls_at_tokens": 2_000}  # the first prompt passes, the second is in flight until it is aborted
STUCK_S = 600.0  # nothing here is awaited for so long unless it never comes


class Quickstart:
    """A running one. `children`: the processes that it has been seen to have started."""

    def __init__(self, folder: Path, port: int, fake: dict[str, object]) -> None:
        self.logs = folder / "logs"
        self.children: list[psutil.Process] = []
        self._trace = folder / "engine" / "trace.jsonl"
        package = folder / "sglang"
        package.mkdir()
        (package / "__init__.py").write_text("")
        (package / "launch_server.py").write_text("from tests.verify.fake_engine_process import main\nmain()\n")
        folder.joinpath("fake.json").write_text(json.dumps({"folder": str(folder / "engine"), **fake}))
        self.process = subprocess.Popen(
            [sys.executable, "-c", DRIVER, str(folder), str(port), "--sizes", "1k,60k", "--headroom-gib", "0.5"],
            cwd=ROOT,
            env=clean_environ(
                PYTHONPATH=f"{ROOT}/adapter:{ROOT}", API_KEY="of-another-server", HTTP_PROXY="http://[::1]:9"
            ),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._engine_speaks = folder / "engine" / "meminfo"

    def starts(self) -> psutil.Process:
        """Wait until the engine's program runs -> it."""
        self._until(self._engine_speaks.exists)
        self.children = psutil.Process(self.process.pid).children()
        [engine] = self.children
        return engine

    def ramps(self) -> None:
        """Wait until memguard has its second prompt in flight."""
        self._until(lambda: self._trace.exists() and IN_FLIGHT in self._trace.read_text())
        self.children = psutil.Process(self.process.pid).children()
        assert len(self.children) == 2  # the engine and memguard

    def finish(self) -> tuple[int, str]:
        """-> exit code and output; nothing that it has started is left."""
        output, _ = self.process.communicate(timeout=STUCK_S)
        assert not any(child.is_running() for child in self.children)
        return self.process.returncode, output

    def close(self) -> None:
        """Whatever a failed test leaves."""
        if self.process.poll() is None:
            self.children += psutil.Process(self.process.pid).children()
            self.process.kill()
        for child in self.children:
            if child.is_running():
                child.kill()
        self.process.communicate()

    def _until(self, there: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + STUCK_S
        while not there():
            assert self.process.poll() is None, self.process.communicate()[0]
            assert time.monotonic() < deadline_s
            time.sleep(0.02)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Quickstart]]:
    """Start one whose engine is a fake with these fields."""
    started: list[Quickstart] = []
    with socket.socket() as held:
        # Bound here all the time, so that nobody else is given the port; beside it the engine may listen on it.
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))

        def begin(**fake: object) -> Quickstart:
            started.append(Quickstart(tmp_path, held.getsockname()[1], fake))
            return started[-1]

        yield begin
        for quickstart in started:
            quickstart.close()


Start = Callable[..., Quickstart]


def test_everything_ends_and_the_report_is_written(start: Start) -> None:
    """In the middle of a prompt: no process is left, and the report has what was measured."""
    quickstart = start(**RAMPS)
    quickstart.ramps()
    quickstart.process.send_signal(signal.SIGTERM)
    code, output = quickstart.finish()
    assert code == 130, output
    report = next(quickstart.logs.glob("*/REPORT.md")).read_text()
    assert "interrupted" in report
    assert "| 1,000 |" in report
    assert "judged by what the engine's own processes take" in report


def test_ctrl_c_again_and_again_leaves_nothing(start: Start) -> None:
    """As a terminal sends it, to an engine that does not hear SIGTERM: that is killed, and the report is written."""
    quickstart = start(deaf=True, **RAMPS)
    quickstart.ramps()
    while quickstart.process.poll() is None:
        os.killpg(quickstart.process.pid, signal.SIGINT)
        time.sleep(0.1)
    code, output = quickstart.finish()
    assert code in (130, -signal.SIGINT), output  # a signal in its last moment ends it as a shell expects, too
    assert "| 1,000 |" in next(quickstart.logs.glob("*/REPORT.md")).read_text()


def test_interrupted_while_the_engine_starts(start: Start) -> None:
    """Before there is a ramp: the engine ends and nothing is reported."""
    quickstart = start(deaf=True, **STARTS)
    quickstart.starts()
    quickstart.process.send_signal(signal.SIGHUP)
    code, output = quickstart.finish()
    assert code == 130, output
    assert not list(quickstart.logs.glob("*"))


def test_the_server_gets_none_of_the_shells_settings(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """What somebody has exported for another server does not change what is measured: it does not reach the engine."""
    foreign = {
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        "NNODES": "2",
        "MODEL_PATH": "/theirs",
        "https_proxy": "http://proxy",
        "EXTRA_ARGS": "--x",
    }
    for name, value in foreign.items():
        monkeypatch.setenv(name, value)
    environ = start(**STARTS).starts().environ()
    for name, value in foreign.items():
        assert environ.get(name) != value
    assert "API_KEY" not in environ
    assert "HTTP_PROXY" not in environ
    assert environ["PATH"] == clean_environ()["PATH"]
