"""The project's `.env`, read as Docker Compose reads it, so that one file serves `docker compose up` and `./dynchunk`.

Quotes, comments, `export`, escapes and `$NAME` mean what they mean there (tests hold this against the real Compose).
Stricter in one point: text behind a closing quote is an error here, where Compose drops it without a word.
No message shows a value: there are keys among them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dynchunk.settings import SettingsError

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / ".env"

_NOTHING = re.compile(r"[ \t]*(?:#[^\n]*)?(?:\n|\Z)")
_NAME = re.compile(r"[ \t]*(?:export[ \t]+)?(?P<name>[\w.-]+)[ \t]*(?:(?P<sign>[=:])[ \t]*|(?=\n|\Z))")
_SINGLE = re.compile(r"'(?P<text>(?:\\'|[^'\\]|\\(?!'))*)'")
_DOUBLE = re.compile(r'"(?P<text>(?:\\.|[^"\\])*)"', re.DOTALL)
_EXPANSION = re.compile(
    r"\$(?:(?P<escaped>\$)|(?P<plain>[A-Za-z_]\w*)|\{(?P<name>[A-Za-z_]\w*)(?:(?P<how>:?[-+?])(?P<other>[^${}]*))?\}"
    r"|(?P<broken>\{))"
)
_ESCAPES = {"a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"} | {c: c for c in '"\\$'}


class DotenvError(SettingsError):
    """The file cannot be read as Compose would read it. The message names the file, the line and the cure."""


@dataclass(frozen=True)
class Merged:
    """An environment with a file's settings beneath it. `names`: those that the file has set."""

    environ: dict[str, str]
    names: frozenset[str] = frozenset()
    path: Path | None = None


def merged(environ: Mapping[str, str], path: Path | None = None) -> Merged:
    """The environment, and under it what a file sets: the project's `.env` where there is one, or `path`.

    A variable of the environment wins, as in Compose, even an empty one: that is how a line of the file is turned off.
    Raises DotenvError as `load` does, and where `path` is no file: only the implicit `.env` may be absent.
    """
    # Empty counts as unset, also for programs that see it otherwise: HF_HOME= would be the current folder.
    found = {
        name: value for name, value in load(path or FILE, environ, asked_for=path is not None).items() if value.strip()
    }
    names = frozenset(found) - frozenset(environ)
    return Merged({**found, **environ}, names, (path or FILE) if names else None)


def load(path: Path, environ: Mapping[str, str], *, asked_for: bool = False) -> dict[str, str]:
    """The variables that a file sets; none if there is no such file (a folder is none). Raises DotenvError.

    environ: what a `$NAME` in the file means first; it wins over the file itself, as in Compose. asked_for: it is the
    operator's --env-file, which has to be there.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            text = file.read()
    except FileNotFoundError:
        if asked_for:
            raise DotenvError([f"--env-file {path}: there is no such file"]) from None
        return {}
    except IsADirectoryError:
        if asked_for:
            raise DotenvError([f"--env-file {path}: it is a folder; name the file in it: {path / '.env'}"]) from None
        return {}
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no text in UTF-8"
        raise DotenvError([f"{path} cannot be read: {reason}"]) from error
    return parse(text, environ, str(path))


def parse(text: str, environ: Mapping[str, str], name: str = ".env") -> dict[str, str]:
    """`load` for the text of a file. `name` is what messages call it. Raises DotenvError for the first mistake.

    Only the first: after a quote that is not closed, nothing that follows is what it looks like.
    """
    found: dict[str, str] = {}
    text = text.removeprefix("\ufeff").replace("\r\n", "\n")
    if "\0" in text:
        raise DotenvError([f"{name} cannot be read: it is no text in UTF-8"])
    position = 0
    while position < len(text):
        skipped = _NOTHING.match(text, position)
        if skipped:
            position = skipped.end()
            continue
        line = f"{name}, line {text.count(chr(10), 0, position) + 1}"
        match = _NAME.match(text, position)
        if match is None:
            raise DotenvError([f"{line}: not NAME=VALUE"])
        position = match.end()
        # A name alone means the environment's value, which the process has anyway.
        if match["sign"]:
            try:
                found[match["name"]], position = _value(text, position, {**found, **environ})
            except ValueError as error:
                raise DotenvError([f"{line}, {match['name']}: {error}"]) from None
    return found


def _value(text: str, start: int, known: Mapping[str, str]) -> tuple[str, int]:
    """(the value that begins at `start`, where the next line begins). Quoted text may go on over lines."""
    quote = text[start : start + 1]
    if quote not in ("'", '"'):
        plain, newline, _ = text[start:].partition("\n")
        value = plain.rstrip().partition(" #")[0].rstrip()
        return _expanded(value, known, escapes=False), start + len(plain) + len(newline)
    match = (_SINGLE if quote == "'" else _DOUBLE).match(text, start)
    if match is None:
        raise ValueError(f"the closing {quote} is missing")
    rest = _NOTHING.match(text, match.end())
    if rest is None:
        raise ValueError(f"there is more text behind the closing {quote}; quote all of the value, or nothing of it")
    if quote == "'":
        return match["text"].replace("\\'", "'"), rest.end()
    return _expanded(match["text"], known, escapes=True), rest.end()


def _expanded(text: str, known: Mapping[str, str], *, escapes: bool) -> str:
    r"""`$NAME`, `${NAME:-other}` and their kin replaced; in double quotes also `\n`, `\$` and the like."""
    parts = []
    position = 0
    while position < len(text):
        char = text[position]
        if escapes and char == "\\" and position + 1 < len(text):
            follower = text[position + 1]
            parts.append(_ESCAPES.get(follower, char + follower))
            position += 2
        elif char == "$" and (match := _EXPANSION.match(text, position)):
            parts.append(_meaning(match, known))
            position = match.end()
        else:
            parts.append(char)
            position += 1
    return "".join(parts)


def _meaning(match: re.Match[str], known: Mapping[str, str]) -> str:
    if match["escaped"]:
        return "$"
    if match["broken"]:
        raise ValueError("${ is not followed by NAME} or NAME:-OTHER}; in single quotes a $ is only a $")
    name = match["plain"] or match["name"]
    how, other = match["how"] or "", match["other"] or ""
    value = known.get(name)
    usable = bool(value) if how.startswith(":") else value is not None
    if how.endswith("?") and not usable:
        raise ValueError(f"{name} is not set: {other}")
    if how.endswith("+"):
        return other if usable else ""
    if usable and value is not None:
        return value
    return other if how.endswith("-") else value or ""
