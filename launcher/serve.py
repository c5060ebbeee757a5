"""Environment -> checks -> the engine's command line -> exec."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from dynchunk import effective
from dynchunk.settings import PREFIX, Settings, SettingsError
from launcher import allocator, environment

ROOT = Path(__file__).resolve().parent.parent
ADAPTER = ROOT / "adapter"
BOOT = ADAPTER / "boot"


@dataclass(frozen=True)
class Plan:
    """What `serve` is about to start, and what the operator should know about it."""

    argv: list[str]
    launch: environment.Launch
    settings: Settings
    summary: str
    warnings: list[str]


def plan(environ: Mapping[str, str]) -> Plan:
    """Read and check everything. Raises SettingsError with all that is wrong."""
    launch, settings = environment.read(environ)
    problems = allocator.problems(environ, allow_expandable_segments=settings.allow_expandable_segments)
    warnings = allocator.warnings(environ)
    summary = f"DYNCHUNK_MODE={settings.mode}: the stock engine"
    if settings.mode != "off":
        if launch.chunked_prefill_size <= 0:
            problems.append(
                f"CHUNKED_PREFILL_SIZE={launch.chunked_prefill_size} turns chunked prefill off, so no prefill can be "
                "bounded; set it to 2048, or DYNCHUNK_MODE=off"
            )
        else:
            resolved, more = _effective(launch, settings)
            problems += more
            if resolved is not None:
                warnings += resolved.notes + resolved.warnings
                summary = resolved.describe()
    if problems:
        raise SettingsError(problems)
    argv = [sys.executable, "-m", "sglang.launch_server", *environment.engine_flags(launch)]
    return Plan(argv, launch, settings, summary, warnings)


def _effective(launch: environment.Launch, settings: Settings) -> tuple[effective.Effective | None, list[str]]:
    try:
        resolved = effective.resolve(
            settings,
            # Where the operator leaves the page to the engine, the scheduler checks again with the real one.
            engine_page=launch.page_size or 1,
            static_tokens=launch.chunked_prefill_size,
            context_tokens=launch.context_length,
        )
    except SettingsError as error:
        return None, error.problems
    return resolved, []


def show(planned: Plan, environ: Mapping[str, str], console: Console) -> None:
    """Print the effective table, the warnings and the command, without secrets."""
    table = Table(title="DynChunk serve", title_justify="left")
    for heading in ("setting", "value", "from"):
        table.add_column(heading, overflow="fold")
    for row in environment.rows(environment.Launch, planned.launch, environ, ""):
        table.add_row(*row)
    table.add_section()
    for row in environment.rows(Settings, planned.settings, environ, PREFIX):
        table.add_row(*row)
    console.print(table)
    console.print(planned.summary, markup=False, soft_wrap=True)
    for warning in planned.warnings:
        console.print(f"warning: {warning}", markup=False, soft_wrap=True)
    console.print(shlex.join(environment.without_secrets(planned.argv)), markup=False, soft_wrap=True)


def engine_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """The engine's environment: ours, with the boot folder first on PYTHONPATH.

    The operator's own entries stay; the two that `./dynchunk` added for the launcher go, they are none of the engine's.
    """
    ours = {str(ROOT), str(ADAPTER), str(BOOT)}
    kept = [e for e in environ.get("PYTHONPATH", "").split(os.pathsep) if e and e not in ours]
    return {**environ, "PYTHONPATH": os.pathsep.join([str(BOOT), *kept])}


def run(environ: Mapping[str, str], *, dry_run: bool) -> None:
    """Show the plan and become the engine. Raises SettingsError; returns only on a dry run."""
    planned = plan(environ)
    # In a container's log there is no terminal to ask for its width, and 80 columns fold the longest names.
    show(planned, environ, Console(width=None if sys.stdout.isatty() else 120))
    if dry_run:
        return
    sys.stdout.flush()
    os.execve(planned.argv[0], planned.argv, engine_environ(environ))  # noqa: S606
