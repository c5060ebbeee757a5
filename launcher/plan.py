"""What a setting will cost: chunks, memory and time of a prompt. Arithmetic over policy; nothing is measured here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby, islice
from typing import Any

from dynchunk.policy import cutting, latency, paths, pipeline
from dynchunk.policy.auto_budget import MARGIN_PERCENT, QUANTUM
from dynchunk.policy.cutting import Choice, Rules
from dynchunk.policy.ladder import Chunk, chunks, fixed, fixed_with_peak, floor_exceeds_from, largest_budget, peak
from dynchunk.policy.latency import CEILING, EQUAL, PIPELINE, Model
from dynchunk.settings import SettingsError
from launcher import plan_reserve
from launcher.plan_inputs import Inputs

MOST_CHUNKS = 200_000  # seconds; prompts are bounded in plan_inputs, but a chunk may be one token
NO_MODEL = Model(1, 0, 0, 0)  # stands where none is asked: without a ceiling nothing is timed


@dataclass(frozen=True)
class Band:
    """Successive chunks of one size. prefix_from, prefix_to: of the first and the last. Peak bytes, ms in all."""

    prefix_from: int
    prefix_to: int
    tokens: int
    chunks: int
    transient_bytes: int | None
    ms: float | None


@dataclass(frozen=True)
class Fixed:
    """The fixed chunk that holds as much at its peak as the plan, and how it compares."""

    tokens: int
    chunks: int
    total_ms: float | None
    makespan_ms: float | None


@dataclass(frozen=True)
class Plan:
    """One prompt, cut. bytes_of, ms_of: of each chunk, None where they are not known. reserved: see plan_reserve."""

    prompt: int
    cached: int
    chunks: list[Chunk]
    bytes_of: list[int | None]
    ms_of: list[float | None]
    total_ms: float | None
    makespan_ms: float | None
    floor_exceeds_budget_from: int | None
    fixed: Fixed
    choice: Choice
    reserved: dict[str, int]

    @property
    def top(self) -> Chunk:
        """The chunk that holds most."""
        rows = zip(self.chunks, self.bytes_of, strict=True)
        return max(rows, key=lambda row: (row[1] or 0, row[0].pairs))[0]

    @property
    def peak_bytes(self) -> int | None:
        """The most that any chunk holds for a moment."""
        return max((b for b in self.bytes_of if b is not None), default=None)

    def bands(self) -> list[Band]:
        """Chunks of one size in a row, taken together."""
        found = []
        rows = zip(self.chunks, self.bytes_of, self.ms_of, strict=True)
        for tokens, group in groupby(rows, key=lambda row: row[0].tokens):
            members = list(group)
            times = [ms for _, _, ms in members if ms is not None]
            found.append(
                Band(
                    members[0][0].prefix,
                    members[-1][0].prefix,
                    tokens,
                    len(members),
                    max((b for _, b, _ in members if b is not None), default=None),
                    sum(times) if times else None,
                )
            )
        return found


def plan(inputs: Inputs, prompt: int) -> Plan:
    """Cut one prompt as the server would, alone, and say what that costs. Raises SettingsError for endless cuts."""
    rules = rules_of(inputs)
    choice = _choice(inputs, rules, prompt)
    cut = list(islice(chunks(rules, choice, inputs.cached, prompt), MOST_CHUNKS + 1))
    if len(cut) > MOST_CHUNKS:
        problem = (
            f"a prompt of {prompt:,} tokens comes to more than the {MOST_CHUNKS:,} chunks that a plan goes through: on "
            f"a prefix of {cut[-1].prefix:,} they are {cut[-1].tokens:,}; name a shorter one with --prompt, or larger "
            f"chunks with --min and --max ({rules.limits.chunk_min:,} and {rules.limits.chunk_max:,} now)"
        )
        raise SettingsError([problem])
    times = [_ms(inputs, one) for one in cut]
    page, most = rules.limits.page, rules.limits.chunk_max
    same_peak = fixed_with_peak(peak(cut).pairs, page, most, inputs.cached, prompt)
    others = fixed(same_peak, inputs.cached, prompt)
    other_times = [_ms(inputs, one) for one in others]
    return Plan(
        prompt,
        inputs.cached,
        cut,
        [_bytes(inputs, one) for one in cut],
        times,
        _total(times),
        _makespan(times, inputs.stages),
        floor_exceeds_from(rules, cut),
        Fixed(same_peak, len(others), _total(other_times), _makespan(other_times, inputs.stages)),
        choice,
        _reserved(inputs, cut),
    )


def rules_of(inputs: Inputs) -> Rules:
    """What prompts are cut by."""
    limits = inputs.resolved.limits
    sizes = latency.sizes(min(inputs.least, limits.chunk_max), limits.chunk_max, limits.page, inputs.align)
    return Rules(limits, inputs.model or NO_MODEL, sizes)


def _choice(inputs: Inputs, rules: Rules, prompt: int) -> Choice:
    most, model = rules.limits.chunk_max, rules.model
    if inputs.mode.kind == EQUAL:
        return cutting.equal(model, min(rules.allowed.most, inputs.base), inputs.base, inputs.smooth)
    if inputs.mode.kind == CEILING:
        return cutting.promise(rules.allowed.most, inputs.mode.ceiling)
    if inputs.mode.kind == PIPELINE and inputs.stages > 1:
        return pipeline.best(rules, inputs.stages, inputs.cached, prompt)
    return cutting.by_memory_alone(most)


def _bytes(inputs: Inputs, one: Chunk) -> int | None:
    if inputs.cost is None:
        return None
    return inputs.base_bytes + paths.transient_bytes(inputs.cost, inputs.rows(one.tokens), one.prefix + one.tokens)


def _reserved(inputs: Inputs, cut: list[Chunk]) -> dict[str, int]:
    if inputs.cost is None:
        return {}
    shapes = [(inputs.rows(one.tokens), one.prefix + one.tokens) for one in cut]
    return plan_reserve.reserved(inputs.cost, inputs.score_limit_bytes, shapes, inputs.remedies, inputs.base_bytes)


def reserve_left_out(inputs: Inputs, planned: Plan) -> list[str]:
    """A sentence where bytes are known and the allocator's reserve is not, as it would take too long."""
    if inputs.cost is None or planned.reserved:
        return []
    sentence = (
        f"what the allocator keeps reserved for {len(planned.chunks):,} chunks is left out: their buffers are too many "
        "to go through; name a shorter prompt with --prompt, or larger chunks with --min and --max"
    )
    return [sentence]


def _ms(inputs: Inputs, one: Chunk) -> float | None:
    """By the model; else from measured rates, the time of a chunk being a line between the sizes that were measured."""
    if inputs.model is not None:
        return latency.in_ms(latency.predict(inputs.model, one.prefix, one.tokens))
    if not inputs.rates:
        return None
    points = [(tokens, tokens / rate * 1000) for tokens, rate in inputs.rates]
    if len(points) == 1:
        points.insert(0, (0, 0.0))
    upper = next((k for k in range(1, len(points)) if one.tokens <= points[k][0]), len(points) - 1)
    (x0, y0), (x1, y1) = points[upper - 1], points[upper]
    return max(y0 + (y1 - y0) * (one.tokens - x0) / (x1 - x0), 0.0)


def _total(times: Sequence[float | None]) -> float | None:
    known = [ms for ms in times if ms is not None]
    return sum(known) if known else None


def _makespan(times: Sequence[float | None], stages: int) -> float | None:
    known = [ms for ms in times if ms is not None]
    return sum(known) + (stages - 1) * max(known) if known else None


def usable_bytes(headroom_bytes: int) -> int:
    """What of a headroom may be planned with: what allocator and neighbours take besides is left out."""
    return headroom_bytes * (100 - MARGIN_PERCENT) // 100


def budget_for(inputs: Inputs, headroom_bytes: int) -> int | None:
    """The largest budget whose chunks stay within a headroom, for the longest of the prompts; None if none does.

    inputs.cost is known.
    """
    assert inputs.cost is not None
    ranks, longest = inputs.context_parallel, max(inputs.prompts)
    pairs = paths.pairs_within(inputs.cost, usable_bytes(headroom_bytes) - inputs.base_bytes)
    # A rank's share of the rows is rounded up; and where this is little, chunks that are not shared must fit as well.
    if pairs >= 2 * ranks * longest:
        pairs = pairs * ranks - (ranks - 1) * longest
    return largest_budget(rules_of(inputs), pairs, inputs.cached, longest)


def least(inputs: Inputs) -> Plan:
    """The plan of the longest prompt under the smallest budget, by memory alone: what holds least."""
    return plan(with_budget(replace(inputs, mode=latency.Mode()), QUANTUM), max(inputs.prompts))


def with_budget(inputs: Inputs, budget: int) -> Inputs:
    """The same with another budget."""
    resolved = inputs.resolved
    return replace(inputs, resolved=replace(resolved, limits=replace(resolved.limits, budget=budget)))


def as_data(inputs: Inputs, planned: Plan) -> dict[str, Any]:
    """The plan as JSON values."""
    return {
        "prompt_tokens": planned.prompt,
        "cached_tokens": planned.cached,
        "budget": inputs.resolved.limits.budget,
        "stages": inputs.stages,
        "latency": inputs.mode.kind,
        "chunks": [
            {"prefix": one.prefix, "tokens": one.tokens, "transient_bytes": held, "ms": ms}
            for one, held, ms in zip(planned.chunks, planned.bytes_of, planned.ms_of, strict=True)
        ],
        "bands": [vars(band) for band in planned.bands()],
        "peak_transient_bytes": planned.peak_bytes,
        "reserved_bytes": planned.reserved,
        "total_ms": planned.total_ms,
        "makespan_ms": planned.makespan_ms,
        "floor_exceeds_budget_from": planned.floor_exceeds_budget_from,
        "fixed_with_same_peak": vars(planned.fixed),
        "notes": [*inputs.notes, *reserve_left_out(inputs, planned)],
    }
