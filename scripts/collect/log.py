"""What of a server's log may be sent: DynChunk's lines, prefills and the last traceback. Pure.

The engine logs requests with their prompts where it is told to, so a line is kept for how it begins, never for what is
somewhere in it, and a traceback ends where Python ends it.
"""

from __future__ import annotations

import builtins
import re
from collections.abc import Callable, Iterable

LOG_LINES = 2000
TRACEBACK_LINES = 80
# An exception's message may quote what a request said.
EXCEPTION_CHARACTERS = 200
LINE_CHARACTERS = 500

_COLOUR = re.compile(r"\x1b\[[\d;]*m")
# What Compose, Docker or the journal write before a line.
_CARRIER = re.compile(
    r"(?:[\w.-]+ *\| ?)?(?:\d{4}-\d\d-\d\d[T ][\d:.,]+(?:Z|[+-][\d:]+)? |[A-Z][a-z]{2} [ \d]\d [\d:]{8} \S+ [^\s:]+: )?"
)
_STAMP = r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[^\]'\"]{0,60}\] "
_STAMPED = re.compile(_STAMP)
_OURS = re.compile(rf"(?:{_STAMP})?dynchunk(?: \[|-json:|: | serve: )")
_PREFILL = re.compile(rf"(?:{_STAMP})?Prefill batch\b")
# Of what the engine says before it nothing is kept. An exception group's are indented behind a bar.
_TRACEBACK = re.compile(
    rf"(?P<margin>(?: +[+|] )?)(?P<stamp>(?:{_STAMP})?)(?:[^'\"=]*: |Exception Group )?"
    r"(?P<said>Traceback \(most recent call last\):)$"
)
_STACK = re.compile(r"  File \"|  \[Previous line|    ")
_CHAIN = re.compile(r"(?:During handling of the above exception|The above exception was the direct cause)[\w ,]*:$")
_EXCEPTION = re.compile(r"(?P<name>[A-Za-z_][\w.]*)(?::.*)?$")


class LastTraceback:
    """Takes lines in their order and keeps the last traceback among them, with those it follows from."""

    def __init__(self, clean: Callable[[str], str]) -> None:
        """clean: takes secrets out of a message before it is cut, so that no half of one is left."""
        self.lines: list[str] = []
        self._clean = clean
        self._open = False
        self._follows = False
        self._margin = ""

    def take(self, line: str) -> None:
        """One line, without what carried it."""
        if found := _TRACEBACK.match(line):
            self.lines = [*(self.lines if self._follows else []), found["stamp"] + found["said"]]
            self._open, self._follows = True, False
            self._margin = found["margin"].replace("+", "|")
        elif self._open:
            self._stack(line.removeprefix(self._margin))
        elif _CHAIN.match(line) and self.lines:
            self.lines.append(line)
            self._follows = True
        elif line.strip():
            self._follows = False

    def _stack(self, line: str) -> None:
        if _STACK.match(line):
            self.lines.append(self._clean(line)[:LINE_CHARACTERS])
        elif not _STAMPED.match(line) and not _OURS.match(line):  # those are other processes' between two of these
            self._open = False
            found = _EXCEPTION.match(line)
            if found and _is_exception(found["name"]):
                self.lines.append(self._shortened(line))

    def _shortened(self, line: str) -> str:
        shown = self._clean(line)
        return shown if len(shown) <= EXCEPTION_CHARACTERS else f"{shown[:EXCEPTION_CHARACTERS]}..."


def _is_exception(name: str) -> bool:
    """Whether Python writes an exception's name so: a builtin one, or one with its module."""
    known = getattr(builtins, name, None)
    builtin = isinstance(known, type) and issubclass(known, BaseException)
    module, _, last = name.rpartition(".")
    return builtin or name.endswith(("Error", "Exception")) or bool(module and (last[:1].isupper() or last == "error"))


def log_text(lines: Iterable[str], clean: Callable[[str], str]) -> str:
    """What may be sent of a log. clean: takes secrets out of a text."""
    kept: list[str] = []
    traceback = LastTraceback(clean)
    for line in lines:
        text = _COLOUR.sub("", line.rstrip("\r\n"))
        inner = text[_end_of(_CARRIER, text) :]
        if _OURS.match(inner) or _PREFILL.match(inner):
            kept.append(text)
        traceback.take(inner)
    parts = [clean("\n".join(kept[-LOG_LINES:])) or "no line of DynChunk and no prefill in it"]
    if traceback.lines:
        parts.append("The last traceback:\n" + "\n".join(traceback.lines[-TRACEBACK_LINES:]))
    return "\n\n".join(parts) + "\n"


def _end_of(pattern: re.Pattern[str], text: str) -> int:
    found = pattern.match(text)
    return found.end() if found else 0
