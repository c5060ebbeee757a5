"""What the operator's settings come to in one engine: page and chunk sizes made whole, contradictions refused.

Pure: the launcher uses it before the engine exists, the scheduler patch with the engine's real numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from dynchunk.policy import budget as rule
from dynchunk.settings import Settings, SettingsError

SMALLEST_DEFAULT_PAGE_TOKENS = 64  # SGLang's own sizer aligns to max(page, 64) too
OVERSHOOT_WORTH_A_WORD = 0.05


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


def resolve(settings: Settings, *, engine_page: int, static_tokens: int, context_tokens: int | None) -> Effective:
    """Fit the settings to an engine. Raises SettingsError with every contradiction.

    engine_page, static_tokens (`--chunked-prefill-size` of one rank), context_tokens: tokens.
    """
    problems: list[str] = []
    notes: list[str] = []
    page = settings.page or _default_page(engine_page, static_tokens)
    if page % engine_page:
        problems.append(
            f"DYNCHUNK_PAGE={page:,} is not a multiple of the engine's page of {engine_page:,}; "
            f"use {-(-page // engine_page) * engine_page:,} or leave it unset"
        )
    ceiling = min(settings.chunk_max or static_tokens, static_tokens)
    if settings.chunk_max is not None and settings.chunk_max > static_tokens:
        notes.append(
            f"DYNCHUNK_CHUNK_MAX={settings.chunk_max:,} is above the engine's chunk size; {static_tokens:,} counts, "
            "because the engine's buffers are sized for it"
        )
    chunk_max = ceiling // page * page
    if chunk_max == 0:
        problems.append(
            f"a page of {page:,} tokens is larger than the largest chunk of {ceiling:,}; lower DYNCHUNK_PAGE or raise "
            "--chunked-prefill-size (and DYNCHUNK_CHUNK_MAX)"
        )
    elif "chunk_min" in settings.explicit and settings.chunk_min > chunk_max:
        problems.append(
            f"DYNCHUNK_CHUNK_MIN={settings.chunk_min:,} is above the largest chunk of {chunk_max:,} that the engine's "
            f"chunk size of {static_tokens:,} and the page of {page:,} leave; lower it or raise --chunked-prefill-size"
        )
    if problems:
        raise SettingsError(problems)
    chunk_min = min(-(-settings.chunk_min // page) * page, chunk_max)
    for name, asked, got in (
        ("DYNCHUNK_CHUNK_MIN", settings.chunk_min, chunk_min),
        ("DYNCHUNK_CHUNK_MAX", ceiling, chunk_max),
    ):
        if asked != got:
            notes.append(f"{name}: {asked:,} becomes {got:,}, whole pages of {page:,}")
    limits = rule.Budget(settings.budget, settings.rule, page, chunk_min, chunk_max)
    return Effective(limits, static_tokens, notes, _warnings(limits, context_tokens))


def _default_page(engine_page: int, static_tokens: int) -> int:
    smallest = -(-SMALLEST_DEFAULT_PAGE_TOKENS // engine_page) * engine_page
    return smallest if smallest <= static_tokens else engine_page


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
