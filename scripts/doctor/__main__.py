"""`./dynchunk doctor`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from dynchunk import measured_before, values
from dynchunk.policy import paths
from launcher import address, dotenv, tables
from scripts.doctor import examine, memory_rules, readings
from scripts.doctor.verdict import GIB, Check, Level, fail

HELP = """Is this machine and this setting safe for long prompts?

Reads the same environment as `serve`, the engine's package and the machine. Changes nothing, needs no GPU, imports
neither the engine nor torch. Run it where the engine runs (in the image) and on the host: each sees what the other
cannot.

Exit codes: 0 nothing fails; 1 a check fails; 2 a mistyped option.
"""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command(help=HELP)
def doctor(  # noqa: PLR0917 - typer makes an option of each
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
    settings_file: Annotated[
        Path | None, typer.Option("--env-file", help="Settings in a file, as for serve.", show_default=".env")
    ] = None,
    url: Annotated[
        str, typer.Option(help="Where a server may run already.", show_default="http://HOST:PORT of the settings")
    ] = "",
    guard_gib: Annotated[
        float, typer.Option(help="The MemAvailable at which memguard aborts.")
    ] = memory_rules.GUARD_BYTES / GIB,
    path: Annotated[
        str, typer.Option(help=f"The engine's attention path: {', '.join(paths.PATHS)}.", show_default="the model's")
    ] = "",
    bytes_each: Annotated[
        float | None,
        typer.Option(
            "--bytes", help="What one row and key takes, as memguard measured it.", show_default="of the path"
        ),
    ] = None,
) -> None:
    """Check, print, exit."""
    wrong = list(_wrong(path, guard_gib, bytes_each))
    if wrong and as_json:
        print(json.dumps(as_data(wrong), indent=1))
    if wrong:
        print("\n".join(f"dynchunk doctor: {check.reason}" for check in wrong), file=sys.stderr)
        raise typer.Exit(2)
    try:
        environ = dotenv.merged(os.environ, settings_file).environ
        server, api_key = url.rstrip("/") or address.server_url(environ), address.api_key(environ)
    except ValueError as error:  # SettingsError is one
        checks = [fail("settings", str(error), "")]
    else:
        checks = examine.examine(
            environ,
            readings.machine(),
            server,
            api_key,
            guard_bytes=int(guard_gib * GIB),
            path=path,
            bytes_each=bytes_each,
        )
    if as_json:
        print(json.dumps(as_data(checks), indent=1))
    else:
        show(checks)
    raise typer.Exit(1 if any(check.level is Level.FAIL for check in checks) else 0)


def _wrong(path: str, guard_gib: float, bytes_each: float | None) -> Iterator[Check]:
    """A failed check for each option that nothing can be worked out with."""
    if path and path not in paths.PATHS:
        yield fail("options", f"--path {path}: no such path; accepted: {', '.join(paths.PATHS)}", "")
    least, most = measured_before.LEAST_BYTES_PER_PAIR, measured_before.MOST_BYTES_PER_PAIR
    for option, value, low, high in (
        ("--guard-gib", guard_gib, 0, values.MOST_GIB),
        ("--bytes", least if bytes_each is None else bytes_each, least, most),
    ):
        try:
            values.number(value, low, high)
        except ValueError as error:
            yield fail("options", f"{option} {error}", "")


def as_data(checks: list[Check]) -> dict[str, object]:
    """The checks as plain JSON values: those that came to a verdict, and those that had nothing to go by."""
    return {
        "ok": not any(check.level is Level.FAIL for check in checks),
        "checks": [
            {"name": c.name, "level": c.level.value, "reason": c.reason, "cure": c.cure}
            for c in checks
            if c.level is not Level.NOT_CHECKED
        ],
        "not_checked": [{"name": c.name, "reason": c.reason} for c in checks if c.level is Level.NOT_CHECKED],
    }


def show(checks: list[Check]) -> None:
    """A table, and a line that sums it up."""
    rows = [(c.name, c.level.value, c.reason + (f" -> {c.cure}" if c.cure else "")) for c in checks]
    tables.show(("check", "", "what was found -> what to do"), [rows], title="DynChunk doctor")
    print(", ".join(f"{sum(c.level is level for c in checks)} {level.value}" for level in Level))


if __name__ == "__main__":
    app(prog_name="dynchunk doctor")
