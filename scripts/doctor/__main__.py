"""`./dynchunk doctor`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from launcher import dotenv
from scripts.doctor import examine, memory_rules, readings
from scripts.doctor.verdict import GIB, Check, Level, fail

STYLES = {Level.OK: "green", Level.WARN: "yellow", Level.FAIL: "red", Level.NOT_CHECKED: "dim"}

HELP = """Is this machine and this setting safe for long prompts?

Reads the same environment as `serve`, the engine's package and the machine. Changes nothing, needs no GPU, imports
neither the engine nor torch. Run it where the engine runs (in the image) and on the host: each sees what the other
cannot.

Exit codes: 0 nothing fails; 1 a check fails; 2 a mistyped option.
"""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command(help=HELP)
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
    settings_file: Annotated[
        Path | None, typer.Option("--env-file", help="Settings in a file; what is set in the environment comes first.")
    ] = None,
    url: Annotated[str, typer.Option(help="Where a server may run already. Default: HOST and PORT.")] = "",
    guard_gib: Annotated[
        float, typer.Option(min=0.0, help="The MemAvailable at which memguard aborts.")
    ] = memory_rules.GUARD_BYTES / GIB,
    bytes_per_pair: Annotated[
        float, typer.Option(min=0.0, help="Bytes that one (row, key) takes; memguard measures it.")
    ] = memory_rules.BYTES_PER_PAIR,
) -> None:
    """Check, print, exit."""
    try:
        given = {name: value for name, value in os.environ.items() if value.strip()}
        environ = {**(dotenv.load(settings_file, given) if settings_file else {}), **given}
    except dotenv.DotenvError as error:
        checks = [fail("settings", str(error), "")]
    else:
        host = environ.get("HOST", "").strip()
        where = "127.0.0.1" if host in ("", "0.0.0.0", "::") else host  # noqa: S104 - compared, not bound
        checks = examine.examine(
            environ,
            readings.machine(),
            url.rstrip("/") or f"http://{where}:{environ.get('PORT', '').strip() or 30_000}",
            guard_bytes=int(guard_gib * GIB),
            bytes_per_pair=bytes_per_pair,
        )
    if as_json:
        print(json.dumps(as_data(checks), indent=1))
    else:
        show(checks, Console(width=None if sys.stdout.isatty() else 120))
    raise typer.Exit(1 if any(check.level is Level.FAIL for check in checks) else 0)


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


def show(checks: list[Check], console: Console) -> None:
    """A table, and a line that sums it up."""
    table = Table()
    table.add_column("check")
    table.add_column("", no_wrap=True)
    table.add_column("what was found, and what to do", overflow="fold")
    for check in checks:
        text = check.reason + (f"\n-> {check.cure}" if check.cure else "")
        table.add_row(check.name, f"[{STYLES[check.level]}]{check.level.value}", Text(text))
    console.print(table)
    counts = [f"{sum(c.level is level for c in checks)} {level.value}" for level in Level]
    console.print(", ".join(counts), markup=False)


if __name__ == "__main__":
    app(prog_name="dynchunk doctor")
