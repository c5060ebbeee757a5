"""What DynChunk did in this process: one line for people and one JSON line for tools on stderr, and the same as data.

Lines go to stderr directly: when the hooks fire, SGLang has not configured logging yet and INFO would be dropped.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from contextlib import suppress
from importlib import metadata
from typing import Any

from dynchunk import __version__, settings
from dynchunk.activate import mode

APPLIED = "applied"
ABSENT = "absent"
ALREADY_LOWER = "already lower"
NO_DEVICE = "no device"
REFUSED = "refused"
WOULD_APPLY = "would apply"
NOT_IN_USE = "not in use"
UNTESTED = "untested version"
VERIFIED = "verified"
UNVERIFIED = "unverified on this device"

JSON_MARK = "dynchunk-json: "

_hooks: dict[str, dict[str, str]] = {}
_effective: dict[str, Any] = {}
_rank = ""
_written = False


def record(hook: str, outcome: str, detail: str = "") -> None:
    """Note the outcome of one hook. A hook noted after the line was written adds a line of its own."""
    entry = {"outcome": outcome, "detail": detail}
    if _hooks.get(hook) == entry:
        return
    _hooks[hook] = entry
    if _written:
        say(f"{hook}: {outcome}" + (f" ({detail})" if detail else ""))


def set_effective(rank: str, values: dict[str, Any]) -> None:
    """The budget, page and chunk sizes in force in this scheduler, as plain JSON values."""
    global _rank
    _rank = rank
    _effective.update(values)


def snapshot() -> dict[str, Any]:
    """Everything the journal knows, as plain JSON values."""
    return {
        "version": __version__,
        "engine": engine_version(),
        "mode": mode(),
        "pid": os.getpid(),
        "rank": _rank,
        "hooks": {name: dict(entry) for name, entry in sorted(_hooks.items())},
        "effective": dict(_effective),
    }


def write() -> None:
    """Write this process's two lines."""
    global _written
    _written = True
    now = snapshot()
    parts = [f"{now['mode']}, sglang {now['engine']}", *_hooks_in_words()]
    if "summary" in _effective:
        parts.append(_effective["summary"])
    say(f"{__version__} " + "; ".join(parts))
    _write(JSON_MARK + json.dumps(now) + "\n")


def note_untested(tested: tuple[str, ...]) -> None:
    """Mark an engine that meets every contract but is none of those DynChunk was tested with."""
    version = engine_version()
    if version not in tested:
        _effective["untested_version"] = version
        record("engine", UNTESTED, f"{version}; tested: {', '.join(tested)}")


def _hooks_in_words() -> list[str]:
    """The hooks by outcome. What this engine or model has no use for is only counted; the JSON line has it all."""
    by_outcome: dict[str, list[str]] = {}
    for name, entry in sorted(_hooks.items()):
        by_outcome.setdefault(entry["outcome"], []).append(name)
    return [
        f"{outcome}: {len(names)}" if outcome in (ABSENT, NOT_IN_USE) else f"{outcome}: {', '.join(names)}"
        for outcome, names in sorted(by_outcome.items())
    ]


def write_in_main_process() -> None:
    """Write the lines at import time where no scheduler will follow: the process that people start.

    SGLang's schedulers are spawned children; they write when they know the effective sizes. Told apart by name, which
    a spawned child has before it imports anything (its parent process it learns only later).
    """
    if multiprocessing.current_process().name == "MainProcess" and not _written:
        write()


def refuse(error: Exception) -> None:
    """Note and say why DynChunk does not go on."""
    reason = str(error) or type(error).__name__
    if not isinstance(error, (settings.SettingsError, RuntimeError)):
        reason = f"{type(error).__name__}: {reason}"
    _hooks["start"] = {"outcome": REFUSED, "detail": reason}
    if mode() == "report":
        say(f"{__version__} would refuse to start with sglang {engine_version()}: {reason}")
    else:
        say(
            f"{__version__} refuses to start with sglang {engine_version()}: {reason}\n"
            "dynchunk: DYNCHUNK_MODE=report shows what would be done and changes nothing; DYNCHUNK_MODE=off starts "
            "the stock engine"
        )
    _write(JSON_MARK + json.dumps(snapshot()) + "\n")


def say(message: str) -> None:
    """One line on stderr that names us and the process."""
    where = f"pid {os.getpid()}" + (f", {_rank}" if _rank else "")
    _write(f"dynchunk [{where}]: {message}\n")


def _write(text: str) -> None:
    # A log that nobody takes any more (a full disk, a dead pipe) must neither end a server nor change what it decides.
    with suppress(OSError, ValueError):
        sys.stderr.write(text)
        sys.stderr.flush()


def engine_version() -> str:
    """SGLang's version, from its package metadata or, in a source tree without any, from the module."""
    try:
        return metadata.version("sglang")
    except metadata.PackageNotFoundError:
        return str(getattr(sys.modules.get("sglang"), "__version__", "unknown"))
