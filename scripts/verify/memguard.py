"""Ramp prompt sizes against a running server and stop before the host runs out of memory."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, NoReturn

import httpx
import typer
from rich.console import Console
from rich.markup import escape

from dynchunk import values
from dynchunk.shortened import shortened
from launcher import address
from launcher.environment import MOST_TOKENS
from scripts.ending import end_once
from scripts.verify import attach as attaching
from scripts.verify import records
from scripts.verify import replay as replaying
from scripts.verify.decide import GIB, ORDINARY_GUARD_BYTES
from scripts.verify.errors import EXIT_ERROR, EXIT_INTERRUPTED, MemguardError
from scripts.verify.options import Options, Surroundings
from scripts.verify.redact import redacted_command
from scripts.verify.session import run_memguard
from scripts.verify.side_by_side import render

DEFAULT_SIZES = "64k,96k,128k,160k,200k,256k,320k,400k,500k"
DEFAULT_GUARD_GIB = ORDINARY_GUARD_BYTES / GIB
LONGEST_S = 10**7  # four months; a thread cannot wait much longer
PROGRAM = "dynchunk memguard"
_USAGE_ERROR = 2  # how typer ends on a mistyped option
_SIZE = re.compile(r"(\d+(?:\.\d+)?)([km]?)", re.IGNORECASE)
_POWERS = {"": 1, "k": 1_000, "m": 1_000_000}

HELP = """Ramp prompt sizes against an SGLang server, and stop before the host runs out of memory.

One prompt at a time, each of new random tokens, the server's cache emptied in between. A thread reads MemAvailable ten
times a second from before the first prompt; below the guard, or when memory falls so fast that the guard is less than
3 s away, it aborts the request through the server. If neither the request ends nor memory comes back within 5 s, the
engine gets SIGTERM, and after 5 s more SIGKILL. A size that the sizes before lead to expect below the guard is not
tried. The report, its data and plots are in logs/profile-DATE.

Run it on the server's machine, with the server to yourself. Settings come from the environment and, under it, from the
.env beside dynchunk, or from the file that `dynchunk memguard --env-file FILE` names.

\b
  dynchunk memguard                                 ramp against the server
  dynchunk memguard --launch -- ./dynchunk serve    start it guarded, ramp, end it
  dynchunk memguard --attach                        watch beside it, until Ctrl-C
  dynchunk memguard --replay FILE.jsonl             decide on these readings
  dynchunk memguard --compare OLD NEW               two reports side by side

Exit codes: 0 all sizes passed, or quiet; 2 the guard tripped, or a size would have crossed it; 1 an error, or a size
that could not run (above the context length); 130 interrupted. Whatever was measured is kept in each case.
"""

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    # What stands behind the first word of the engine's command is the engine's.
    context_settings={"allow_interspersed_args": False},
)


class _UsageSeen:
    """Whether the options were accepted, so that typer's exit code for a mistyped one cannot pass for the guard's."""

    accepted = False


@app.command(help=HELP)
def memguard(  # noqa: PLR0917 - typer makes an option of each
    context: typer.Context,
    command: Annotated[
        list[str] | None, typer.Argument(help="With --launch: what starts the engine.", show_default=False)
    ] = None,
    sizes: Annotated[str, typer.Option(help="Prompt sizes in tokens, by commas; 64k is 64,000.")] = DEFAULT_SIZES,
    guard_gib: Annotated[
        float | None,
        typer.Option(
            envvar="GUARD_GIB",
            help="Abort when MemAvailable is below this.",
            min=0.0,
            show_default=f"{DEFAULT_GUARD_GIB:g}",
        ),
    ] = None,
    headroom_gib: Annotated[
        float | None,
        typer.Option(
            help="Instead: abort when MemAvailable is this much below what it was before the first prompt, so that a "
            "laptop can rehearse a machine with that much to spare.",
            min=0.0,
            show_default=False,
        ),
    ] = None,
    own_memory: Annotated[
        bool,
        typer.Option(
            "--own-memory",
            help="With --headroom-gib: judge what the engine's own processes take instead of what the whole host has "
            "left, for a rehearsal on a machine that does other work. Below "
            f"{DEFAULT_GUARD_GIB:g} GiB the host counts all the same.",
        ),
    ] = False,
    start_guard_gib: Annotated[
        float | None,
        typer.Option(
            help="With --launch or --attach: the guard while the engine starts and loads.",
            min=0.0,
            show_default=f"--guard-gib, else {DEFAULT_GUARD_GIB:g}",
        ),
    ] = None,
    url: Annotated[
        str | None, typer.Option(help="The server.", show_default="http://HOST:PORT of the environment")
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(envvar="API_KEY", help="The server's API key. Never shown or written.", show_default=False),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            envvar="DYNCHUNK_TRACE",
            help="The file the server writes DYNCHUNK_TRACE to, as seen from here. Found by itself where the server "
            "names one that is on this machine.",
            show_default=False,
        ),
    ] = None,
    server_log: Annotated[
        Path | None,
        typer.Option(help="The server's log: tells the chunk sizes where there is no trace.", show_default=False),
    ] = None,
    label: Annotated[
        str | None, typer.Option(help="What the report calls this run.", show_default="dynchunk, or stock")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The report's folder, new or empty.", show_default="logs/profile-DATE")
    ] = None,
    append: Annotated[
        Path | None,
        typer.Option(
            help="Add this run to the report in a folder that memguard wrote: both side by side in tables and plots.",
            show_default=False,
        ),
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds for one prompt.", min=1.0)] = 3600.0,
    launch: Annotated[bool, typer.Option("--launch", help="Start the engine: -- COMMAND, as last option.")] = False,
    attach: Annotated[bool, typer.Option("--attach", help="Watch beside the engine; no prompt is sent.")] = False,
    replay: Annotated[
        Path | None,
        typer.Option(
            help="Decide again on the readings in a file, such as a report's samples.jsonl.", show_default=False
        ),
    ] = None,
    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option(help="Two reports, old and new: their folders, or one run.json of each.", show_default=False),
    ] = None,
    signals: Annotated[
        bool,
        typer.Option("--signals/--no-signals", help="Whether the engine may be ended where aborting is not enough."),
    ] = True,
    past_projection: Annotated[
        bool, typer.Option("--past-projection", help="Try a size although the guard is expected to trip.")
    ] = False,
    image: Annotated[
        str | None,
        typer.Option(envvar="BASE_IMAGE", help="The image the engine runs in, for the report.", show_default=False),
    ] = None,
) -> None:
    """Read the options; the work is in session.py, attach.py, replay.py and side_by_side.py."""
    _UsageSeen.accepted = True
    try:
        _refuse_both(out=out, append=append)
        _refuse_both(replay=replay, compare=compare, attach=attach or None)
        _refuse_both(replay=replay, compare=compare, launch=launch or None)
        _refuse_endless(
            guard_gib=guard_gib, headroom_gib=headroom_gib, start_guard_gib=start_guard_gib, timeout=timeout
        )
        start_gib = start_guard_gib if start_guard_gib is not None else guard_gib
        start_guard_bytes = round((DEFAULT_GUARD_GIB if start_gib is None else start_gib) * GIB)
        guard_bytes = _guard_bytes(guard_gib, headroom_gib, typed=_is_typed(context, "guard_gib"))
        ramp = not (replay or attach)
        _refuse_unfit(launch=launch, command=command, headroom=guard_bytes is None, ramp=ramp)
        if own_memory:
            _refuse_own_memory(headroom=guard_bytes is None, ramp=ramp and compare is None)
        console = Console()
        if compare is not None:
            print(render(*map(records.load_named, compare)), end="")
            raise typer.Exit
        if replay is not None:
            raise typer.Exit(
                replaying.run(replay, console, guard_bytes=guard_bytes or 0, start_guard_bytes=start_guard_bytes)
            )
        options = Options(
            url=server_url(url, os.environ),
            sizes_tokens=parse_sizes(sizes),
            command=redacted_command(PROGRAM, sys.argv[1:], api_key),
            api_key=sendable_key(api_key),
            guard_bytes=guard_bytes,
            headroom_bytes=None if headroom_gib is None else round(headroom_gib * GIB),
            label=label,
            trace=trace,
            server_log=server_log,
            timeout_s=timeout,
            out=out,
            append=append,
            start_guard_bytes=start_guard_bytes,
            launch=tuple(command or ()),
            signals=signals,
            past_projection=past_projection,
            own_memory=own_memory,
            image=image or None,
        )
        around = Surroundings(console)
        code = attaching.run(options, around) if attach else run_memguard(options, around)
    except MemguardError as error:
        Console(stderr=True).print(f"[bold red]memguard:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        code = error.exit_code
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    raise typer.Exit(code)


def parse_sizes(text: str) -> tuple[int, ...]:
    """'64k, 96k,500000' -> sizes in tokens, each once, smallest first. Raises MemguardError naming what is wrong."""
    sizes = set()
    wrong = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        match = _SIZE.fullmatch(part.replace("_", ""))
        tokens = float(match[1]) * _POWERS[match[2].lower()] if match else 0.0
        if not 1 <= tokens <= MOST_TOKENS:
            wrong.append(shortened(part))
            continue
        sizes.add(round(tokens))
    if wrong or not sizes:
        raise MemguardError(
            f"--sizes {shortened(repr(text))}: {', '.join(wrong) or 'nothing'} is no number of tokens from 1 to "
            f"{MOST_TOKENS:,}; write 64k,96k,128000"
        )
    return tuple(sorted(sizes))


def server_url(given: str | None, environ: Mapping[str, str]) -> str:
    """The address to ask: --url, else HOST and PORT as every command reads them. Raises MemguardError."""
    try:
        if given is None:
            return address.server_url(environ)
        parts = httpx.URL(given.strip().rstrip("/"))
        if parts.scheme in ("http", "https") and parts.host and (parts.port or 1) < 2**16:
            return str(parts)
    except httpx.InvalidURL:
        pass
    except ValueError as error:
        raise MemguardError(str(error)) from None
    raise MemguardError(f"{address.without_user_info(str(given))!r} is not an address like http://127.0.0.1:30000")


def sendable_key(given: str | None) -> str | None:
    """The key without the blanks around it, None for an empty one. Raises MemguardError, which does not repeat it."""
    try:
        return address.key(given.strip()) if given and given.strip() else None
    except ValueError as error:
        raise MemguardError(f"API_KEY or --api-key: {error}") from None


def _refuse_endless(**options: float | None) -> None:
    """Typer takes `inf` and `nan` for numbers; no reading is ever below nan, so such a guard would never trip."""
    for name, value in options.items():
        try:
            values.number(0 if value is None else value, 0, LONGEST_S if name == "timeout" else values.MOST_GIB)
        except ValueError as error:
            raise MemguardError(f"--{name.replace('_', '-')} {error}; write one like 1.5") from None


def _refuse_both(**options: object) -> None:
    given = [name for name, value in options.items() if value is not None]
    if len(given) > 1:
        names = " and ".join("--" + name.replace("_", "-") for name in given)
        raise MemguardError(f"{names}: give one of them")


def _refuse_unfit(*, launch: bool, command: list[str] | None, headroom: bool, ramp: bool) -> None:
    if launch != bool(command):
        raise MemguardError("--launch takes the engine's command behind it: --launch -- ./dynchunk serve")
    if headroom and not ramp:
        raise MemguardError("--headroom-gib is for a ramp, which knows its baseline; give --guard-gib")


def _refuse_own_memory(*, headroom: bool, ramp: bool) -> None:
    if not ramp:
        raise MemguardError("--own-memory is for a ramp, which rehearses; leave it out, or the other mode")
    if not headroom:
        raise MemguardError(
            "--own-memory is for a rehearsal, and a host that serves is judged by what it has left; give "
            "--headroom-gib, the room that the rehearsed machine has, or leave --own-memory out"
        )


def _guard_bytes(guard_gib: float | None, headroom_gib: float | None, *, typed: bool) -> int | None:
    """The guard; None where the headroom says it. typed: --guard-gib is no GUARD_GIB, over which a flag wins."""
    _refuse_both(guard_gib=guard_gib if typed else None, headroom_gib=headroom_gib)
    if headroom_gib is None:
        return round((DEFAULT_GUARD_GIB if guard_gib is None else guard_gib) * GIB)
    return None


def _is_typed(context: typer.Context, option: str) -> bool:
    """Whether an option's value is of the command line. By its name, as click's own enum moves between versions."""
    source = context.get_parameter_source(option)
    return source is not None and source.name == "COMMANDLINE"


def main() -> NoReturn:
    """Run the program. However it is told to end, no request goes on and what was measured is written down."""
    end_once()
    try:
        app(prog_name=PROGRAM)
    except SystemExit as ended:
        usage_error = ended.code == _USAGE_ERROR and not _UsageSeen.accepted
        sys.exit(EXIT_ERROR if usage_error else ended.code)
    sys.exit(os.EX_OK)


if __name__ == "__main__":
    main()
