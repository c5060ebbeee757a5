"""What doctor reads off the machine. Nothing here decides anything, and nothing is changed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

DEVICES = Path(__file__).with_name("devices.py")
DEVICES_WAIT_S = 20
DOCKER_WAIT_S = 10
KILLERS = ("earlyoom", "nohang", "systemd-oomd")
CONFIGS = {
    "nohang": ("/usr/local/etc/nohang/nohang.conf", "/etc/nohang/nohang.conf"),
    "systemd-oomd": ("/usr/lib/systemd/oomd.conf", "/etc/systemd/oomd.conf"),
}
ENGINE_WORDS = ("sglang.launch_server", "sglang::")


@dataclass(frozen=True)
class Machine:
    """One look at the machine. meminfo: /proc/meminfo in bytes. devices: as devices.py prints them."""

    meminfo: dict[str, int]
    swapped_in_per_s: float
    full_avg10: float | None
    devices: dict[str, Any]
    killers: dict[str, list[str]]
    killer_configs: dict[str, str]
    engine_pid: int | None
    container: Container | None

    @property
    def unified(self) -> bool | None:
        """Whether GPU memory is host memory; None where there is no GPU to ask."""
        found = [device["integrated"] for device in self.devices["devices"]]
        return any(found) if found else None


@dataclass(frozen=True)
class Container:
    """The container that this runs in. first_process: the name of process 1. limit_bytes: its cgroup's limit."""

    first_process: str
    limit_bytes: int | None


def machine(interval_s: float = 1.0) -> Machine:
    """Look once. interval_s: over how long swapping in is counted."""
    before = _swapped_in_pages()
    started_s = time.monotonic()
    devices = read_devices()
    inside = container()
    running = _killers()
    engine_pids = [p.pid for p in _processes() if any(word in " ".join(p.info["cmdline"]) for word in ENGINE_WORDS)]
    time.sleep(max(0.0, interval_s - (time.monotonic() - started_s)))
    return Machine(
        meminfo(),
        (_swapped_in_pages() - before) / (time.monotonic() - started_s),
        full_avg10(),
        devices,
        running,
        {name: _text_of_last(paths) for name, paths in CONFIGS.items() if name in running},
        min(engine_pids, default=None),
        inside,
    )


def meminfo(path: Path = Path("/proc/meminfo")) -> dict[str, int]:
    """Every field, in bytes."""
    fields = re.findall(r"^(\w[\w()]*):\s+(\d+) kB", path.read_text(encoding="ascii"), re.MULTILINE)
    return {name: int(value) * 1024 for name, value in fields}


def full_avg10(path: Path = Path("/proc/pressure/memory")) -> float | None:
    """The `full` line's avg10 in percent; None where the kernel does not count it."""
    try:
        found = re.search(r"^full avg10=([\d.]+)", path.read_text(encoding="ascii"), re.MULTILINE)
    except OSError:
        return None
    return float(found[1]) if found else None


def _swapped_in_pages() -> int:
    try:
        text = Path("/proc/vmstat").read_text(encoding="ascii")
    except OSError:
        return 0
    found = re.search(r"^pswpin (\d+)", text, re.MULTILINE)
    return int(found[1]) if found else 0


def read_devices() -> dict[str, Any]:
    """devices.py's answer, or the reason why there is none under `error`."""
    try:
        done = subprocess.run(
            [sys.executable, "-S", "-E", str(DEVICES)],
            capture_output=True,
            text=True,
            timeout=DEVICES_WAIT_S,
            check=False,
        )
        answer: dict[str, Any] = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        return {"devices": [], "error": f"the driver did not answer within {DEVICES_WAIT_S} s"}
    except ValueError:
        return {"devices": [], "error": f"the driver ended the program that asked it (exit code {done.returncode})"}
    return answer


def container() -> Container | None:
    """The container this runs in, or None outside one."""
    marks = ("/.dockerenv", "/run/.containerenv")
    if not any(os.path.exists(mark) for mark in marks) and not os.environ.get("container"):  # noqa: PTH110, SIM112
        return None
    try:
        first = Path("/proc/1/comm").read_text(encoding="utf-8").strip()
    except OSError:
        first = "unknown"
    return Container(first, _cgroup_limit_bytes())


def _cgroup_limit_bytes() -> int | None:
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(path).read_text(encoding="ascii").strip()
        except OSError:
            continue
        # Version 1 writes "no limit" as a number near 2^63.
        return int(text) if text.isdigit() and int(text) < 1 << 60 else None
    return None


def _processes() -> Iterator[psutil.Process]:
    for process in psutil.process_iter(["name", "cmdline"]):
        if process.info["cmdline"] and process.pid != os.getpid():
            yield process


def _killers() -> dict[str, list[str]]:
    """The killers that run, with their arguments. A kernel's process name is cut at 15 characters; ours are shorter."""
    found: dict[str, list[str]] = {}
    for process in _processes():
        words = process.info["cmdline"]
        names = {process.info["name"], *(Path(word).name for word in words[:2])}
        for name in KILLERS:
            if name in names:
                found[name] = words[1:]
    return found


def _text_of_last(paths: tuple[str, ...]) -> str:
    """The last of the files that there is: an administrator's own comes after the distribution's."""
    found = [path for path in map(Path, paths) if path.is_file() and os.access(path, os.R_OK)]
    return found[-1].read_text(encoding="utf-8", errors="replace") if found else ""


def docker_containers() -> list[dict[str, Any]]:
    """`docker inspect` of the containers that run; empty where there is no Docker to ask, or no right to."""
    try:
        ids = _docker("ps", "--quiet", "--no-trunc").split()
        inspected: list[dict[str, Any]] = json.loads(_docker("inspect", *ids)) if ids else []
    except (OSError, subprocess.SubprocessError, ValueError):
        return []
    return inspected


def _docker(*words: str) -> str:
    return subprocess.run(["docker", *words], capture_output=True, text=True, timeout=DOCKER_WAIT_S, check=True).stdout
