"""`./dynchunk`: one command for the engine with DynChunk, and the tools around it."""

from __future__ import annotations

import os
import sys
from typing import Annotated

try:
    import typer
    from rich.console import Console
except ImportError as missing:
    sys.exit(
        f"dynchunk: {missing}; the tools need what requirements/tools.txt lists (scripts/quickstart.sh installs it)"
    )

from dynchunk import __version__
from dynchunk.settings import SettingsError, from_env

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


@app.command()
def serve(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be started, and stop.")] = False,
) -> None:
    """Start the engine with DynChunk.

    Everything is read from the environment: MODEL_PATH, CHUNKED_PREFILL_SIZE and so on for the engine, DYNCHUNK_* for
    DynChunk (the README and .env.example list them). All wrong settings are reported at once, exit code 2.
    """
    from launcher import serve as serving

    try:
        serving.run(os.environ, dry_run=dry_run)
    except SettingsError as error:
        print(f"dynchunk serve: not started: {error}", file=sys.stderr)
        raise typer.Exit(2) from error


Url = Annotated[str, typer.Option(help="The server's address. Default: http://HOST:PORT of the environment.")]


def _server_url(url: str) -> str:
    host, port = os.environ.get("HOST", "").strip(), os.environ.get("PORT", "").strip()
    if host in ("", "0.0.0.0"):  # noqa: S104 - compared, not bound
        host = "127.0.0.1"
    return url.rstrip("/") or f"http://{host}:{port or 30000}"


@app.command()
def status(url: Url = "") -> None:
    """Show what the running server reports of DynChunk. Exit code 1 if it is not active there."""
    from launcher import status as reporting

    try:
        info = reporting.fetch(_server_url(url), os.environ.get("API_KEY"))
    except reporting.StatusError as error:
        print(f"dynchunk status: {error}", file=sys.stderr)
        raise typer.Exit(1) from error
    if not reporting.show(info, Console()):
        raise typer.Exit(1)


@app.command()
def budget(
    tokens_squared: Annotated[str, typer.Argument(help="The new budget in token^2, as for DYNCHUNK_BUDGET: 1.5e8.")],
    url: Url = "",
) -> None:
    """Change the budget of the running server, on all its ranks at one step, without a restart.

    It lasts until the server ends; DYNCHUNK_BUDGET is what the next start uses.
    """
    from launcher import status as reporting

    try:
        wanted = from_env({"DYNCHUNK_BUDGET": tokens_squared or "0"}).budget
        changed = reporting.change_budget(_server_url(url), os.environ.get("API_KEY"), wanted)
    except (SettingsError, reporting.StatusError) as error:
        print(f"dynchunk budget: {error}", file=sys.stderr)
        raise typer.Exit(1) from error
    if not changed:
        print("dynchunk budget: the server did not take it; is DynChunk active there (./dynchunk status)?")
        raise typer.Exit(1)
    print(f"{wanted:,} token^2 from the next chunks on")


@app.command()
def health() -> None:
    """The container's health probe; exit code 0 if the engine answers. On hosts other than the head: if it runs."""
    from launcher import health as probe

    raise typer.Exit(probe.main())


PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def _become(module: str, context: typer.Context) -> None:
    """Run a program of its own with the rest of the command line; nothing of this one stays loaded beside it."""
    os.execv(sys.executable, [sys.executable, "-m", module, *context.args])  # noqa: S606


@app.command(context_settings=PASS_ON, add_help_option=False)
def doctor(context: typer.Context) -> None:
    """Check this machine and this setting before long prompts do: ok, warn or fail, the reason and the cure."""
    _become("scripts.doctor", context)


@app.command(context_settings=PASS_ON, add_help_option=False)
def memguard(context: typer.Context) -> None:
    """Ramp long prompts against the running server, watch memory, abort in time, write a report."""
    _become("scripts.verify.memguard", context)


if __name__ == "__main__":
    app(prog_name="dynchunk")
