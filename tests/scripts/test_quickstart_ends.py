"""However quickstart is told to end, its engine and memguard end too, and memguard keeps what it has measured.

The real programs, but for the engine, which is a fake process.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.conftest import ROOT, clean_environ

pytestmark = pytest.mark.slow

DRIVER = """
import sys
from pathlib import Path
import typer
from scripts import ending, quickstart, reference
folder = Path(sys.argv.pop(1))
quickstart.CACHE, quickstart.LOGS = folder / "cache", folder / "logs"
quickstart.SERVE = (sys.executable, "-m", "tests.verify.fake_engine_process")
quickstart._enough_memory = lambda headroom_gib: None  # the fake engine needs none
reference.make_model = lambda: None
ending.STOP_S = 1.0
reference.platform_environ = lambda: {
    "PYTHONPATH": f"{quickstart.ROOT}/adapter:{quickstart.ROOT}",
    "FAKE_ENGINE": folder.joinpath("fake.json").read_text(),
}
quickstart.run()
"""


class Quickstart:
    """A running one. `engine`: the fake engine's process; `memguard`: memguard's."""

    def __init__(self, folder: Path, **fake: object) -> None:
        folder.joinpath("fake.json").write_text(json.dumps({"folder": str(folder / "engine"), **fake}))
        self.logs = folder / "logs"
        self.process = subprocess.Popen(
            [sys.executable, "-c", DRIVER, str(folder), "--sizes", "1k,60k", "--headroom-gib", "2"],
            cwd=ROOT,
            env=clean_environ(
                PYTHONPATH=f"{ROOT}/adapter:{ROOT}", API_KEY="of-another-server", HTTP_PROXY="http://[::1]:9"
            ),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.engine = self._child("-m tests.verify.fake_engine_process")
        self.memguard: psutil.Process | None = None

    def ramps(self) -> None:
        """Wait until memguard has a prompt in flight."""
        self.memguard = self._child("-m scripts.verify.memguard")
        self._until(lambda: '"verdict": "passed' in next(self.logs.glob("*/run.json"), Path(os.devnull)).read_text())
        time.sleep(0.3)

    def finish(self) -> tuple[int, str]:
        """-> exit code and output."""
        output, _ = self.process.communicate(timeout=60)
        return self.process.returncode, output

    def close(self) -> None:
        for process in (self.process.pid, self.engine.pid, self.memguard.pid if self.memguard else None):
            if process is not None and psutil.pid_exists(process):
                os.kill(process, signal.SIGKILL)
        self.process.communicate()

    def _child(self, words: str) -> psutil.Process:
        found: list[psutil.Process] = []

        def there() -> bool:
            children = psutil.Process(self.process.pid).children() if self.process.poll() is None else []
            found.extend(child for child in children if words in " ".join(child.cmdline()))
            return bool(found) or self.process.poll() is not None

        self._until(there)
        assert found, self.process.communicate()[0]
        return found[0]

    @staticmethod
    def _until(condition: object) -> None:
        deadline_s = time.monotonic() + 60
        while not condition() and time.monotonic() < deadline_s:  # type: ignore[operator]
            time.sleep(0.05)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[object]:
    started: list[Quickstart] = []

    def begin(**fake: object) -> Quickstart:
        started.append(Quickstart(tmp_path, **fake))
        return started[-1]

    yield begin
    for quickstart in started:
        quickstart.close()


def port_of(process: psutil.Process) -> int:
    return int(process.environ()["PORT"])


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_everything_ends_and_the_report_is_written(start: object, sent: signal.Signals) -> None:
    """In the middle of a prompt: no process and no port is left, and the report has what was measured."""
    quickstart = start(chunk_s=0.1)  # type: ignore[operator]
    quickstart.ramps()
    port = port_of(quickstart.engine)
    assert listens(port)
    if sent is signal.SIGINT:
        os.killpg(quickstart.process.pid, sent)  # as a terminal sends it
    else:
        quickstart.process.send_signal(sent)
    code, output = quickstart.finish()
    assert code == 130, output
    assert not quickstart.engine.is_running()
    assert not quickstart.memguard.is_running()
    assert not listens(port)
    report = next(quickstart.logs.glob("*/REPORT.md")).read_text()
    assert "interrupted" in report
    assert "| 1,000 |" in report


def test_ctrl_c_again_and_again_leaves_nothing(start: object) -> None:
    """An engine that does not hear SIGTERM is killed however often Ctrl-C comes while it is waited for."""
    quickstart = start(chunk_s=0.1, deaf=True)  # type: ignore[operator]
    quickstart.ramps()
    while quickstart.process.poll() is None:
        os.killpg(quickstart.process.pid, signal.SIGINT)
        time.sleep(0.1)
    code, output = quickstart.finish()
    assert code in (130, -signal.SIGINT), output  # a signal in its last moment ends it as a shell expects, too
    assert not quickstart.engine.is_running()
    assert not quickstart.memguard.is_running()
    assert list(quickstart.logs.glob("*/REPORT.md"))


def test_interrupted_while_the_engine_starts(start: object) -> None:
    """Before there is a ramp: the engine ends and nothing is reported."""
    quickstart = start(deaf=True)  # type: ignore[operator]
    quickstart.process.send_signal(signal.SIGHUP)
    code, output = quickstart.finish()
    assert code == 130, output
    assert not quickstart.engine.is_running()


def test_the_server_gets_none_of_the_shells_settings(start: object, monkeypatch: pytest.MonkeyPatch) -> None:
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
    environ = start().engine.environ()  # type: ignore[operator]
    for name, value in foreign.items():
        assert environ.get(name) != value
    assert "API_KEY" not in environ
    assert "HTTP_PROXY" not in environ
    assert environ["PATH"] == os.environ["PATH"]
