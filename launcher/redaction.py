"""Which names hold a secret, and commands and texts without their values: for every tool that shows or writes some."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from dynchunk.values import parsed
from launcher.address import without_user_info
from launcher.flags import could_mean, name_of

HIDDEN = "***"
# What the engine keeps secrets in, by its full name, because a flag may be shortened.
SECRET_FLAGS = ("--api-key", "--admin-api-key", "--ssl-keyfile-password")

_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
# In lower case and with `_` between words: enough wherever it stands, and enough at the end (API_KEY_FILE, HF_TOKEN_2).
_SECRET_ANYWHERE = re.compile(
    r"(?:api|access|private|account)_?key|secret|passw|passphrase|credential|authorization"
    r"|(?:api|auth|access|refresh|bearer|session|hf|hub)_?token(?![a-z])"
)
# `tokens` are counted and a figure is per token; any other `token` is kept secret.
_SECRET_END = re.compile(
    r"(?:keys?|(?<!per_)(?<!first_)(?<!next_)(?<!new_)(?<!cached_)token|cookies?|jwt|(?:^|_)(?:auth|bearer|creds?|pat|sig|signature)"
    r"|(?:^|_|db|user|admin|root|smtp|sql)(?:pass|pwd))(?:_?\d+)?$|(?:api|auth|access|refresh|bearer|hf)_?tokens$"
)

# A name and what joins it to its value: an assignment, a member of JSON or Python, a header, a flag, a pair in a list.
_NAMED = re.compile(
    r"""(?P<open>\\{0,15}["'])?(?<![\w.#-])(?:-{1,2}(?:env|header|build-arg)[= ]|-[eH][ ]?(?=[A-Z]))?
    (?P<name>\#?(?P<flag>-{1,2})?[A-Za-z_][\w.-]*)(?P<close>\\{0,15}["'])?
    (?P<sep>(?:\s*\])?[ \t]*(?:=>|:=|==?|:)[ \t]*(?:\n[ \t]*(?=[\["'{]))?
    | (?(close)\s*,\s*|(?(flag)(?:\s*,\s*|[ \t]+)|(?!))))""",
    re.VERBOSE,
)
_QUOTE = re.compile(r"""(?:\b[bBfFrRuU]{1,2})?(?P<slashes>\\{0,15})(?P<quote>["'])""")
_NO_SECRET = re.compile(
    r"""(?:none|null|true|false|not\ set|set,\ not\ shown|(?P<empty>\\{0,15}["'])(?P=empty))(?=[\s,;)\]}"'\\]|$)""",
    re.VERBOSE | re.IGNORECASE,
)
_NUMBER = re.compile(r"\d[\d.,_]*(?:e[+-]?\d+)?(?![\w-])", re.IGNORECASE)
_LINE_START = re.compile(
    r"(?:[\w.-]+ *\| ?)?[\s>*<|#+-]*"
    r"(?:(?:export|set|env|declare -x|ENV|ARG)\s+|-{1,2}(?:env|header|build-arg)[= ]|-[eH] ?)?"
)
_TO_BLANK = re.compile(r"""(?:"[^"\n]*"|'[^'\n]*'|\\.|\S)*""")
_TO_LINE_END = re.compile(r"[^\n]*")
_TO_MEMBER_END = re.compile(r"[^,}\])\n]*")
_TO_QUOTE = re.compile(r"""(?:(?!\\{0,15}["'](?:[\s,;:)\]}]|$))[^\n])*""")
_GLUED = re.compile(r"""\\?["']|[\w@%+/$.-]\S*""")
_BRACKETS = {"[": "]", "{": "}", "(": ")"}
_BRACKET_OR_QUOTE = re.compile(r"""[\[\](){}]|\\{0,15}["']""")
LONGEST_BRACKET = 20_000


class Named(NamedTuple):
    """Where the value of a secret's name stands in a text, and the quote that its replacement needs."""

    start: int
    end: int
    quote: str


def is_secret_name(name: str) -> bool:
    """Whether a variable, a member of JSON, a header or a flag of this name holds a secret."""
    words = re.sub(r"[^A-Za-z0-9]+", "_", _CAMEL.sub("_", name)).strip("_").lower()
    return bool(_SECRET_ANYWHERE.search(words) or _SECRET_END.search(words))


def without_secrets(words: Sequence[str]) -> list[str]:
    """A command line that may be shown: no keys, no passwords of URLs, no secrets in variables, headers or JSON."""
    return [shown for shown, _ in _looked_through(words)]


def secrets_in(words: Sequence[str]) -> set[str]:
    """The values that a command line names as secrets."""
    return {secret for _, secrets in _looked_through(words) for secret in secrets}


def without_named(text: str) -> str:
    """Any text with *** for the values whose name says that they are secret."""
    shown, done = "", 0
    for value in _named(text):
        shown += f"{text[done : value.start]}{value.quote}{HIDDEN}{value.quote}"
        done = value.end
    return shown + text[done:]


def is_count(name: str, value: object) -> bool:
    """Whether it is a figure after all: keys of a cache, #new-token."""
    return (name.lower().endswith("keys") or name.startswith("#")) and bool(_NUMBER.fullmatch(str(value)))


def _looked_through(words: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Each word as it may be shown, with what was hidden in it."""
    hide_next = False
    for word in words:
        name, equals, value = word.partition("=")
        secret = _is_secret(name) and re.fullmatch(r"[\w.-]+", name) is not None
        hide_all = hide_next
        hide_next = secret and not equals and word.startswith("-") and not hide_next
        if hide_all:
            yield HIDDEN, [word]
        elif secret and equals:
            yield f"{name}={HIDDEN}", [value]
        else:
            hidden = [leaf for found in _named(word) for leaf in _leaves(word[found.start : found.end])]
            yield without_user_info(without_named(word)), hidden


def _is_secret(name: str) -> bool:
    return is_secret_name(name) or (name.startswith("--") and bool(could_mean(name_of(name), SECRET_FLAGS)))


def _leaves(value: str) -> list[str]:
    """The secrets in the text of one value: a string's inside, a list's members."""
    try:
        return list(_strings(parsed(value)))
    except (ValueError, RecursionError):
        return [value.strip("\"'\\")]


def _strings(data: Any) -> Iterator[str]:
    if isinstance(data, (list, dict)):
        for member in data.values() if isinstance(data, dict) else data:
            yield from _strings(member)
    elif data is not None and not isinstance(data, bool):
        yield str(data)


def _named(text: str) -> Iterator[Named]:
    """Every value with a secret's name, in order and apart from each other."""
    position = 0
    while found := _NAMED.search(text, position):
        position = found.end()
        if not _holds_secret(text, found):
            # The next name may be what looked like this one's value.
            position = found.start("sep") + 1
            continue
        opening = _QUOTE.match(text, position)
        quote = text[opening.start("slashes") : opening.end()] if opening else found["close"] or ""
        position = max(_value_end(text, found), position)
        if position > found.end():
            yield Named(found.end(), position, "" if _inside_quotes(found) else quote)


def _holds_secret(text: str, found: re.Match[str]) -> bool:
    name, joined = found["name"], found["sep"].strip(" \t\n]")
    if not _is_secret(name) or _NO_SECRET.match(text, found.end()):
        return False
    if not joined or joined == ",":
        return name.startswith("-") or (joined == "," and found["close"] is not None)
    number = _NUMBER.match(text, found.end())
    prose = name == "keys" and joined == ":" and not found["close"]  # "rows x keys: ..."
    return not (prose or (number and is_count(name, number[0])))


def _inside_quotes(found: re.Match[str]) -> bool:
    """Whether name and value are within one pair of quotes, as in 'X-API-Key: value'."""
    return bool(found["open"]) and not found["close"]


def _value_end(text: str, found: re.Match[str]) -> int:
    """Where the value that begins at the end of `found` ends; rather too late than too early."""
    start = found.end()
    if _inside_quotes(found):
        whole = _quoted_end(text, found.start("open"))
        if whole >= start:
            return whole - len(found["open"])
    if _QUOTE.match(text, start):
        return _glued_end(text, start, _quoted_end(text, start))
    if text[start : start + 1] in _BRACKETS:
        return _glued_end(text, start, _bracket_end(text, start))
    return _after(_bare(text, found), text, start)


def _bare(text: str, found: re.Match[str]) -> re.Pattern[str]:
    """What a value without quotes is made of: a header's reaches to the end of its line, a variable's to a blank."""
    joined = found["sep"].strip(" \t\n]")
    if found["close"] or joined == ",":
        return _TO_MEMBER_END
    line_start = text.rfind("\n", 0, found.start()) + 1
    if joined and _LINE_START.fullmatch(text, line_start, found.start("name")):
        return _TO_LINE_END
    return _TO_QUOTE if joined == ":" else _TO_BLANK


def _after(pattern: re.Pattern[str], text: str, start: int) -> int:
    found = pattern.match(text, start)
    return found.end() if found else start


def _quoted_end(text: str, start: int) -> int:
    """The end of the quoted text at `start`, -1 without one on its line. The closing quote has as many backslashes as
    the opening one: within JSON's strings those of quoted quotes have more.
    """
    opening = _QUOTE.match(text, start)
    if opening is None:
        return -1
    closing = re.compile(rf"(?<!\\){re.escape(opening['slashes'])}{opening['quote']}")
    found = closing.search(text, opening.end(), _after(_TO_LINE_END, text, start))
    return found.end() if found else -1


def _bracket_end(text: str, start: int) -> int:
    """The end of the list or dict at `start`, -1 without one."""
    expected = [_BRACKETS[text[start]]]
    position = start + 1
    while expected and (found := _BRACKET_OR_QUOTE.search(text, position, start + LONGEST_BRACKET)):
        position = found.end()
        if found[0] in _BRACKETS:
            expected.append(_BRACKETS[found[0]])
        elif found[0] == expected[-1]:
            expected.pop()
        elif found[0][-1] in "\"'":
            position = max(_quoted_end(text, found.start()), position)
    return -1 if expected else position


def _glued_end(text: str, start: int, end: int) -> int:
    """`end`, or where the value goes on behind it as in 'a'"b"c, the end of that; the line's where `end` is none."""
    if end < 0:
        return _after(_TO_LINE_END, text, start)
    while more := _GLUED.match(text, end):
        quote = more[0][-1] in "\"'" and len(more[0]) <= 2
        end = max(_quoted_end(text, more.end() - 1), more.end()) if quote else more.end()
    return end
