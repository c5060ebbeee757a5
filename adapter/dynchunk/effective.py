"""What the operator's settings come to in one engine: page and chunk sizes made whole, contradictions refused.

Pure: the launcher uses it before the engine exists, the scheduler patch with the engine's real numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from dynchunk.policy import budget as rule
from dynchunk.settings import Settings, SettingsError

SMALLEST_DEFAULT_PAGE_TOKENS = 64  # SGLang's own sizer aligns to max(page, 64) too
OVERSHOOT_WORTH_A_WORD = 0.05
DEFAULT_BUDGET = int(Settings().budget)


@dataclass(frozen=True)
class Effective:
    """The rule in force, and what the operator should know about it (one sentence each)."""

    limits: rule.Budget
    static_tokens: int
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def describe(self) -> str:
        """One line for the log."""
        limits = self.limits
        return (
            f"budget {limits.budget:,} token^2 ({limits.rule} rule), chunks {limits.chunk_min:,} to "
            f"{limits.chunk_max:,} in pages of {limits.page:,}, engine's chunk size {self.static_tokens:,}"
        )


def resolve(
    settings: Settings,
    *,
    engine_page: int,
    static_tokens: int,
    context_tokens: int | None,
    budget: int | None = None,
) -> Effective:
    """Fit the settings to an engine. Raises SettingsError with every contradiction.

    engine_page, static_tokens (`--chunked-prefill-size` of one rank), context_tokens: tokens. budget: what
    DYNCHUNK_BUDGET=auto comes to, once that is known.
    """
    problems: list[str] = []
    notes: list[str] = []
    ceiling = min(settings.chunk_max or static_tokens, static_tokens)
    page = settings.page or _default_page(engine_page, ceiling)
    if page % engine_page:
        problems.append(
            f"DYNCHUNK_PAGE={page:,} is not a multiple of the engine's page of {engine_page:,}; "
            f"use {-(-page // engine_page) * engine_page:,} or leave it unset"
        )
    if settings.chunk_max is not None and settings.chunk_max > static_tokens:
        notes.append(
            f"DYNCHUNK_CHUNK_MAX={settings.chunk_max:,} is above the engine's chunk size; {static_tokens:,} counts, "
            "because the engine's buffers are sized for it"
        )
    chunk_max = ceiling // page * page
    if chunk_max == 0:
        problems.append(_page_above_ceiling(settings, page, ceiling))
    elif "chunk_min" in settings.explicit and settings.chunk_min > chunk_max:
        problems.append(
            f"DYNCHUNK_CHUNK_MIN={settings.chunk_min:,} is above the largest chunk of {chunk_max:,} that "
            f"{_limit(settings, ceiling)} and the page of {page:,} leave; lower it or {_cure(settings, ceiling)}"
        )
    if problems:
        raise SettingsError(problems)
    chunk_min = min(-(-settings.chunk_min // page) * page, chunk_max)
    notes += _rounding(settings, page, ceiling, chunk_min, chunk_max)
    if budget is None and isinstance(settings.budget, str):
        budget = DEFAULT_BUDGET
        notes.append(
            f"DYNCHUNK_BUDGET=auto is worked out when the engine knows its memory; sizes here are those of {budget:,}"
        )
    chosen = int(settings.budget) if budget is None else budget
    limits = rule.Budget(chosen, settings.rule, page, chunk_min, chunk_max)
    return Effective(limits, static_tokens, notes, _warnings(limits, context_tokens))


def _default_page(engine_page: int, ceiling: int) -> int:
    smallest = -(-SMALLEST_DEFAULT_PAGE_TOKENS // engine_page) * engine_page
    return smallest if smallest <= ceiling else engine_page


def where_it_ends(limits: rule.Budget) -> str:
    """What the rule does not hold, in one sentence: the floor's reach and the prefix rule's worst overshoot."""
    last = rule.last_prefix_within(limits)
    floor = (
        f"the floor of {limits.chunk_min:,} keeps the budget up to a prefix of {last:,}"
        if last >= 0
        else f"the floor of {limits.chunk_min:,} exceeds the budget at every prefix"
    )
    overshoot = rule.worst_overshoot(limits)
    return floor + (f"; counting a chunk's own rows, at most {float(overshoot):.1%} above it" if overshoot else "")


def _page_above_ceiling(settings: Settings, page: int, ceiling: int) -> str:
    """The refusal where not even one page fits a chunk."""
    whose = f"a page of {page:,} tokens" if settings.page else f"the engine's page of {page:,} tokens"
    lower = "lower DYNCHUNK_PAGE or " if settings.page else ""
    return f"{whose} is larger than the largest chunk of {ceiling:,}; {lower}{_cure(settings, ceiling)}"


def _limit(settings: Settings, ceiling: int) -> str:
    """What sets the largest chunk: the operator's DYNCHUNK_CHUNK_MAX where that is the smaller, else the engine."""
    if settings.chunk_max == ceiling:
        return f"DYNCHUNK_CHUNK_MAX={ceiling:,}"
    return f"the engine's chunk size of {ceiling:,}"


def _cure(settings: Settings, ceiling: int) -> str:
    if settings.chunk_max == ceiling:
        return "raise DYNCHUNK_CHUNK_MAX"
    return "raise the engine's chunk size (CHUNKED_PREFILL_SIZE, --chunked-prefill-size)"


def _rounding(settings: Settings, page: int, ceiling: int, chunk_min: int, chunk_max: int) -> list[str]:
    """A note for each size that is not the one asked for. Names a setting only where the operator gave it."""
    notes = []
    given = "chunk_min" in settings.explicit
    floor = f"DYNCHUNK_CHUNK_MIN={settings.chunk_min:,}" if given else f"the default floor of {settings.chunk_min:,}"
    if settings.chunk_min > chunk_max:
        notes.append(f"{floor} is lowered to {chunk_max:,}, the largest chunk")
    elif chunk_min != settings.chunk_min:
        notes.append(f"{floor} becomes {chunk_min:,}, whole pages of {page:,}")
    if chunk_max != ceiling:
        notes.append(f"{_limit(settings, ceiling)} becomes {chunk_max:,}, whole pages of {page:,}")
    return notes


def _warnings(limits: rule.Budget, context_tokens: int | None) -> list[str]:
    warnings = []
    last = rule.last_prefix_within(limits)
    if last < 0:
        warnings.append(
            f"the smallest chunk ({limits.chunk_min:,}) is above the budget at every prefix; "
            "raise DYNCHUNK_BUDGET or lower DYNCHUNK_CHUNK_MIN"
        )
    elif context_tokens is not None and context_tokens > last:
        warnings.append(
            f"beyond a prefix of {last:,} tokens the smallest chunk ({limits.chunk_min:,}) exceeds the budget, and the "
            f"context length of {context_tokens:,} reaches that; lower DYNCHUNK_CHUNK_MIN or the context length, or "
            "make sure that the memory is there"
        )
    overshoot = rule.worst_overshoot(limits)
    if overshoot > OVERSHOOT_WORTH_A_WORD:
        warnings.append(
            f"with chunks of {limits.chunk_max:,} the prefix rule lets rows x (prefix + rows) exceed the budget by up "
            f"to {float(overshoot):.0%}; DYNCHUNK_RULE=sequence counts the chunk's own rows too"
        )
    return warnings
