"""What measured peaks say of the budget: a line in the log, and under DYNCHUNK_BUDGET=auto a change on all ranks."""

from __future__ import annotations

from collections.abc import Mapping

from dynchunk import in_force, journal
from dynchunk.peak import PeakMeter
from dynchunk.policy import auto_budget


class BudgetAdvice:
    """On the entry rank. meter: its measurements. at_start: bytes to spare by rank, which no raise ever exceeds."""

    def __init__(
        self, meter: PeakMeter, at_start: Mapping[str, int], *, adopt: bool, may_raise: bool, own_rows: int
    ) -> None:
        """adopt: whether the budget is DynChunk's to change (`auto`); else the operator is told.

        may_raise: whether what is measured here holds on every rank; pipeline stages have layers of their own.
        own_rows: token^2 by which rows x keys can exceed the budget.
        """
        self.meter = meter
        self.at_start = at_start
        self.adopt = adopt
        self.may_raise = may_raise
        self.own_rows = own_rows
        self._seen = 0
        self._said: tuple[str, int] | None = None

    def when_idle(self) -> None:
        """Called over and over while nothing runs; works once for each prefill that was measured."""
        limits = in_force.limits
        if self.meter.measured == self._seen or limits is None:
            return
        self._seen = self.meter.measured
        found = auto_budget.advice(limits.budget, self.at_start, self.meter.fit(), self.own_rows)
        if found is None:
            return
        # To two digits: the same advice on the same budget is not repeated for every few bytes.
        advice = f"{found.budget:.1e}", limits.budget
        if advice == self._said:
            return
        self._said = advice
        # What an operator has set by hand stays as it is.
        adopted = self.adopt and not in_force.set_by_operator and (self.may_raise or found.budget < limits.budget)
        if adopted:
            in_force.outbox.post("budget", found.budget, False)
        journal.say(f"DYNCHUNK_BUDGET{'=auto' if adopted else ''}: {found.text}")
