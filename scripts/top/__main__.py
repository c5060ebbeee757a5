"""`./dynchunk top`."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console, RenderableType
from rich.live import Live

from launcher import address, dotenv
from scripts.top import scrape, view

HELP = """Watch a running server: the long prefill in flight, its chunk, the use of the budget, memory, requests.

Everything comes from the server's own /metrics, so it must run with --enable-metrics. Ctrl-C ends it.

Exit codes: 0; 1 with --once when the server cannot be read.
"""
WIDTH_IN_A_PIPE = 120

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command(help=HELP)
def top(
    once: Annotated[bool, typer.Option("--once", help="Show it once and end.")] = False,
    interval_s: Annotated[float, typer.Option("--interval", min=0.1, help="Seconds between two looks.")] = 1.0,
    url: Annotated[
        str, typer.Option(help="The server's address.", show_default="http://HOST:PORT of the settings")
    ] = "",
    settings_file: Annotated[
        Path | None, typer.Option("--env-file", help="Settings in a file, as for serve.", show_default=".env")
    ] = None,
) -> None:
    """Look, show, again."""
    try:
        environ = dotenv.merged(os.environ, settings_file).environ
        server, api_key = url.rstrip("/") or address.server_url(environ), address.api_key(environ)
    except ValueError as error:  # SettingsError is one
        print(f"dynchunk top: {error}", file=sys.stderr)
        raise typer.Exit(1) from error
    console = Console(width=None if sys.stdout.isatty() else WIDTH_IN_A_PIPE)
    if once:
        try:
            console.print(view.render(scrape.parse(scrape.fetch(server, api_key)), server))
        except scrape.ScrapeError as error:
            print(f"dynchunk top: {error}", file=sys.stderr)
            raise typer.Exit(1) from error
        return
    # auto_refresh would redraw between two looks, with nothing new to show.
    with contextlib.suppress(KeyboardInterrupt), Live(console=console, auto_refresh=False) as live:
        while True:
            live.update(look(server, api_key), refresh=True)
            time.sleep(interval_s)


def look(server: str, api_key: str | None) -> RenderableType:
    """One look; a server that does not answer is waited for."""
    try:
        return view.render(scrape.parse(scrape.fetch(server, api_key)), server)
    except scrape.ScrapeError as error:
        return view.trouble(str(error), server)


if __name__ == "__main__":
    app(prog_name="dynchunk top")
