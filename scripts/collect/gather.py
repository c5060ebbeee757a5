"""The parts of the archive: name -> text. Each part that cannot be had says why instead of failing the rest."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from dynchunk import __version__
from dynchunk.settings import PREFIX, Settings, SettingsError
from launcher import environment, serve, status
from launcher.environment import Launch
from launcher.redaction import HIDDEN, is_secret_name
from scripts.collect.log import log_text
from scripts.collect.scrub import scrub, scrub_json
from scripts.doctor import engine
from scripts.verify import machine

# Whose variables say how an engine behaves.
PREFIXES = ("DYNCHUNK_", "SGLANG_", "NCCL_", "GLOO_", "PYTORCH_", "TORCH_", "CUDA_", "TRITON_")
MOST_DATA_BYTES = 8 << 20
METRICS_WAIT_S = 10


class Server(NamedTuple):
    """Where a server may run, and the key it wants."""

    url: str
    api_key: str | None


def parts(
    environ: Mapping[str, str],
    server: Server,
    report: Path | None,
    log: Iterable[str] | None,
    secrets: set[str],
) -> dict[str, str]:
    """Everything, scrubbed. report: a memguard folder. log: lines of the server's log."""
    made: dict[str, Callable[[], str]] = {
        "versions.json": lambda: _json(versions(environ)),
        "settings.txt": lambda: settings_text(environ),
        "doctor.json": lambda: doctor_json(environ),
        "server_info.json": lambda: _json(status.fetch(server.url, server.api_key, ours=True)),
        "metrics.txt": lambda: metrics_text(server),
    }
    if log is not None:
        made["log.txt"] = lambda: log_text(log, lambda text: scrub(text, secrets))
    found = {name: _or_why(make) for name, make in made.items()}
    if report is not None:
        found |= report_texts(report)
    return {
        name: scrub_json(text, secrets) if name.endswith((".json", ".jsonl")) else scrub(text, secrets)
        for name, text in found.items()
    }


def _or_why(make: Callable[[], str]) -> str:
    try:
        return make()
    except Exception as error:
        return f"could not be collected: {error or type(error).__name__}\n"


def _json(value: Any) -> str:
    return json.dumps(value, default=str)


def versions(environ: Mapping[str, str]) -> dict[str, Any]:
    """DynChunk, the engine and what it runs on, the machine."""
    return {
        "dynchunk": __version__,
        "engine": [check.reason for check in engine.checks(environ, in_container=False)],
        "python": sys.version,
        "platform": platform.platform(),
        "machine": machine.facts(),
    }


def settings_text(environ: Mapping[str, str]) -> str:
    """Every setting with its value and whether it was given; then the variables that engine and libraries read."""
    reading = environment.read_all(environ)
    lines = [f"wrong: {problem}" for problem in reading.problems]
    try:
        planned = serve.plan(environ)
        lines += [planned.summary, *(f"warning: {warning}" for warning in planned.warnings)]
    except SettingsError:
        pass  # what is wrong was said above

    def origin(name: str) -> str:
        return "given" if environ.get(name, "").strip() else "default"

    for cls, values, prefix in ((Launch, reading.launch, ""), (Settings, reading.settings, PREFIX)):
        rows = environment.rows(cls, values, prefix, origin)
        lines += ["", *(f"{name} = {value}  ({given})" for name, value, given in rows)]
    lines += ["", *(f"{name}={_shown(name, environ[name])}" for name in sorted(environ) if name.startswith(PREFIXES))]
    return "\n".join(lines) + "\n"


def _shown(name: str, value: str) -> str:
    return HIDDEN if value and is_secret_name(name) else value


def doctor_json(environ: Mapping[str, str]) -> str:
    """`doctor --json` on this machine."""
    done = subprocess.run(
        [sys.executable, "-m", "scripts.doctor", "--json"],
        env={**os.environ, **environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.stdout or done.stderr


def metrics_text(server: Server) -> str:
    """DynChunk's own lines of /metrics."""
    headers = {"Authorization": f"Bearer {server.api_key}"} if server.api_key else {}
    response = httpx.get(f"{server.url}/metrics", headers=headers, timeout=METRICS_WAIT_S, trust_env=False)
    response.raise_for_status()
    lines = [line for line in response.text.splitlines() if "dynchunk_" in line]
    return "\n".join(lines or ["no dynchunk_ metrics; was the engine started with --enable-metrics?"]) + "\n"


def latest_report(logs: Path) -> Path | None:
    """The newest of memguard's folders."""
    folders = [folder for folder in logs.glob("profile-*") if (folder / "REPORT.md").is_file()]
    return max(folders, key=lambda folder: (folder / "REPORT.md").stat().st_mtime, default=None)


def report_texts(folder: Path) -> dict[str, str]:
    """The report and its data; plots are left out, the data draws them again."""
    files = [file for file in sorted(folder.iterdir()) if file.suffix in {".md", ".json", ".jsonl"}]
    return {
        f"{folder.name}/{file.name}": file.read_text(encoding="utf-8", errors="replace")
        for file in files
        if file.stat().st_size <= MOST_DATA_BYTES
    }
