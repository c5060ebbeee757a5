"""One line that stands beside every figure: command, commit, machine, date."""

from __future__ import annotations

import datetime as dt
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def commit() -> str:
    """The checkout's commit, with `+changes` if files differ from it; `unknown` outside a checkout."""
    try:
        head = subprocess.run(
            ["git", "-C", ROOT, "describe", "--always", "--abbrev=12", "--dirty=+changes", "--exclude=*"],
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head.stdout.strip()


def machine() -> str:
    """Processor, cores and memory."""
    model = platform.processor() or platform.machine()
    total_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    return f"{model}, {os.cpu_count()} cores, {total_gib:.0f} GiB"


def command() -> str:
    """The command as a reader of the report would type it."""
    module = getattr(sys.modules["__main__"], "__spec__", None)
    head = ["python", "-m", module.name] if module is not None else ["python", Path(sys.argv[0]).name]
    return shlex.join([*head, *sys.argv[1:]])


def provenance() -> str:
    """Command, commit, machine, Python and date in one line."""
    return (
        f"`{command()}` at {commit()} on {machine()}, Python {platform.python_version()}, "
        f"{dt.datetime.now(dt.timezone.utc):%Y-%m-%d}"
    )
