"""`./dynchunk`: one command for the engine with DynChunk, and the tools around it."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

try:
    import httpx  # noqa: F401 - so that what is missing is said before anything starts
    import rich  # noqa: F401
    import typer
except ImportError as missing:
    sys.exit(
        f"dynchunk: {missing}; the tools need what requirements/tools.txt lists (scripts/quickstart.sh installs it)"
    )

from dynchunk import __version__
from dynchunk.settings import BUDGET_NUMBER, SettingsError
from launcher import address, dotenv

app = typer.Typer(
    name="dynchunk",
    help="Serve long prompts on SGLang inside a memory budget, and check that it holds.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _version(asked: bool) -> None:
    if asked:
        print(f"dynchunk {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Serve long prompts on SGLang inside a memory budget, and check that it holds."""


EnvFile = Annotated[
    Path | None,
    typer.Option(
        "--env-file",
        help="Settings in a file; the environment comes first.",
        show_default="the .env beside this program, where there is one",
    ),
]
Url = Annotated[
    str, typer.Option(help="The server's address.", show_default="http://HOST:PORT of the environment or .env")
]


def _given(env_file: Path | None) -> dotenv.Merged:
    """The environment and what a file adds to it. Raises SettingsError."""
    from launcher import serve as serving

    environ = dict(os.environ)
    if not serving.own_path(environ):
        environ.pop("PYTHONPATH", None)  # ours alone: then a line of the file counts
    return dotenv.merged(environ, env_file)


@app.command()
def serve(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be started, and stop.")] = False,
    env_file: EnvFile = None,
) -> None:
    """Start the engine with DynChunk.

    Everything is read from the environment and, under it, from .env:
    MODEL_PATH, CHUNKED_PREFILL_SIZE and so on for the engine, DYNCHUNK_* for
    DynChunk; the README and .env.example list them.

    Exit codes: 2 for settings that are wrong, all of them in one message;
    1 where there is no engine.
    """
    from launcher import serve as serving

    file = None
    try:
        given = _given(env_file)
        file = given.path
        serving.run(given, dry_run=dry_run)
    except SettingsError as error:
        beside = f"\n(from the environment and {file})" if file else ""
        print(f"dynchunk serve: not started: {error}{beside}", file=sys.stderr)
        raise typer.Exit(2) from error
    except serving.StartError as error:
        print(f"dynchunk serve: not started: {error}", file=sys.stderr)
        raise typer.Exit(1) from error


@app.command()
def status(url: Url = "", env_file: EnvFile = None) -> None:
    """Show what the running server reports of DynChunk. Exit code 1 if it is not active there."""
    from launcher import status as reporting

    try:
        where, key = _server(url, env_file)
        info = reporting.fetch(where, key, ours=not url)
    except (ValueError, reporting.StatusError) as error:
        print(f"dynchunk status: {error}", file=sys.stderr)
        raise typer.Exit(1) from error
    if not reporting.show(info):
        raise typer.Exit(1)


@app.command()
def budget(
    tokens_squared: Annotated[str, typer.Argument(help="The new budget in token^2, as for DYNCHUNK_BUDGET: 1.5e8.")],
    url: Url = "",
    env_file: EnvFile = None,
) -> None:
    """Change the budget of the running server, on all its ranks at one step, without a restart.

    It lasts until the server ends; DYNCHUNK_BUDGET is what the next start uses.
    """
    from launcher import status as reporting

    try:
        wanted = BUDGET_NUMBER.parse(tokens_squared.strip())
    except ValueError as error:
        print(f"dynchunk budget: {tokens_squared!r}: {error}; accepted: {BUDGET_NUMBER.limits}", file=sys.stderr)
        raise typer.Exit(1) from error
    try:
        where, key = _server(url, env_file)
        changed = reporting.change_budget(where, key, wanted, ours=not url)
    except (ValueError, reporting.StatusError) as error:
        print(f"dynchunk budget: {error}", file=sys.stderr)
        raise typer.Exit(1) from error
    if not changed:
        print("dynchunk budget: the server did not take it; is DynChunk active there (./dynchunk status)?")
        raise typer.Exit(1)
    print(f"{wanted:,} token^2 from the next chunks on")


def _server(url: str, env_file: Path | None) -> tuple[str, str | None]:
    """(address, key) of the server that status and budget ask. Raises ValueError for settings that are wrong."""
    environ = _given(env_file).environ
    return url.strip().rstrip("/") or address.server_url(environ), address.api_key(environ)


@app.command()
def health() -> None:
    """The container's health probe; exit code 0 if the engine answers. On hosts other than the head: if it runs."""
    from launcher import health as probe

    raise typer.Exit(probe.main())


PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def _become(module: str, context: typer.Context, environ: Mapping[str, str]) -> None:
    """Run a program of its own with the rest of the command line; nothing of this one stays loaded beside it."""
    # -P: our own packages, whatever the folder holds that it is called from.
    os.execve(sys.executable, [sys.executable, "-P", "-m", module, *context.args], dict(environ))  # noqa: S606


@app.command(context_settings=PASS_ON, add_help_option=False)
def doctor(context: typer.Context) -> None:
    """Check this machine and this setting before long prompts do: ok, warn or fail, the reason and the cure."""
    _become("scripts.doctor", context, os.environ)


@app.command(context_settings=PASS_ON, add_help_option=False)
def plan(context: typer.Context) -> None:
    """What will this setting cost? Chunks, memory and time of a prompt, before anything is started."""
    from launcher import plan_command

    plan_command.main(context.args)


@app.command(context_settings=PASS_ON, add_help_option=False)
def top(context: typer.Context) -> None:
    """Watch the running server: the long prefill in flight, chunks, the budget, memory, requests."""
    _become("scripts.top", context, os.environ)


@app.command(context_settings=PASS_ON, add_help_option=False)
def collect(context: typer.Context) -> None:
    """Write an archive to send with a report of a problem, without keys and passwords."""
    _become("scripts.collect", context, os.environ)


@app.command(context_settings=PASS_ON, add_help_option=False)
def memguard(context: typer.Context, env_file: EnvFile = None) -> None:
    """Ramp long prompts against the running server, watch memory, abort in time, write a report."""
    try:
        environ = _given(env_file).environ
    except SettingsError as error:
        print(f"dynchunk memguard: {error}", file=sys.stderr)
        raise typer.Exit(1) from error
    _become("scripts.verify.memguard", context, {**environ, "PYTHONPATH": os.environ.get("PYTHONPATH", "")})


if __name__ == "__main__":
    app(prog_name="dynchunk")
