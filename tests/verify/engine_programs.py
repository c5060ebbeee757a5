"""memguard and fake engines as processes, for tests of what happens between processes."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from scripts.reference import free_port
from tests.conftest import ROOT, clean_environ
from tests.verify.fake_engine import GIB, write_meminfo

PROGRAM = """
import functools, json, sys
from pathlib import Path
from scripts.verify import attach, launch, memguard, options, session
from tests.verify.counted_host import CountedHost
folder, pace = Path(sys.argv.pop(1)), json.loads(sys.argv.pop(1))
launch.LOOK_S, attach.FIND_EVERY_S = 0.05, 0.1
attach.Host = session.Host = CountedHost
memguard.Surroundings = functools.partial(
    options.Surroundings, logs=folder / "logs", proc=folder, kmsg=Path("none"), sample_interval_s=0.01,
    baseline_s=0.08, tick_s=0.02, hold_ground=lambda: False, **{"look_s": 0.05, **pace},
)
memguard.main()
"""
# What a test waits for comes when it comes: on a busy machine a patience that runs out would be another test. Where it
# shall run out, the test hands in its own.
PATIENT = {"recovery_s": 60, "abort_wait_s": 60, "escalate_s": 60, "patience_s": 60}
AT_MOST_S = 120.0


class World:
    """A folder with the host's made-up memory, a port, fake engines for it, and memguard."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.processes: list[subprocess.Popen[str]] = []
        write_meminfo(folder / "meminfo", 8 * GIB)
        package = folder / "sglang"
        package.mkdir()
        (package / "__init__.py").write_text("")
        (package / "launch_server.py").write_text("from tests.verify.fake_engine_process import main\nmain()\n")
        # As the real engine is called.
        self.command = [sys.executable, "-m", "sglang.launch_server", "--port", str(self.port)]

    def environ(self, **fake: Any) -> dict[str, str]:
        """What both programs run in. fake: what the fake engine is told."""
        return clean_environ(
            PYTHONPATH=f"{self.folder}:{ROOT}:{ROOT}/adapter",
            FAKE_ENGINE=json.dumps({"folder": str(self.folder), **fake}),
            PORT=str(self.port),
            HOST="",
            API_KEY="",
            COLUMNS="200",
        )

    def engine(self, **fake: Any) -> subprocess.Popen[str]:
        """Start a fake engine that serves."""
        process = subprocess.Popen(self.command, env=self.environ(**fake), stdout=subprocess.PIPE, text=True)
        self.processes.append(process)
        assert process.stdout is not None
        process.stdout.readline()
        return process

    def memguard(self, *arguments: str, pace: Mapping[str, float] | None = None, **fake: Any) -> subprocess.Popen[str]:
        """Start memguard, its output in a file: see `shown`. pace: what it shall have less patience for."""
        words = [str(self.folder), json.dumps({**PATIENT, **(pace or {})}), *arguments]
        with (self.folder / "shown").open("w") as output:
            process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, *words],
                cwd=ROOT,
                env=self.environ(**fake),
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
            )
        self.processes.append(process)
        return process

    @property
    def shown(self) -> str:
        """What memguard has said so far."""
        return (self.folder / "shown").read_text()

    @property
    def report(self) -> Path:
        """The folder of the newest report."""
        return max((self.folder / "logs").iterdir(), key=lambda path: path.stat().st_mtime_ns)

    def says(self, text: str, times: int = 1) -> bool:
        """Wait until memguard has said it."""
        return until(lambda: self.shown.count(text) >= times)

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()


def until(condition: Callable[[], object], at_most_s: float = AT_MOST_S) -> bool:
    """Wait for something -> whether it came."""
    deadline_s = time.monotonic() + at_most_s
    while not condition():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.02)
    return True


def alive(pid: int) -> bool:
    """Whether a process runs."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False
