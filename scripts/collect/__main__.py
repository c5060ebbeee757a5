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
TAKEN = "there is such a file already, and it stays as it is; name another, or move it away"

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
        refuse_out(path)
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
        write(path, packed(name, parts, now.timestamp()))
    except ValueError as error:  # SettingsError is one
        print(f"dynchunk collect: not written: {error}", file=sys.stderr)
        raise typer.Exit(1) from error
    for part, text in parts.items():
        print(f"{len(text):>9,} {part}")
    print(f"{path}: look into it, then send it")


def refuse_out(path: Path) -> None:
    """Before anything is gathered. Raises ValueError where no new file can be."""
    if path.is_dir():
        raise ValueError(f"--out {path}: it is a folder; name a file in it: {path / 'collected.tar.gz'}")
    if os.path.lexists(path):
        raise ValueError(f"--out {path}: {TAKEN}")
    if not path.parent.is_dir():
        raise ValueError(f"--out {path}: there is no folder {path.parent}; make it, or name another")


def read_log(name: str) -> Iterable[str] | None:
    """The lines of a log. Raises ValueError where it cannot be read."""
    if not name:
        return None
    if name == "-":
        return sys.stdin
    try:
        return Path(name).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        cure = "name the file that the server's output went to, or pipe it in with --log -"
        raise ValueError(f"--log {name}: {error.strerror}; {cure}") from None


def refuse_secrets(parts: dict[str, str], secrets: set[str]) -> None:
    """The last look. Raises ValueError where a known secret is in any part all the same."""
    left = [part for part, text in parts.items() if any(secret in text for secret in secrets)]
    if left:
        raise ValueError(f"a secret is still in {', '.join(left)}")


def packed(folder: str, parts: dict[str, str], when_s: float) -> bytes:
    """The archive: every part as a file in one folder."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w:gz") as archive:
        for part, text in parts.items():
            data = text.encode()
            entry = tarfile.TarInfo(f"{folder}/{part}")
            entry.size, entry.mtime, entry.mode = len(data), int(when_s), 0o644
            archive.addfile(entry, io.BytesIO(data))
    return made.getvalue()


def write(path: Path, data: bytes) -> None:
    """A new file with all of it, or none. Raises ValueError that says why there is none."""
    try:
        with path.open("xb") as file:
            try:
                file.write(data)
                file.flush()
            except BaseException:
                path.unlink()
                raise
    except FileExistsError:
        raise ValueError(f"--out {path}: {TAKEN}") from None
    except OSError as error:
        cure = "name a file in a folder that has room and that you may write to"
        raise ValueError(f"--out {path}: {error.strerror}; {cure}") from None


if __name__ == "__main__":
    app(prog_name="dynchunk collect")
