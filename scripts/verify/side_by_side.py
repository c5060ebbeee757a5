"""Two reports of memguard side by side: what has changed between them, in conditions and in figures. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from scripts.verify.decide import gib
from scripts.verify.report import facts_table, table
from scripts.verify.results import Probe, Run, holds_for

_UNKNOWN = "-"


def render(old: Sequence[Run], new: Sequence[Run]) -> str:
    """Markdown. Runs of one label belong together; so do two that are alone in their reports."""
    parts = ["# memguard: two reports side by side"]
    alone = len(old) == len(new) == 1
    pairs = [(a, b) for a in old for b in new if alone or a.label == b.label]
    for before, after in pairs:
        title = before.label if before.label == after.label else f"{before.label} and {after.label}"
        parts += [f"## {title}", conditions(before, after), sizes_table(before, after)]
    if not pairs:
        parts.append(
            "No label is in both: " + ", ".join(run.label for run in old) + " / " + ", ".join(run.label for run in new)
        )
    named = [
        dataclasses.replace(run, label=f"{which}: {run.label}")
        for which, runs in (("old", old), ("new", new))
        for run in runs
    ]
    return "\n\n".join([*parts, "## What ran", facts_table(named)]) + "\n"


def conditions(old: Run, new: Run) -> str:
    """Whether the two verdicts are about the same thing, and if not, what differs."""
    before, after = holds_for(old), holds_for(new)
    changed = [f"- {name}: {before[name]} / {after[name]}" for name in before if before[name] != after[name]]
    if not changed:
        return "Same host, driver, image, engine, model, flags and chunk: the figures can be compared."
    what = "\n".join(changed)
    return f"**These verdicts hold for different things**; neither says anything about the other's:\n\n{what}"


def sizes_table(old: Run, new: Run) -> str:
    """A row for every size: speed, low water and verdict, before and after."""
    head = ["prompt", "tokens/s, old", "new", "change", "low water, old", "new", "change", "verdict, old", "new"]
    rows = []
    for size in sorted({probe.size_tokens for run in (old, new) for probe in run.probes}):
        before, after = _probe(old, size), _probe(new, size)
        rows.append([f"{size:,}", *_speeds(before, after), *_lows(before, after), _verdict(before), _verdict(after)])
    return table(head, rows, left=(7, 8))


def _probe(run: Run, size_tokens: int) -> Probe | None:
    return next((probe for probe in run.probes if probe.size_tokens == size_tokens), None)


def _speeds(old: Probe | None, new: Probe | None) -> list[str]:
    before, after = old.tokens_per_s if old else None, new.tokens_per_s if new else None
    change = f"{after / before - 1:+.1%}" if before and after else _UNKNOWN
    return [_UNKNOWN if rate is None else f"{rate:,.0f}" for rate in (before, after)] + [change]


def _lows(old: Probe | None, new: Probe | None) -> list[str]:
    before, after = old.low_water_bytes if old else None, new.low_water_bytes if new else None
    change = (
        _UNKNOWN if before is None or after is None else ("-" if after < before else "+") + gib(abs(after - before))
    )
    return [_UNKNOWN if low is None else gib(low) for low in (before, after)] + [change]


def _verdict(probe: Probe | None) -> str:
    return probe.verdict.value if probe else _UNKNOWN
