"""Every knob, declared once: type, limits, default, meaning.

The parser, the README table and `.env.example` all read the fields of `Settings`; a new knob is one new field.
Names are the field names in capitals behind `DYNCHUNK_`. An empty value counts as unset (compose files write
`DYNCHUNK_PAGE=${DYNCHUNK_PAGE:-}`). All wrong values are reported in one SettingsError. Not imported before SGLang is.
"""

from __future__ import annotations

import difflib
import functools
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from decimal import Decimal, InvalidOperation
from typing import Any

PREFIX = "DYNCHUNK_"
_SUFFIXES = {"K": 3, "M": 6, "G": 9, "T": 12}  # powers of ten
# What Kubernetes puts into every container of a namespace for a Service named `dynchunk` or `dynchunk-...`.
# By name and value: DYNCHUNK_PORT=30000 is an operator's mistake, DYNCHUNK_PORT=tcp://10.0.0.1:30000 is not.
_SERVICE_VARIABLES = (
    (re.compile(r"DYNCHUNK_(?:\w+_)?SERVICE_HOST"), re.compile(r"[0-9a-fA-F.:]+")),
    (re.compile(r"DYNCHUNK_(?:\w+_)?SERVICE_PORT(?:_\w+)?"), re.compile(r"\d+")),
    (re.compile(r"DYNCHUNK_(?:\w+_)?PORT(?:_\d+_(?:TCP|UDP|SCTP))?"), re.compile(r"(?:tcp|udp|sctp)://\S+:\d+")),
    (re.compile(r"DYNCHUNK_(?:\w+_)?PORT_\d+_(?:TCP|UDP|SCTP)_PROTO"), re.compile(r"tcp|udp|sctp")),
    (re.compile(r"DYNCHUNK_(?:\w+_)?PORT_\d+_(?:TCP|UDP|SCTP)_PORT"), re.compile(r"\d+")),
    (re.compile(r"DYNCHUNK_(?:\w+_)?PORT_\d+_(?:TCP|UDP|SCTP)_ADDR"), re.compile(r"[0-9a-fA-F.:]+")),
)


class SettingsError(ValueError):
    """One or more settings are wrong. `problems` has one complete sentence for each."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = problems
        super().__init__(
            problems[0]
            if len(problems) == 1
            else f"{len(problems)} settings are wrong:\n" + "\n".join(f"  - {p}" for p in problems)
        )


@dataclass(frozen=True)
class Kind:
    """How one knob is read: `parse` raises ValueError with what is wrong; `limits` says in words what is accepted.

    The value of a `secret` knob is shown nowhere, not even where it is refused.
    """

    parse: Callable[[str], Any]
    limits: str
    secret: bool = False


def knob(default: Any, kind: Kind, meaning: str, shown_default: str | None = None) -> Any:
    """A dataclass field that carries its parser and its documentation."""
    return field(
        default=default,
        metadata={"kind": kind, "meaning": meaning, "shown_default": shown_default},
    )


def choice(*allowed: str) -> Kind:
    """One of a few words, in any case."""

    def parse(text: str) -> str:
        if text.lower() not in allowed:
            raise ValueError("not one of " + ", ".join(allowed))
        return text.lower()

    return Kind(parse, " \\| ".join(f"`{a}`" for a in allowed))


def _number(text: str) -> Decimal:
    body, power = text, 0
    if text and text[-1].upper() in _SUFFIXES:
        body, power = text[:-1], _SUFFIXES[text[-1].upper()]
    try:
        value = Decimal(body.strip())
    except InvalidOperation:
        raise ValueError("not a number") from None
    if not value.is_finite():
        raise ValueError("not a finite number")
    # Before any arithmetic: int(Decimal('1e999999999')) would fill memory with digits.
    if value and value.adjusted() + power > 18:
        raise ValueError("too large")
    return value.scaleb(power)


def whole(low: int, high: int, unit: str) -> Kind:
    """A whole number from `low` to `high`; 2e8, 200000000 and 200M are the same."""

    def parse(text: str) -> int:
        value = _number(text)
        if value != value.to_integral_value():
            raise ValueError("not a whole number")
        if not low <= value <= high:
            raise ValueError(f"not from {low:,} to {high:,}")
        return int(value)

    return Kind(parse, f"{unit}, {low:,} to {high:,}")


def decimal(low: float, high: float, unit: str) -> Kind:
    """A finite number from `low` to `high`."""

    def parse(text: str) -> float:
        value = float(_number(text))
        if not low <= value <= high:
            raise ValueError(f"not from {low:g} to {high:g}")
        return value

    return Kind(parse, f"{unit}, {low:g} to {high:g}")


def word_or(kind: Kind, *words: str) -> Kind:
    """One of a few words, in any case, or what `kind` reads."""

    def parse(text: str) -> Any:
        return text.lower() if text.lower() in words else kind.parse(text)

    return Kind(parse, " \\| ".join(f"`{word}`" for word in words) + f" \\| {kind.limits}")


def switch() -> Kind:
    """0 or 1, as SGLang's own switches are written."""

    def parse(text: str) -> bool:
        if text not in ("0", "1"):
            raise ValueError("not 0 or 1")
        return text == "1"

    return Kind(parse, "`0` \\| `1`")


def latency_mode() -> Kind:
    """`off`, `equal`, `pipeline`, or a time such as 250ms, which becomes `250ms`."""

    def parse(text: str) -> str:
        word = text.lower()
        if word in ("off", "equal", "pipeline"):
            return word
        number = word.removesuffix("ms")
        if number == word:
            raise ValueError("not off, equal, pipeline or a time such as 250ms")
        value = _number(number.strip())
        if value != value.to_integral_value() or not 1 <= value <= 10**6:
            raise ValueError("not a whole number of ms from 1 to 1,000,000")
        return f"{int(value)}ms"

    return Kind(parse, "`off` \\| `equal` \\| `pipeline` \\| a time such as `250ms`")


def text_value(what: str) -> Kind:
    """Any text."""
    return Kind(str, what)


# What a budget is while the engine serves.
BUDGET_NUMBER = whole(1, 10**15, "token²")


@dataclass(frozen=True)
class Settings:
    """DynChunk's settings as the operator gave them. What follows from them in one engine is in effective.py."""

    mode: str = knob(
        "on",
        choice("on", "report", "off"),
        "`on`: the engine starts with DynChunk or not at all. `report`: nothing is changed, the log says what would "
        "be. `off`: the stock engine, byte for byte.",
    )
    budget: int | str = knob(
        200_000_000,
        word_or(BUDGET_NUMBER, "auto"),
        "The most new tokens x prefix that one prefill may score. `2e8`, `200000000` and `200M` are the same. `auto`: "
        "worked out at start from the memory that is free then and what a row and key costs on this model's path.",
        "2.0e8",
    )
    report: str | None = knob(
        None,
        text_value("a file's path"),
        "A memguard report (`run.json`): `DYNCHUNK_BUDGET=auto` takes what a row and key costs from there, if it was "
        "measured on the same engine, model, layout and device.",
        "a table of the engine's paths",
    )
    rule: str = knob(
        "prefix",
        choice("prefix", "sequence"),
        "What the new tokens are multiplied with: the prefix they find, or the prefix and themselves.",
    )
    chunk_min: int = knob(
        256,
        whole(1, 1_048_576, "tokens"),
        "The floor: no chunk is made smaller than this, even where it exceeds the budget. Rounded up to whole pages.",
    )
    chunk_max: int | None = knob(
        None,
        whole(1, 1_048_576, "tokens"),
        "The largest chunk. Never above the engine's own chunk size. Rounded down to whole pages.",
        "the engine's chunk size",
    )
    page: int | None = knob(
        None,
        whole(1, 1_048_576, "tokens"),
        "Chunks are whole multiples of this. Must be a multiple of the engine's page.",
        "the smallest multiple of the engine's page that is at least 64",
    )
    interleave: int = knob(
        2,
        whole(0, 10_000, "chunks"),
        "After so many chunks of one long prompt, one pass belongs to waiting requests that fit whole, and one to "
        "decoding. `0`: as in the stock engine, the long prompt comes first until it is through.",
    )
    latency: str = knob(
        "off",
        latency_mode(),
        "How long a chunk may take, besides what memory allows; learned while serving. `equal`: as long as the first "
        "chunk of a prompt. `250ms`: at most that. `pipeline`: what makes the whole prompt finish first with several "
        "pipeline stages.",
    )
    smooth: float = knob(
        1.0,
        decimal(0, 1, "a share"),
        "How far `equal` goes: 1 makes all chunks cost the same, 0 leaves them at the engine's size.",
    )
    latency_min: int | None = knob(
        None,
        whole(1, 1_048_576, "tokens"),
        "The smallest chunk that DYNCHUNK_LATENCY may ask for. DYNCHUNK_CHUNK_MIN counts where it is larger.",
        "DYNCHUNK_CHUNK_MIN",
    )
    model_file: str | None = knob(
        None,
        text_value("a file's path"),
        "Where the learned latency model is kept for the next start. Used again only for the same engine, model, "
        "layout and device.",
        "learned anew at every start",
    )
    indexer_score_mib: int | str = knob(
        "auto",
        word_or(whole(0, 1_048_576, "MiB"), "auto"),
        "Upper limit for the sparse indexer's score buffers, wherever this engine version keeps one. `auto`: 256 MiB, "
        "or what keeps the whole GPU busy at the longest context. Never above the engine's own. `0` leaves them.",
    )
    indexer: str = knob(
        "rows",
        choice("rows", "keys"),
        "How the sparse indexer's scores are cut (DeepSeek-V4.1 with DeepGEMM). `rows`: as the engine does. `keys`: by "
        "keys as well, for a GPU that `rows` would leave idle; the same values are selected, among equal ones any.",
    )
    empty_cache: str = knob(
        "auto",
        choice("auto", "always", "low", "off"),
        "When the allocator's unused memory goes back to the device after a long prefill chunk. `low`: only when "
        "memory is low. `auto`: `always` where GPU memory is host memory, `low` elsewhere.",
    )
    empty_cache_min_tokens: int = knob(
        8192,
        whole(1, 10**9, "tokens"),
        "Release only after a prefill whose longest sequence is at least this long.",
    )
    empty_cache_below_gib: float = knob(
        2.5,
        decimal(0.001, 1e6, "GiB"),
        "What `low` means: release when less than this is available.",
    )
    prime_cache: int | str = knob(
        "auto",
        word_or(whole(1, 1_048_576, "MiB"), "off", "auto"),
        "Allocate and free one block of this size before the first prefill, so that every later score buffer is "
        "served from it and the allocator's reserve does not grow. `auto`: the size of the score limit in force; "
        "nothing where `DYNCHUNK_EMPTY_CACHE` is, or comes to, `always`.",
    )
    memory_fraction: float | None = knob(
        None,
        decimal(0.05, 0.99, "a share"),
        "The most of the GPU's memory that torch may hold: growth beyond it becomes a flush of unused memory. `serve` "
        "puts it into PYTORCH_ALLOC_CONF; torch 2.14 or later.",
        "no limit",
    )
    gc_threshold: float | None = knob(
        None,
        decimal(0.05, 0.99, "a share"),
        "The share of `DYNCHUNK_MEMORY_FRACTION` from which on torch gives memory back that it has not used for long. "
        "Must lie above what weights and KV cache take.",
        "never",
    )
    trace: str | None = knob(
        None,
        text_value("a file's path"),
        "Append one JSON line for each prefill batch to this file (ranks other than the first add `.pp0tp1` to it).",
        "no trace",
    )
    allow_expandable_segments: bool = knob(
        False,
        switch(),
        "Let `serve` start with `expandable_segments:True` in the allocator settings, which it refuses otherwise.",
        "0",
    )
    # Which fields the operator set; the rest are defaults. Not a knob.
    explicit: frozenset[str] = frozenset()


def deciding(settings: Settings) -> dict[str, Any]:
    """The settings that decide chunk sizes, by variable: what all ranks must have in common.

    Left out: files of one host, and what only changes when a rank holds or releases memory. What a rank reads from
    its files and decides by travels with its report.
    """
    files = {"trace", "model_file", "report"}
    memory = {"allow_expandable_segments", "prime_cache", "memory_fraction", "gc_threshold"}
    memory |= {f.name for f in knob_fields() if f.name.startswith("empty_cache")}
    return {env_name(f): getattr(settings, f.name) for f in knob_fields() if f.name not in files | memory}


def env_name(knob_field: Field[Any], prefix: str = PREFIX) -> str:
    """The environment variable of a knob."""
    return prefix + knob_field.name.upper()


def knob_fields(cls: type[Any] = Settings) -> Iterator[Field[Any]]:
    """The fields of a settings class that are knobs, in the order of declaration."""
    return (f for f in fields(cls) if "kind" in f.metadata)


def parse_knobs(cls: type[Any], environ: Mapping[str, str], prefix: str) -> tuple[dict[str, Any], list[str]]:
    """The given values of `cls`'s knobs in `environ`, and a sentence for each that is wrong."""
    values: dict[str, Any] = {}
    problems = []
    for f in knob_fields(cls):
        name = env_name(f, prefix)
        raw = environ.get(name, "").strip()
        if raw:
            kind: Kind = f.metadata["kind"]
            try:
                values[f.name] = kind.parse(raw)
            except ValueError as error:
                accepted = kind.limits.replace("`", "").replace("\\|", "|")
                shown = "***" if kind.secret else repr(raw)
                problems.append(f"{name}={shown}: {error}; accepted: {accepted}")
    return values, problems


def from_env(environ: Mapping[str, str]) -> Settings:
    """Read the settings. Raises SettingsError with every problem, unknown DYNCHUNK_ names included.

    In mode `off` nothing is refused: whoever turns DynChunk off must get the stock engine.
    """
    values, problems = parse_knobs(Settings, environ, PREFIX)
    if values.get("mode") == "off":
        return Settings(**values, explicit=frozenset(values))
    known = [env_name(f) for f in knob_fields()]
    for name in sorted(environ):
        if name.startswith(PREFIX) and name not in known and not _of_a_service(name, environ[name]):
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else "the README lists every name"
            problems.append(f"{name}: unknown setting; {hint}")
    settings = Settings(**values, explicit=frozenset(values))
    # The default floor bows to a maximum that the operator chose; effective.py says so.
    chosen = "chunk_min" in settings.explicit
    if chosen and settings.chunk_max is not None and settings.chunk_min > settings.chunk_max:
        problems.append(
            f"DYNCHUNK_CHUNK_MIN={settings.chunk_min:,} is above DYNCHUNK_CHUNK_MAX={settings.chunk_max:,}; "
            "lower the first or raise the second"
        )
    if isinstance(settings.prime_cache, int) and settings.empty_cache == "always":
        problems.append(
            f"DYNCHUNK_PRIME_CACHE={settings.prime_cache:,} and DYNCHUNK_EMPTY_CACHE=always: the second gives the "
            "first's block back after every chunk; set the second to low, or the first to off"
        )
    if settings.gc_threshold is not None and settings.memory_fraction is None:
        problems.append(
            f"DYNCHUNK_GC_THRESHOLD={settings.gc_threshold:g} does nothing without DYNCHUNK_MEMORY_FRACTION; set both "
            "or neither"
        )
    if problems:
        raise SettingsError(problems)
    return settings


def _of_a_service(name: str, value: str) -> bool:
    return any(names.fullmatch(name) and values.fullmatch(value) for names, values in _SERVICE_VARIABLES)


@functools.cache
def current() -> Settings:
    """This process's settings, read once."""
    return from_env(os.environ)


def shown_default(f: Field[Any]) -> str:
    """The default as the documentation writes it."""
    shown = f.metadata["shown_default"]
    if shown is not None:
        return str(shown)
    return "" if f.default is None or f.default is MISSING else str(f.default)
