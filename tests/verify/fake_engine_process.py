"""A fake engine as a process of its own, to be signalled and launched: it serves, and computes nothing.

FAKE_ENGINE is JSON: fields of FakeEngine, and `deaf`: whether SIGTERM is ignored; `start`: [seconds, GiB available] of
each step before it serves, from the second on with a child that calls itself as the real engine's scheduler does (a
word for the seconds: until there is a file of that name); a step also lasts until the memguard that has launched it has
a reading of it; `exit_code`: ends with it instead of serving; `pid`: true for its own. PORT as for `serve`. SIGTERM
gives its memory back.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

from tests.verify.fake_engine import GIB, FakeEngine, write_meminfo


def main() -> None:
    """Serve until SIGTERM."""
    fields = json.loads(os.environ.get("FAKE_ENGINE", "{}"))
    deaf, steps, exit_code = fields.pop("deaf", False), fields.pop("start", []), fields.pop("exit_code", None)
    folder = Path(fields.pop("folder"))
    if fields.get("pid"):
        fields["pid"] = os.getpid()
    folder.mkdir(exist_ok=True)
    ended = threading.Event()

    engine: FakeEngine | None = None

    def end(*_: object) -> None:
        if engine is None:
            write_meminfo(folder / "meminfo", 8 * GIB)
        else:
            engine.leave(8 * GIB)
        ended.set()

    signal.signal(signal.SIGTERM, signal.SIG_IGN if deaf else end)
    for number, (lasts, available_gib) in enumerate(steps):
        if number == 1:
            command = ["sglang::scheduler_fake", "-c", "import sys; sys.stdin.read()"]
            subprocess.Popen(command, executable=sys.executable, stdin=subprocess.PIPE)
        write_meminfo(folder / "meminfo", available_gib * GIB)
        until = folder / lasts if isinstance(lasts, str) else None
        ended.wait(0 if until else lasts)
        while not ended.is_set() and not (_seen(folder, number, available_gib) and (until is None or until.exists())):
            ended.wait(0.01)
        if ended.is_set():
            sys.exit(0)
    if exit_code is not None:
        sys.exit(exit_code)
    engine = FakeEngine(folder, port=int(os.environ.get("PORT") or 0), **fields)
    print(f"fake engine {os.getpid()} at {engine.url}", flush=True)
    ended.wait()
    sys.exit(0)


def _seen(folder: Path, step: int, available_gib: float) -> bool:
    """Whether memguard has written down a reading of this step; True where it writes none, beside a running engine."""
    files = list(folder.glob("logs/profile-*/samples*.jsonl"))
    phase = "load" if step else "start"
    wanted = (f'"mem_available_bytes":{int(available_gib * GIB) // 1024 * 1024},', f'"phase":"{phase}"')
    lines = [line for file in files for line in file.read_text().splitlines()]
    return not files or any(all(part in line for part in wanted) for line in lines)


if __name__ == "__main__":
    main()
