"""What measured peaks say of the budget: a line in the log, and under DYNCHUNK_BUDGET=auto a change on all ranks."""

from __future__ import annotations

from collections.abc import Mapping

from dynchunk import in_force, journal
from dynchunk.peak import PeakMeter
from dynchunk.policy import auto_budget
from dynchunk.policy.budget import own_rows


class BudgetAdvice:
    """On the entry rank. meter: its measurements. at_start: bytes to spare by rank, which no raise ever exceeds."""

    def __init__(self, meter: PeakMeter, at_start: Mapping[str, int], *, adopt: bool) -> None:
        """adopt: whether the budget is DynChunk's to change (`auto`); else the operator is told."""
        self.meter = meter
        self.at_start = at_start
        self.adopt = adopt
        self._seen = 0
        self._said: tuple[str, int] | None = None

    def when_idle(self) -> None:
        """Called over and over while nothing runs; works once for each prefill that was measured."""
        limits = in_force.limits
        if self.meter.measured == self._seen or limits is None:
            return
        self._seen = self.meter.measured
        found = auto_budget.advice(limits.budget, self.at_start, self.meter.fit(), own_rows(limits))
        if found is None:
            return
        # To two digits: the same advice on the same budget is not repeated for every few bytes.
        advice = f"{found.budget:.1e}", limits.budget
        if advice == self._said:
            return
        self._said = advice
        if self.adopt:
            in_force.outbox.post("budget", found.budget)
        journal.say(f"DYNCHUNK_BUDGET{'=auto' if self.adopt else ''}: {found.text}")
