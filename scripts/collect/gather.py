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

from dynchunk import __version__
from dynchunk.settings import PREFIX, Settings, SettingsError
from launcher import environment, serve, status
from launcher.environment import Launch
from launcher.redaction import HIDDEN, is_secret_name
from scripts.collect.log import log_text
from scripts.collect.scrub import scrub, scrub_json
from scripts.doctor import engine
from scripts.top import scrape
from scripts.verify import machine

# Whose variables say how an engine behaves.
PREFIXES = ("DYNCHUNK_", "SGLANG_", "NCCL_", "GLOO_", "PYTORCH_", "TORCH_", "CUDA_", "TRITON_")
MOST_DATA_BYTES = 8 << 20
A_FOLDER = "name a folder that memguard wrote (logs/profile-...), or leave the option out"


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
    """Everything, scrubbed. log: lines of the server's log.

    report: a memguard folder. Raises ValueError where it is none, before anything else is gathered.
    """
    reports = {} if report is None else report_texts(report)
    made: dict[str, Callable[[], str]] = {
        "versions.json": lambda: _json(versions(environ)),
        "settings.txt": lambda: settings_text(environ),
        "doctor.json": lambda: doctor_json(environ, server),
        "server_info.json": lambda: _json(status.fetch(server.url, server.api_key, ours=True)),
        "metrics.txt": lambda: metrics_text(server),
    }
    if log is not None:
        made["log.txt"] = lambda: log_text(log, lambda text: scrub(text, secrets))
    found = {name: _or_why(make) for name, make in made.items()} | reports
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
    try:
        planned = serve.plan(environ)
        lines = [planned.summary, *(f"warning: {warning}" for warning in planned.warnings)]
    except SettingsError as error:
        lines = [f"wrong: {problem}" for problem in error.problems]

    def origin(name: str) -> str:
        return "given" if environ.get(name, "").strip() else "default"

    for cls, values, prefix in ((Launch, reading.launch, ""), (Settings, reading.settings, PREFIX)):
        rows = environment.rows(cls, values, prefix, origin)
        lines += ["", *(f"{name} = {value}  ({given})" for name, value, given in rows)]
    lines += ["", *(f"{name}={_shown(name, environ[name])}" for name in sorted(environ) if name.startswith(PREFIXES))]
    return "\n".join(lines) + "\n"


def _shown(name: str, value: str) -> str:
    return HIDDEN if value and is_secret_name(name) else value


def doctor_json(environ: Mapping[str, str], server: Server) -> str:
    """`doctor --json` on this machine, of the same settings and the same server."""
    # -P: our own packages, whatever the folder holds that collect is called from. What a file sets is in `environ`
    # already; without an empty one in its place, .env would come on top.
    done = subprocess.run(
        [sys.executable, "-P", "-m", "scripts.doctor", "--json", "--env-file", os.devnull, "--url", server.url],
        env={**os.environ, **environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.stdout or done.stderr


def metrics_text(server: Server) -> str:
    """DynChunk's own lines of /metrics."""
    lines = [line for line in scrape.fetch(server.url, server.api_key).splitlines() if "dynchunk_" in line]
    return "\n".join(lines or ["no dynchunk_ metrics; was the engine started with --enable-metrics?"]) + "\n"


def latest_report(logs: Path) -> Path | None:
    """The newest of memguard's folders."""
    folders = [folder for folder in logs.glob("profile-*") if (folder / "REPORT.md").is_file()]
    return max(folders, key=lambda folder: (folder / "REPORT.md").stat().st_mtime, default=None)


def report_texts(folder: Path) -> dict[str, str]:
    """The report and its data; plots are left out, the data draws them again. Raises ValueError where there is none."""
    try:
        files = [file for file in sorted(folder.iterdir()) if file.suffix in {".md", ".json", ".jsonl"}]
        found = {
            f"{folder.resolve().name}/{file.name}": file.read_text(encoding="utf-8", errors="replace")
            for file in files
            if file.stat().st_size <= MOST_DATA_BYTES
        }
    except NotADirectoryError:
        raise ValueError(f"--report {folder}: it is a file; name the folder it is in: {folder.parent}") from None
    except OSError as error:
        raise ValueError(f"--report {folder}: {error.strerror}; {A_FOLDER}") from None
    if not found:
        most = f"{MOST_DATA_BYTES >> 20} MiB"
        raise ValueError(f"--report {folder}: no .md, .json or .jsonl file of up to {most} is in it; {A_FOLDER}")
    return found
