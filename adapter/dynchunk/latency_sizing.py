"""The time side of a chunk's size, as every rank knows it: the mode, the model in force, and each long request's part.

All of it is replicated: settings that were compared at start, updates that came down the request stream, and counts of
requests and chunks that every rank makes alike. The entry rank's learning is in latency_learning.py.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from typing import Any

from dynchunk import journal
from dynchunk.policy import cutting, latency, pipeline
from dynchunk.policy.admission import Cut
from dynchunk.policy.budget import Budget, chunk_tokens
from dynchunk.policy.calibration import Shared, arm, is_long, why_no_sweep
from dynchunk.policy.calibration import Update as Learned
from dynchunk.policy.cutting import Choice, Rules
from dynchunk.policy.latency import CEILING, EQUAL, OFF, PIPELINE, Mode, Sizes

REQUESTS_REMEMBERED = 256


@dataclass
class LongRequest:
    """What is known of one request that takes several chunks.

    ordinal: among the long requests of this process. choice: how it is cut (PIPELINE), None before it has been chosen.
    total: its tokens. crowded: for so many more chunks others count as prefilling beside it. ended: its last chunk was
    admitted.
    """

    ordinal: int
    total: int
    choice: Choice | None = None
    crowded: int = 0
    ended: bool = False


@dataclass
class LatencySizing:
    """mode, smooth, least (tokens): as configured. stages: of the pipeline. long_waiting: long prompts in the queue."""

    mode: Mode = field(default_factory=Mode)
    smooth: Fraction = Fraction(1)
    least: int = 0
    stages: int = 1
    shared: Shared = field(default_factory=Shared)
    reason: str = ""
    long_waiting: Callable[[], int] = lambda: 0
    requests: OrderedDict[str, LongRequest] = field(default_factory=OrderedDict)

    @property
    def active(self) -> bool:
        """Whether anything is to be sized or learned."""
        return self.mode.kind != OFF and (self.shared.calibrating or self.shared.model is not None)

    def start(self, limits: Budget, cut: Cut) -> None:
        """Begin to calibrate, or say why that cannot work here."""
        problem = why_no_sweep(limits.chunk_max, max(cut.floor, self.least), cut.align)
        if self.mode.kind == PIPELINE and self.stages == 1:
            problem = "with one pipeline stage a prompt finishes first in the largest chunks that memory allows"
        if self.mode.kind != OFF and problem is not None:
            self.shared.calibrating, self.reason = False, problem
            journal.record("latency", journal.NOT_IN_USE, problem)

    def adopt(self, learned: Learned) -> None:
        """What the entry rank has concluded is in force from now on."""
        self.shared.adopt(learned)
        self.reason = learned.reason
        for request in self.requests.values():
            request.choice = None

    def cap(self, limits: Budget, cut: Cut, rid: str, prefix: int, remaining: int, *, first: bool) -> int | None:
        """The most new tokens that time allows a request's next chunk; None where time does not limit.

        first: it has run no chunk yet (and is one of `long_waiting`, if it is long).
        """
        if not self.active:
            return None
        request = self._request(limits, rid, prefix, remaining)
        allowed = _sizes(limits, cut, self.least)
        model = self.shared.model
        if model is None:  # the sweep is on
            return self._swept(limits, request, prefix, allowed)
        rules = Rules(limits, model, allowed)
        choice = self._choice(rules, request, prefix, remaining, first=first)
        return None if choice is None else cutting.wanted(rules, choice, prefix, remaining)

    @staticmethod
    def _swept(limits: Budget, request: LongRequest | None, prefix: int, allowed: Sizes) -> int | None:
        if request is None:
            return None
        return arm(request.ordinal, chunk_tokens(limits, prefix), allowed.least, allowed.align)

    def _choice(
        self, rules: Rules, request: LongRequest | None, prefix: int, remaining: int, *, first: bool
    ) -> Choice | None:
        """How this prompt is cut; None where time is no limit."""
        if self.mode.kind == CEILING:
            return cutting.promise(rules.allowed.most, self.mode.ceiling)
        if self.mode.kind == EQUAL:
            return cutting.equal(rules.model, rules.allowed.most, rules.limits.chunk_max, self.smooth)
        if request is None or self._crowded(request, first=first):
            return None
        if request.choice is None:
            request.choice = pipeline.choose(rules, self.stages, prefix, prefix + remaining)
        return request.choice

    def _crowded(self, request: LongRequest, *, first: bool) -> bool:
        """Whether others prefill beside it: they keep the stages busy, and smaller chunks would only cost."""
        if self.long_waiting() > (1 if first else 0):
            request.crowded = 2 * self.stages
        elif request.crowded:
            request.crowded -= 1
        return request.crowded > 0

    def _request(self, limits: Budget, rid: str, prefix: int, remaining: int) -> LongRequest | None:
        known, total = self.requests.get(rid), prefix + remaining
        if known is not None and known.total == total and not known.ended:
            return known
        # New, or another request under the same name.
        if not is_long(remaining, limits.chunk_max):
            return None
        known = self.requests[rid] = LongRequest(self.shared.begin(), total)
        self.requests.move_to_end(rid)
        while len(self.requests) > REQUESTS_REMEMBERED:
            self.requests.popitem(last=False)
        return known

    def admitted(self, rid: str, end: int) -> None:
        """A chunk of a request was admitted that ends at `end`."""
        request = self.requests.get(rid)
        if request is not None and end >= request.total:
            request.ended = True

    def room_in_company(self, ticks_so_far: int, prefix: int) -> int | None:
        """The most new tokens a request may add to a batch that takes `ticks_so_far` already; None: time is no limit.

        Only where a time was asked for: `equal` and `pipeline` are about the chunks of one prompt.
        """
        model = self.shared.model
        if self.mode.kind != CEILING or model is None:
            return None
        # c is paid once a batch.
        left = self.mode.ceiling - (ticks_so_far or model.c) - model.gamma * prefix
        return latency.tokens_within(model, prefix, left)

    def ticks(self, prefix: int, tokens: int, ticks_so_far: int) -> int:
        """What a batch takes with one request more; c counts once. 0 without a model."""
        model = self.shared.model
        if model is None or self.mode.kind == OFF:
            return 0
        whole = latency.predict(model, prefix, tokens)
        return ticks_so_far + whole - model.c if ticks_so_far else whole

    def state(self) -> dict[str, Any]:
        """For /server_info."""
        model = self.shared.model
        stands = "model" if model is not None else "calibrating" if self.shared.calibrating else "fixed"
        return {
            "mode": self.mode.kind,
            "state": OFF if self.mode.kind == OFF else stands,
            "reason": self.reason,
            "long_requests": self.shared.long_requests,
            "model_ticks": None if model is None else asdict(model),
            "model_ms": None if model is None else {k: latency.in_ms(v) for k, v in asdict(model).items()},
        }


def _sizes(limits: Budget, cut: Cut, least: int) -> Sizes:
    """The sizes that a cut may have. The largest counts as one even where the cut's alignment does not divide it."""
    most = limits.chunk_max // cut.align * cut.align or limits.chunk_max
    floor = max(cut.floor, -(-least // cut.align) * cut.align)
    return Sizes(min(floor, most), most, cut.align)
