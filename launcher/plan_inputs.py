"""What `plan` counts with: the flags, and under them the environment that `serve` reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path

from dynchunk import effective, measured_before, values
from dynchunk.policy import latency, paths
from dynchunk.policy.latency import EQUAL, OFF, TICKS_PER_MS, Mode, Model
from dynchunk.settings import Settings, SettingsError, whole
from dynchunk.shortened import shortened
from launcher import cost, environment, model_context, plan_reserve, setting
from launcher.setting import Setting

GIB = 1 << 30
COEFFICIENTS = ("a", "b", "c", "gamma")
LONGEST_PROMPT = 10**7  # ten times what models are made for; a plan of it takes seconds
MOST_MS = 10**6  # a coefficient above it is a slip of the pen, and its times would no longer be numbers
SLOWEST_RATE, FASTEST_RATE = 0.001, 10**9
NO_MODEL = "/no/model"  # a folder that is not there: nothing is known of the model
NO_HEAD = "head:0"  # a plan meets no other host


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

    cost: what a row and key holds, None where it is not known. context_parallel: ranks that share a chunk's rows, as
    far as `cost` does not count that already. base_bytes: held however small the chunk.
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
    context_parallel: int = 1
    base_bytes: int = 0
    score_limit_bytes: int = 0
    remedies: dict[str, plan_reserve.Remedy] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def rows(self, tokens: int) -> int:
        """What one rank scores of a chunk; the engine shares none that has less than two rows for each rank."""
        return tokens if tokens < 2 * self.context_parallel else paths.ceil_div(tokens, self.context_parallel)


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
    problems: list[str] = []
    notes: list[str] = []
    start = _setting(flags, environ, problems, notes)
    settings = start.settings
    prompts = _prompts(flags, start, problems)
    cached = _tokens("--cached", flags.cached, problems, low=0) if flags.cached else 0
    if prompts and cached >= min(prompts):
        problems.append(f"--cached {cached:,} leaves nothing to compute of a prompt of {min(prompts):,} tokens")
    model = _model(flags, start, problems, notes)
    mode = _mode(flags, settings, model, problems, notes)
    rates = _rates(flags.rates, problems)
    each, base_bytes = _cost(flags, start, problems, notes)
    limit_bytes = cost.score_limit_bytes(settings)
    notes += _ranks(start, each)
    align = _tokens("--align", flags.align, problems) if flags.align else effective.SMALLEST_DEFAULT_PAGE_TOKENS
    base = _tokens("--base", flags.base, problems) if flags.base else 0
    resolved = _resolved(flags, start, problems)
    limits = resolved.limits
    if cached % limits.page:
        # A prefix that ends inside a page has its first two chunks cut otherwise; whole pages are what a cache holds.
        whole = cached // limits.page * limits.page
        notes.append(f"--cached {cached:,} is counted as {whole:,}: whole pages of {limits.page:,}")
        cached = whole
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
        start.launch.pp_size,
        prompts,
        cached,
        model,
        rates,
        each,
        start.context_parallel if each and not each.measured else 1,
        base_bytes,
        limit_bytes,
        plan_reserve.remedies(settings, limit_bytes if each and each.bound_bytes else 0),
        [*notes, *resolved.notes],
    )


def _setting(flags: Flags, environ: Mapping[str, str], problems: list[str], notes: list[str]) -> Setting:
    """What would be started: the environment under the flags. Raises SettingsError where it cannot be read at all."""
    given = {variable: getattr(flags, name) for name, variable in SETTING_FLAGS.items() if getattr(flags, name)}
    model_path = environ.get("MODEL_PATH", "").strip()
    # Mode `off` has chunks that can be planned as well.
    head = environ.get("DIST_INIT_ADDR", "").strip() or NO_HEAD
    always = {"MODEL_PATH": model_path or NO_MODEL, "DIST_INIT_ADDR": head, "DYNCHUNK_MODE": "on"}
    merged = {**environ, **given, **always}
    reading = environment.read_all(merged)
    problems += reading.problems
    launch, longer = model_context.fitted(reading.launch, environ, {})
    try:
        start = setting.of(launch, reading.settings)
    except ValueError:  # EXTRA_ARGS, and said already
        raise SettingsError(problems) from None
    problems += start.unreadable_flags()
    notes += [] if flags.prompts else longer
    return start


def _resolved(flags: Flags, start: Setting, problems: list[str]) -> effective.Effective:
    """The rule in force. Raises SettingsError with `problems` and its own."""
    static = start.chunk
    if flags.chunk_max:
        static = max(static, start.settings.chunk_max or 0)  # what --chunked-prefill-size would be set to
    if static <= 0:
        cure = f"plan with --max, or set it to {2048 * start.dp_attention}"
        raise SettingsError([*problems, f"{start.no_chunk}; {cure}"])
    try:
        resolved = start.resolved(static)
    except SettingsError as error:
        raise SettingsError([*problems, *error.problems]) from None
    if problems:
        raise SettingsError(problems)
    return resolved


def _mode(flags: Flags, settings: Settings, model: Model | None, problems: list[str], notes: list[str]) -> Mode:
    """DYNCHUNK_LATENCY, which needs a model."""
    mode = latency.parse_mode(settings.latency)
    if mode.kind == OFF or model is not None:
        return mode
    if flags.latency:
        problems.append(f"--latency {flags.latency} needs coefficients: --model a=..,b=..,c=..,gamma=.. (ms)")
    notes.append(f"DYNCHUNK_LATENCY={settings.latency} is left out: its model is not known; give it with --model")
    return Mode()


def _ranks(start: Setting, each: paths.Cost | None) -> Iterator[str]:
    """What the engine's ranks make of a chunk."""
    if start.dp_attention > 1:
        yield f"{start.per_rank}; this is the plan of one"
    if start.context_parallel > 1 and each is not None:
        of_a_rank = "what was measured is taken for one rank's" if each.measured else "memory is that of one rank"
        yield f"the rows of a chunk are divided by {start.context_parallel} (context parallel prefill); {of_a_rank}"


def _prompts(flags: Flags, start: Setting, problems: list[str]) -> list[int]:
    """--prompt, else the longest that will be served."""
    if flags.prompts:
        return [n for text in flags.prompts if (n := _tokens("--prompt", text, problems))]
    longest = start.launch.context_length
    if longest <= LONGEST_PROMPT:
        return [longest]
    problems.append(
        f"CONTEXT_LENGTH={longest:,} is more than the {LONGEST_PROMPT:,} tokens that a plan goes up to; name a prompt "
        "with --prompt"
    )
    return []


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
        name, _, number = (part.strip() for part in item.partition("="))
        if name in found:
            problems.append(f"{flag} {item!r}: {name} is given twice")
        try:
            found[name] = float(number)
        except ValueError:
            problems.append(f"{flag} {item!r}: not NAME=NUMBER")
    return found


def _model(flags: Flags, start: Setting, problems: list[str], notes: list[str]) -> Model | None:
    """The latency model of --model (ms), or of DYNCHUNK_MODEL_FILE where one has been learned."""
    if not flags.model:
        return _saved(start, notes)
    found = _numbers("--model", flags.model, problems)
    strange = [name for name in found if name not in COEFFICIENTS]
    if strange or "a" not in found:
        wrong = f"{strange[0]!r} is no coefficient" if strange else "a is missing"
        problems.append(f"--model {flags.model!r}: {wrong}; accepted: a=..,b=..,c=..,gamma=.. in ms and tokens")
        return None
    try:
        return latency.from_ms(*(_finite(name, found.get(name, 0.0)) for name in COEFFICIENTS))
    except ValueError as error:
        problems.append(f"--model {flags.model!r}: {error}")
        return None


def _finite(name: str, ms: float) -> float:
    """A coefficient that is a time; which of them may be 0 is the model's to say."""
    try:
        return values.number(ms, 0, MOST_MS)
    except ValueError as error:
        raise ValueError(f"{name}={error}") from None


def _saved(start: Setting, notes: list[str]) -> Model | None:
    """The model of DYNCHUNK_MODEL_FILE, if it is not of another model than MODEL_PATH. `notes` say whose it is."""
    name = start.settings.model_file
    if name is None:
        return None
    try:
        kept = values.parsed(Path(name).read_text(encoding="utf-8"))
        ticks, whose = kept["ticks"], dict(kept["belongs_to"])
        for coefficient in COEFFICIENTS:
            values.number(ticks[coefficient], 0, MOST_MS * TICKS_PER_MS)
        model = Model(**{coefficient: int(ticks[coefficient]) for coefficient in COEFFICIENTS})
    except (OSError, ValueError, KeyError, TypeError):
        return None  # nothing learned yet, or of no use: the server says which
    shown = {part: shortened(repr(whose.get(part))) for part in ("engine", "model", "device")}
    here = start.launch.model_path
    if here != NO_MODEL and whose.get("model") != here:
        notes.append(
            f"DYNCHUNK_MODEL_FILE={name} is left out: its times are of model {shown['model']}, and MODEL_PATH is "
            f"{here}; give times with --model or --rates"
        )
        return None
    learned_on = ", ".join(f"{part} {value}" for part, value in shown.items())
    notes.append(f"times are those of DYNCHUNK_MODEL_FILE={name}, learned on {learned_on}")
    return model


def _rates(text: str, problems: list[str]) -> list[tuple[int, float]]:
    """`chunk=tokens/s`, by chunk."""
    rates: dict[int, float] = {}
    for name, rate in _numbers("--rates", text, problems).items():
        tokens = _tokens("--rates", name, problems)
        if tokens in rates:
            problems.append(f"--rates {name}: a chunk of {tokens:,} is given twice")
        try:
            rates[tokens] = values.number(rate, SLOWEST_RATE, FASTEST_RATE)
        except ValueError:
            problems.append(
                f"--rates {name}={rate:g}: not a rate in tokens/s from {SLOWEST_RATE:g} to {FASTEST_RATE:,}"
            )
    return sorted(rates.items())


def _cost(flags: Flags, start: Setting, problems: list[str], notes: list[str]) -> tuple[paths.Cost | None, int]:
    """What a row and key holds, and what is held beside it: measured where there is a measurement, else of the path."""
    limit_bytes = cost.score_limit_bytes(start.settings)
    if flags.bytes_each is not None:
        if 0 < flags.bytes_each < measured_before.MOST_BYTES_PER_PAIR:
            return cost.given(flags.bytes_each), 0
        problems.append(f"--bytes {flags.bytes_each:g}: not bytes for a row and key, 12.5 for instance")
    elif flags.report is not None:
        try:
            return cost.measured(flags.report)
        except measured_before.ReportError as error:
            problems.append(f"--report {flags.report}: {error}")
    elif flags.path in paths.PATHS:
        return paths.of_path(flags.path, limit_bytes), 0
    elif flags.path:
        problems.append(f"--path {flags.path}: no such path; accepted: {', '.join(paths.PATHS)}")
    else:
        return cost.of_setting(start, limit_bytes, notes)
    return None, 0
