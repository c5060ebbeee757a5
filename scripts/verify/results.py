"""What one ramp measured: the contents of run.json. Times are unix seconds, memory is bytes, sizes are tokens."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from types import UnionType
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints

from dynchunk.shortened import shortened
from scripts.verify.decide import HOST_FIGURE, OWN_FIGURE

SCHEMA = 1
LARGEST = 1 << 63  # no time, size or count comes near it; JSON takes 1e999 and whole numbers of any length


class Verdict(str, enum.Enum):
    """How one size ended."""

    PASSED = "passed"
    CLOSE = "passed, close to the guard"
    GUARDED = "ended by the guard"
    PROJECTED = "not run, it would cross the guard"
    REFUSED = "refused"
    TIMED_OUT = "timed out"
    FAILED = "failed"
    INTERRUPTED = "interrupted"
    NOT_RUN = "not run"


class Outcome(str, enum.Enum):
    """How the ramp ended."""

    PASSED = "all sizes passed"
    GUARD = "the guard ended the ramp"
    PROJECTED = "stopped before a size that would cross the guard"
    INCOMPLETE = "not all sizes ran"
    FAILED = "the ramp failed"
    INTERRUPTED = "interrupted"


class Chunk(NamedTuple):
    """One forward of the probe: `tokens` new ones on top of `prefix_tokens`."""

    prefix_tokens: int
    tokens: int
    start_s: float
    end_s: float


class Step(NamedTuple):
    """Something the guard did, in words."""

    at_s: float
    what: str


@dataclass
class Probe:
    """One size of the ramp. host_low_water_bytes: the host's, where something else is judged.

    gpu_free_low_bytes: of each GPU with memory of its own, the least that the driver had left. gpu_unused_bytes: what
    the engine's allocator held unused on top of that, after the prompt.
    """

    size_tokens: int
    verdict: Verdict = Verdict.NOT_RUN
    detail: str = ""
    rid: str = ""
    start_s: float | None = None
    end_s: float | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    before_bytes: int | None = None
    low_water_bytes: int | None = None
    host_low_water_bytes: int | None = None
    projected_low_bytes: int | None = None
    gpu_free_low_bytes: list[int] = field(default_factory=list)
    gpu_unused_bytes: int | None = None
    chunks: list[Chunk] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether the prompt went through with the guard quiet."""
        return self.verdict in (Verdict.PASSED, Verdict.CLOSE)

    @property
    def seconds(self) -> float | None:
        """From sending the prompt to its answer."""
        return None if self.start_s is None or self.end_s is None else self.end_s - self.start_s

    @property
    def tokens_done(self) -> int | None:
        """Prompt tokens computed, cached ones not counted; None where nobody knows."""
        if self.passed:
            return (self.prompt_tokens or self.size_tokens) - (self.cached_tokens or 0)
        return sum(chunk.tokens for chunk in self.chunks) if self.chunks else None

    @property
    def untraced_tokens(self) -> int:
        """Computed tokens that no chunk accounts for: lines of the trace or the log are missing."""
        if not self.chunks:
            return 0
        last = self.chunks[-1]
        end = (self.prompt_tokens or self.size_tokens) if self.passed else last.prefix_tokens + last.tokens
        return max(0, end - (self.cached_tokens or 0) - sum(chunk.tokens for chunk in self.chunks))

    @property
    def complete_chunks(self) -> list[Chunk]:
        """The chunks, if they are all there: the time of one that is missing would count as its neighbour's."""
        return [] if self.untraced_tokens else self.chunks

    @property
    def tokens_per_s(self) -> float | None:
        """Computed tokens over the whole time of the request."""
        done, seconds = self.tokens_done, self.seconds
        return done / seconds if done and seconds else None


@dataclass
class Abort:
    """What happened when the guard tripped. phase: of the samples, what was going on."""

    at_s: float
    available_bytes: int
    reason: str
    size_tokens: int | None
    phase: str = "ramp"
    request_ended: bool = False
    recovered: bool = False
    recovery_s: float | None = None
    available_after_bytes: int | None = None
    server_healthy: bool | None = None


@dataclass
class Run:
    """One ramp. `machine` and `engine` are facts for the report, as plain JSON values.

    image: what the engine runs in, as the operator names it. own_memory: whether what the engine's own processes take
    was judged, in place of the host's MemAvailable. signals: whether the guard could signal the engine, in words.
    swap_in_pages, kernel_oom, psi_full_max: see decide.Sample; over the whole run. coefficient: what a row and key
    costs, as DynChunk in the engine measured it, and what that belongs to (DYNCHUNK_REPORT and plan read it).
    """

    label: str
    started_s: float
    date: str
    command: str
    url: str
    machine: dict[str, Any]
    engine: dict[str, Any]
    sizes_tokens: list[int]
    image: str | None = None
    guard_bytes: int = 0
    start_guard_bytes: int = 0
    headroom_bytes: int | None = None
    own_memory: bool = False
    baseline_bytes: int = 0
    sample_interval_s: float = 0.0
    samples: int = 0
    largest_sample_gap_s: float = 0.0
    locked_in_memory: bool = False
    signals: str = ""
    swap_in_pages: int = 0
    kernel_oom: int = 0
    psi_full_max: float | None = None
    coefficient: dict[str, Any] | None = None
    steps: list[Step] = field(default_factory=list)
    chunk_source: str = ""
    probes: list[Probe] = field(default_factory=list)
    abort: Abort | None = None
    outcome: Outcome = Outcome.FAILED
    exit_code: int = 1
    ended_s: float | None = None
    notes: list[str] = field(default_factory=list)
    samples_file: str = "samples.jsonl"
    schema: int = SCHEMA

    @property
    def largest_passed_tokens(self) -> int | None:
        """The largest prompt that went through."""
        return max((probe.size_tokens for probe in self.probes if probe.passed), default=None)

    @property
    def low_water_bytes(self) -> int | None:
        """The least MemAvailable of the whole ramp."""
        return min((p.low_water_bytes for p in self.probes if p.low_water_bytes is not None), default=None)

    @property
    def host_low_water_bytes(self) -> int | None:
        """The least that the host had left, where something else was judged."""
        return min((p.host_low_water_bytes for p in self.probes if p.host_low_water_bytes is not None), default=None)

    @property
    def figure(self) -> str:
        """What was judged, by name."""
        return OWN_FIGURE if self.own_memory else HOST_FIGURE


def holds_for(run: Run) -> dict[str, str]:
    """What a verdict holds for. On another host, image, engine, with other flags or other chunks it says nothing."""
    chunks = [
        str((state.get("effective") or {}).get("summary") or state.get("mode")) for state in run.engine["dynchunk"]
    ]
    return {
        "host": str(run.machine.get("machine_id")),
        "driver": str(run.machine.get("driver")),
        "image": str(run.image),
        "engine": f"SGLang {run.engine.get('version')}",
        "model": str(run.engine.get("model")),
        "flags": ", ".join(f"{name}={value}" for name, value in sorted(run.engine["flags"].items())),
        "chunk": "; ".join([f"static {run.engine['flags'].get('chunked_prefill_size')}", *chunks]),
    }


def smallest_aborted_tokens(earlier: Sequence[Run], run: Run) -> int | None:
    """The smallest size that the guard has ended before, under the very conditions of `run`."""
    sizes = [
        probe.size_tokens
        for before in earlier
        if holds_for(before) == holds_for(run)
        for probe in before.probes
        if probe.verdict is Verdict.GUARDED
    ]
    return min(sizes, default=None)


def to_json(run: Run) -> dict[str, Any]:
    """Plain JSON values; times to the millisecond."""
    values: dict[str, Any] = _rounded(asdict(run))
    return values


def from_json(values: Mapping[str, Any]) -> Run:
    """The run that `to_json` wrote, each value of its type. Raises ValueError, KeyError or TypeError otherwise."""
    if not isinstance(values, Mapping) or values.get("schema") != SCHEMA:
        raise ValueError(f"not an object with schema {SCHEMA}")
    fields = dict(values)
    probes = [
        Probe(**{**p, "verdict": Verdict(p["verdict"]), "chunks": [_checked(Chunk(*c)) for c in p["chunks"]]})
        for p in fields.pop("probes")
    ]
    fields["steps"] = [_checked(Step(*step)) for step in fields.get("steps", [])]
    abort = fields.pop("abort")
    outcome = Outcome(fields.pop("outcome"))
    run = Run(**fields, probes=probes, abort=_checked(Abort(**abort)) if abort else None, outcome=outcome)
    for probe in probes:
        _checked(probe)
    _check_members("machine", _checked(run).machine, _MACHINE)
    for gpu in run.machine.get("gpus", []):
        _check_members("machine.gpus", gpu, _GPU, required=("name",))
    _check_members("engine", run.engine, _ENGINE, required=("flags", "dynchunk"))
    for state in run.engine["dynchunk"]:
        _check_members("engine.dynchunk", state, _DYNCHUNK)
    return run


# What is read of the facts that are plain JSON values, and their types.
_MACHINE: dict[str, Any] = {
    "memory_total_bytes": int | None,
    "swap_total_bytes": int | None,
    "swap_used_bytes": int | None,
    "gpus": list[dict[str, Any]],
}
_GPU: dict[str, Any] = {"name": str, "memory_bytes": int | None}
_ENGINE: dict[str, Any] = {"flags": dict[str, Any], "dynchunk": list[dict[str, Any]]}
_DYNCHUNK: dict[str, Any] = {"effective": dict[str, Any] | None, "hooks": dict[str, dict[str, Any]] | None}


def _checked(found: Any) -> Any:
    """The same, if every field is of its type. Raises ValueError for the first that is not."""
    for name, hint in get_type_hints(type(found)).items():
        _check(name, getattr(found, name), hint)
    return found


def _check_members(
    where: str, found: Mapping[str, Any], hints: Mapping[str, Any], required: Sequence[str] = ()
) -> None:
    for name, hint in hints.items():
        if name in found or name in required:
            _check(f"{where}.{name}", found.get(name), hint)


def _check(name: str, value: Any, hint: Any) -> None:
    if not _fits(value, hint):
        raise ValueError(f"{name} is {shortened(repr(value))}, where {getattr(hint, '__name__', hint)} is wanted")


def _fits(value: Any, hint: Any) -> bool:
    if isinstance(hint, UnionType):
        return any(_fits(value, one) for one in get_args(hint))
    kind, inner = get_origin(hint) or hint, get_args(hint)
    if kind is Any:
        return True
    if kind in (int, float):
        allowed = int if kind is int else (int, float)
        return isinstance(value, allowed) and not isinstance(value, bool) and -LARGEST < value < LARGEST
    if kind is list:
        return isinstance(value, list) and all(_fits(one, inner[0]) for one in value)
    if kind is dict:
        return isinstance(value, dict) and all(_fits(one, inner[1]) for one in value.values())
    return isinstance(value, kind)


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 3)
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(item) for item in value]
    return value
