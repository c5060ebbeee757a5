"""`./dynchunk collect`."""

from __future__ import annotations

import datetime as dt
import io
import os
import sys
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from launcher import address, dotenv
from scripts.collect import gather, scrub

ROOT = Path(__file__).resolve().parents[2]

HELP = """Write an archive to send with a report of a problem.

In it: settings, versions, what doctor says, what the server says of itself, DynChunk's metrics and lines of the log,
and memguard's last report. Keys, tokens and passwords are taken out; of the log only DynChunk's lines, prefills and the
last traceback are kept. Look into it before you send it.

Exit codes: 0 written; 1 not written.
"""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command(help=HELP)
def collect(
    out: Annotated[
        Path | None, typer.Option(help="The archive to write.", show_default="dynchunk-DATE-TIME.tar.gz here")
    ] = None,
    log: Annotated[
        str, typer.Option(help="The server's log; - reads it from the pipe (docker compose logs server | ...).")
    ] = "",
    report: Annotated[
        Path | None, typer.Option(help="A memguard folder.", show_default="the newest under logs/")
    ] = None,
    settings_file: Annotated[
        Path | None, typer.Option("--env-file", help="Settings in a file, as for serve.", show_default=".env")
    ] = None,
    url: Annotated[str, typer.Option(help="The server's address.", show_default="http://HOST:PORT")] = "",
) -> None:
    """Gather, scrub, write."""
    now = dt.datetime.now().astimezone()
    name = f"dynchunk-{now:%Y%m%d-%H%M%S}"
    path = out or Path(f"{name}.tar.gz")
    try:
        environ = dotenv.merged(os.environ, settings_file).environ
        secrets = scrub.known_secrets(environ)
        parts = gather.parts(
            environ,
            gather.Server(url.rstrip("/") or address.server_url(environ), address.api_key(environ)),
            report or gather.latest_report(ROOT / "logs"),
            read_log(log),
            secrets,
        )
        refuse_secrets(parts, secrets)
        write(path, name, parts, now.timestamp())
    except (OSError, ValueError) as error:  # SettingsError is a ValueError
        print(f"dynchunk collect: not written: {error}", file=sys.stderr)
        raise typer.Exit(1) from error
    for part, text in parts.items():
        print(f"{len(text):>9,} {part}")
    print(f"{path}: look into it, then send it")


def read_log(name: str) -> Iterable[str] | None:
    """The lines of a log. Raises OSError where there is no such file."""
    if not name:
        return None
    return sys.stdin if name == "-" else Path(name).read_text(encoding="utf-8", errors="replace").splitlines()


def refuse_secrets(parts: dict[str, str], secrets: set[str]) -> None:
    """The last look. Raises ValueError where a known secret is in any part all the same."""
    left = [part for part, text in parts.items() if any(secret in text for secret in secrets)]
    if left:
        raise ValueError(f"a secret is still in {', '.join(left)}")


def write(path: Path, folder: str, parts: dict[str, str], when_s: float) -> None:
    """The archive: every part as a file in one folder."""
    with tarfile.open(path, "w:gz") as archive:
        for part, text in parts.items():
            data = text.encode()
            entry = tarfile.TarInfo(f"{folder}/{part}")
            entry.size, entry.mtime, entry.mode = len(data), int(when_s), 0o644
            archive.addfile(entry, io.BytesIO(data))


if __name__ == "__main__":
    app(prog_name="dynchunk collect")
