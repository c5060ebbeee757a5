"""Environment -> checks -> the engine's command line -> exec."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from dynchunk import effective
from dynchunk.settings import PREFIX, Settings, SettingsError
from launcher import address, allocator, dotenv, engine_python, environment, model_context, setting, tables
from launcher.redaction import without_secrets

ROOT = Path(__file__).resolve().parent.parent
ADAPTER = ROOT / "adapter"
BOOT = ADAPTER / "boot"

# SGLang takes its key from the command line only, which every user of the machine can read. So the key joins it inside
# the process, out of the environment; the rest is as with `-m sglang.launch_server`, spawned children included.
WITH_KEY = (
    'import os, runpy, sys; sys.argv[1:1] = ["--api-key=" + os.environ["API_KEY"]]; '
    'runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)'
)


class StartError(Exception):
    """The engine cannot be started, for a reason that is no setting. The message says what to do."""


@dataclass(frozen=True)
class Plan:
    """What `serve` is about to start, and what the operator should know about it.

    notes: what became of sizes that could not be kept as they are. warnings: what may go wrong.
    origins: where the value of a setting comes from, if neither from the operator nor from its own default.
    """

    argv: list[str]
    launch: environment.Launch
    settings: Settings
    summary: str
    warnings: list[str]
    notes: list[str] = field(default_factory=list)
    origins: dict[str, str] = field(default_factory=dict)


def plan(environ: Mapping[str, str]) -> Plan:
    """Read and check everything. Raises SettingsError with all that is wrong."""
    reading = environment.read_all(environ)
    problems = list(reading.problems)
    launch, settings = reading.launch, reading.settings
    warnings = allocator.warnings(allocator.engine_variables(environ, settings))
    warnings += allocator.fraction_warnings(settings, launch.mem_fraction_static)
    notes: list[str] = []
    origins: dict[str, str] = {}
    launch, longer = model_context.fitted(launch, environ, origins)
    warnings += longer
    refused = allocator.problems(environ, allow_expandable_segments=settings.allow_expandable_segments)
    refused += allocator.fraction_problems(settings, environ, launch.mem_fraction_static)
    summary = f"DYNCHUNK_MODE={settings.mode}: the stock engine"
    if settings.mode != "off":
        resolved, more = _effective(reading, launch)
        # One sentence for a setting: what is wrong by itself is not said again.
        refused += [p for p in more if not any(q.startswith(p.partition("=")[0] + "=") for q in problems)]
        if resolved is not None:
            notes += resolved.notes
            warnings += resolved.warnings
            summary = resolved.describe()
    if settings.mode == "on":
        problems += refused
    elif settings.mode == "report":
        warnings += [f"DYNCHUNK_MODE=on would refuse to start: {problem}" for problem in refused]
    else:
        warnings += refused
    if problems:
        raise SettingsError(problems)
    start = ["-m", "sglang.launch_server"] if launch.api_key is None else ["-c", WITH_KEY]
    argv = [sys.executable, *start, *environment.engine_flags(launch)]
    return Plan(argv, launch, settings, summary, warnings, notes, origins)


def _effective(
    reading: environment.Reading, launch: environment.Launch
) -> tuple[effective.Effective | None, list[str]]:
    """The rule in force, or why there is none. Neither where a setting that decides it cannot be read."""
    try:
        start = setting.of(launch, reading.settings)
    except ValueError:  # EXTRA_ARGS, and said already; ranks only make chunks smaller, so what is wrong stays wrong
        start = setting.of(replace(launch, extra_args=None), reading.settings)
    if start.no_chunk and "CHUNKED_PREFILL_SIZE" not in reading.unread:
        cure = f"set it to {2048 * start.dp_attention}, or DYNCHUNK_MODE=off"
        return None, [f"{start.no_chunk}, so no prefill can be bounded; {cure}"]
    deciding = {"CHUNKED_PREFILL_SIZE", "PAGE_SIZE", *(PREFIX + name for name in ("PAGE", "CHUNK_MIN", "CHUNK_MAX"))}
    if deciding & reading.unread:
        return None, []
    try:
        resolved = start.resolved(start.chunk)
    except SettingsError as error:
        return None, error.problems
    return (replace(resolved, notes=[start.per_rank, *resolved.notes]) if start.per_rank else resolved), []


def show(planned: Plan, given: dotenv.Merged) -> None:
    """Print the effective table, the warnings and the command, without secrets."""

    def origin(name: str) -> str:
        if not given.environ.get(name, "").strip():
            return planned.origins.get(name, "default")
        return str(given.path and given.path.name) if name in given.names else "environment"

    groups = [
        environment.rows(environment.Launch, planned.launch, "", origin),
        environment.rows(Settings, planned.settings, PREFIX, origin),
    ]
    tables.show(("setting", "value", "from"), groups, title="DynChunk serve")
    print(planned.summary)
    for label, sentences in (("note", planned.notes), ("warning", planned.warnings)):
        for sentence in sentences:
            print(tables.printable(f"{label}: {address.without_user_info(sentence)}"))
    print(tables.printable(shlex.join(without_secrets(planned.argv))))


def own_path(environ: Mapping[str, str]) -> list[str]:
    """The operator's entries of PYTHONPATH: without those that `./dynchunk` added for the launcher."""
    ours = {str(ROOT), str(ADAPTER), str(BOOT)}
    return [entry for entry in environ.get("PYTHONPATH", "").split(os.pathsep) if entry and entry not in ours]


def engine_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """The engine's environment: ours, with the boot folder first on PYTHONPATH and the launcher's folders gone."""
    made = {**environ, "PYTHONPATH": os.pathsep.join([str(BOOT), *own_path(environ)])}
    key = address.api_key(environ)
    return made if key is None else {**made, "API_KEY": key}


def run(given: dotenv.Merged, *, dry_run: bool) -> None:
    """Show the plan and become the engine; returns only on a dry run. Raises SettingsError, StartError."""
    planned = plan(given.environ)
    environ = allocator.engine_variables(engine_environ(given.environ), planned.settings)
    python, asked = engine_python.find(environ)
    planned = replace(planned, argv=[python or sys.executable, *planned.argv[1:]])
    show(planned, given)
    if python is None:
        missing = (
            f"SGLang is in none of the Pythons here: {', '.join(asked)}. scripts/quickstart.sh installs it into .venv; "
            "or activate the environment that has it"
        )
        if not dry_run:
            raise StartError(missing)
        print(f"warning: {missing}")
    elif planned.settings.memory_fraction is not None:
        too_old = allocator.too_old(planned.settings, allocator.torch_version(python, environ))
        if too_old:
            raise StartError(too_old)
    if dry_run:
        return
    sys.stdout.flush()
    os.execve(planned.argv[0], planned.argv, environ)  # noqa: S606
