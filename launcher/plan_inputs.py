"""What `plan` counts with: the flags, and under them the environment that `serve` reads."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from math import ceil
from pathlib import Path

from dynchunk import effective
from dynchunk.policy import latency, paths
from dynchunk.policy.coefficient import LINE
from dynchunk.policy.latency import EQUAL, OFF, Mode, Model
from dynchunk.policy.score_budget import MIB, PLAIN_LIMIT_BYTES
from dynchunk.settings import Settings, SettingsError, whole
from launcher import environment, plan_reserve

GIB = 1 << 30
COEFFICIENTS = ("a", "b", "c", "gamma")
LONGEST_PROMPT = 10**8


@dataclass(frozen=True)
class Flags:
    """The command line as it was typed; empty or None where a flag was not given.

    Those that are settings are read with the settings' own rules. bytes_each: measured bytes for each row and key.
    """

    budget: str = ""
    rule: str = ""
    page: str = ""
    chunk_min: str = ""
    chunk_max: str = ""
    pp: str = ""
    score_mib: str = ""
    latency: str = ""
    prompts: Sequence[str] = ()
    cached: str = ""
    align: str = ""
    base: str = ""
    model: str = ""
    rates: str = ""
    path: str = ""
    bytes_each: float | None = None
    report: Path | None = None


@dataclass(frozen=True)
class Inputs:
    """What a plan is worked out from. Tokens; rates are (chunk, tokens/s) by size.

    cost: what a row and key holds, None where it is not known. base_bytes: held however small the chunk.
    score_limit_bytes: of the score buffers, where the path keeps one. remedies: see plan_reserve.
    """

    resolved: effective.Effective
    mode: Mode
    smooth: Fraction
    least: int
    align: int
    base: int
    stages: int
    prompts: list[int]
    cached: int
    model: Model | None = None
    rates: list[tuple[int, float]] = field(default_factory=list)
    cost: paths.Cost | None = None
    base_bytes: int = 0
    score_limit_bytes: int = 0
    remedies: dict[str, plan_reserve.Remedy] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


SETTING_FLAGS = {
    "budget": "DYNCHUNK_BUDGET",
    "rule": "DYNCHUNK_RULE",
    "page": "DYNCHUNK_PAGE",
    "chunk_min": "DYNCHUNK_CHUNK_MIN",
    "chunk_max": "DYNCHUNK_CHUNK_MAX",
    "latency": "DYNCHUNK_LATENCY",
    "score_mib": "DYNCHUNK_INDEXER_SCORE_MIB",
    "pp": "PP_SIZE",
}


def read(flags: Flags, environ: Mapping[str, str]) -> Inputs:
    """Flags over the environment. Raises SettingsError with every problem."""
    given = {variable: getattr(flags, name) for name, variable in SETTING_FLAGS.items() if getattr(flags, name)}
    # No model is served here, and mode `off` has chunks that can be planned as well.
    merged = {**environ, **given, "MODEL_PATH": "unused", "DYNCHUNK_MODE": "on"}
    reading = environment.read_all(merged)
    launch, settings, problems = reading.launch, reading.settings, list(reading.problems)
    static = launch.chunked_prefill_size
    if flags.chunk_max:
        static = max(static, settings.chunk_max or 0)  # a larger one is what --chunked-prefill-size would be set to
    if static <= 0:
        problems.append(f"CHUNKED_PREFILL_SIZE={static} turns chunked prefill off; plan with --max, or set it to 2048")
        raise SettingsError(problems)
    prompts = [
        n for text in flags.prompts or (str(launch.context_length),) if (n := _tokens("--prompt", text, problems))
    ]
    cached = _tokens("--cached", flags.cached, problems, low=0) if flags.cached else 0
    if prompts and cached >= min(prompts):
        problems.append(f"--cached {cached:,} leaves nothing to compute of a prompt of {min(prompts):,} tokens")
    model = _model(flags, settings, problems)
    notes: list[str] = []
    mode = latency.parse_mode(settings.latency)
    if mode.kind != OFF and model is None:
        if flags.latency:
            problems.append(f"--latency {flags.latency} needs coefficients: --model a=..,b=..,c=..,gamma=.. (ms)")
        notes.append(f"DYNCHUNK_LATENCY={settings.latency} is left out: its model is not known; give it with --model")
        mode = Mode()
    rates = _rates(flags.rates, problems)
    cost, base_bytes = _cost(flags, settings, problems)
    align = _tokens("--align", flags.align, problems) if flags.align else effective.SMALLEST_DEFAULT_PAGE_TOKENS
    base = _tokens("--base", flags.base, problems) if flags.base else 0
    try:
        resolved = effective.resolve(
            settings, engine_page=launch.page_size or 1, static_tokens=static, context_tokens=None
        )
    except SettingsError as error:
        raise SettingsError([*problems, *error.problems]) from None
    if problems:
        raise SettingsError(problems)
    limits = resolved.limits
    if mode.kind == EQUAL and base > limits.chunk_max:
        notes.append(
            f"--base {base:,} is above the largest chunk: chunks are as long as it, and at most {limits.chunk_max:,}"
        )
    return Inputs(
        resolved,
        mode,
        Fraction(str(settings.smooth)),
        max(limits.chunk_min, settings.latency_min or 0),
        align,
        base or limits.chunk_max,
        launch.pp_size,
        prompts,
        cached,
        model,
        rates,
        cost,
        base_bytes,
        _score_limit_bytes(settings),
        plan_reserve.remedies(settings, _score_limit_bytes(settings) if cost and cost.bound_bytes else 0),
        [*notes, *resolved.notes],
    )


def _tokens(flag: str, text: str, problems: list[str], low: int = 1) -> int:
    try:
        return int(whole(low, LONGEST_PROMPT, "tokens").parse(text.strip()))
    except ValueError as error:
        problems.append(f"{flag} {text!r}: {error}")
        return 0


def _numbers(flag: str, text: str, problems: list[str]) -> dict[str, float]:
    """`name=number,name=number`."""
    found: dict[str, float] = {}
    for item in filter(None, (item.strip() for item in text.split(","))):
        name, _, number = item.partition("=")
        try:
            found[name.strip()] = float(number)
        except ValueError:
            problems.append(f"{flag} {item!r}: not NAME=NUMBER")
    return found


def _model(flags: Flags, settings: Settings, problems: list[str]) -> Model | None:
    """The latency model of --model (ms), or of DYNCHUNK_MODEL_FILE where one has been learned."""
    if not flags.model:
        return _saved(settings)
    found = _numbers("--model", flags.model, problems)
    strange = [name for name in found if name not in COEFFICIENTS]
    if strange or "a" not in found:
        wrong = f"{strange[0]!r} is no coefficient" if strange else "a is missing"
        problems.append(f"--model {flags.model!r}: {wrong}; accepted: a=..,b=..,c=..,gamma=.. in ms and tokens")
        return None
    try:
        return latency.from_ms(*(found.get(name, 0.0) for name in COEFFICIENTS))
    except ValueError as error:
        problems.append(f"--model {flags.model!r}: {error}")
        return None


def _saved(settings: Settings) -> Model | None:
    if settings.model_file is None:
        return None
    try:
        ticks = json.loads(Path(settings.model_file).read_text(encoding="utf-8"))["ticks"]
        return Model(**{name: int(ticks[name]) for name in COEFFICIENTS})
    except (OSError, ValueError, KeyError, TypeError):
        return None  # nothing learned yet, or of no use: the server says which


def _rates(text: str, problems: list[str]) -> list[tuple[int, float]]:
    """`chunk=tokens/s`, by chunk."""
    rates = []
    for name, rate in _numbers("--rates", text, problems).items():
        tokens = _tokens("--rates", name, problems)
        if not 0 < rate < float("inf"):
            problems.append(f"--rates {name}={rate:g}: not a rate in tokens/s")
        rates.append((tokens, rate))
    return sorted(rates)


def _score_limit_bytes(settings: Settings) -> int:
    """DYNCHUNK_INDEXER_SCORE_MIB; what `auto` comes to at the least, because the GPU is not known."""
    limit = settings.indexer_score_mib
    return limit * MIB if isinstance(limit, int) else PLAIN_LIMIT_BYTES


def _cost(flags: Flags, settings: Settings, problems: list[str]) -> tuple[paths.Cost | None, int]:
    """What a row and key holds, and what is held beside it: measured where there is a measurement, else of the path."""
    if flags.bytes_each is not None:
        if 0 < flags.bytes_each < 10**6:
            return paths.Cost(ceil(flags.bytes_each * paths.MILLI), None, "given with --bytes"), 0
        problems.append(f"--bytes {flags.bytes_each:g}: not bytes for a row and key, 12.5 for instance")
    elif flags.report is not None or (settings.report is not None and not flags.path):
        file = flags.report or Path(str(settings.report))
        name = f"--report {file}" if flags.report else f"DYNCHUNK_REPORT={file}"
        try:
            measured = json.loads(file.read_text(encoding="utf-8"))["coefficient"]
            if measured["kind"] != LINE:
                problems.append(f"{name}: what it measured follows no line ({measured['kind']})")
                return None, 0
            each, base = ceil(float(measured["bytes_per_pair"]) * paths.MILLI), int(measured["base_bytes"])
            return paths.Cost(each, None, f"measured: {file}"), base
        except (OSError, ValueError, KeyError, TypeError) as error:
            problems.append(f"{name}: no measured coefficient in it ({error!r})")
    elif flags.path in paths.PATHS:
        return paths.of_path(flags.path, _score_limit_bytes(settings)), 0
    elif flags.path:
        problems.append(f"--path {flags.path}: no such path; accepted: {', '.join(paths.PATHS)}")
    return None, 0
