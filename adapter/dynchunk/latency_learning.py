"""The entry rank's half of the latency model: chunks are timed here, and what follows is sent to all ranks."""

from __future__ import annotations

from typing import Protocol

from dynchunk import model_file
from dynchunk.agreement import Outbox
from dynchunk.latency_sizing import LatencySizing
from dynchunk.policy import calibration
from dynchunk.policy.learner import MOST_REQUESTS_WITHOUT_ENOUGH, Learner

KIND = "latency"
TIMING = "forward timing"


class Prefill(Protocol):
    """The part of patches/model_runner.Prefill that is read."""

    mode: str
    reqs: list[tuple[str, int, int]]


class Learning:
    """Feeds the learner with the timed chunks of long requests, and sends what it concludes."""

    def __init__(self, sizing: LatencySizing, outbox: Outbox, kept: model_file.ModelFile | None) -> None:
        """kept: where a model is kept between starts."""
        self.sizing = sizing
        self.outbox = outbox
        self.kept = kept
        model = None if kept is None else kept.load()
        self.learner = Learner(model)
        self._new = self._broken = False
        self._never_alone: set[int] = set()  # ordinals, since the last chunk that did
        if model is not None and kept is not None:
            self._send(calibration.Update(model, calibrating=False, reason=f"latency model of {kept.path}"))

    def timed(self, prefill: Prefill, ms: float) -> None:
        """A prefill took `ms`. Only those of one long request count: others have a batch's time, or their first."""
        if self._broken:
            return
        if prefill.mode != "extend" or len(prefill.reqs) != 1:
            self._not_alone(prefill)
            return
        [(rid, prefix, tokens)] = prefill.reqs
        request = self.sizing.requests.get(rid)
        if request is None:
            return
        try:
            self._new = True
            self._never_alone.clear()
            self._send(self.learner.timed(request.ordinal, prefix, tokens, ms))
        except Exception as error:
            self._give_up(repr(error))

    def _not_alone(self, prefill: Prefill) -> None:
        """Chunks that run beside other rows say nothing of their own time; where all do, there is nothing to learn."""
        if not self.sizing.shared.calibrating:
            return
        known = (self.sizing.requests.get(rid) for rid, _, _ in prefill.reqs)
        self._never_alone |= {request.ordinal for request in known if request is not None}
        if len(self._never_alone) >= MOST_REQUESTS_WITHOUT_ENOUGH:
            self._give_up(f"{len(self._never_alone)} long requests, and no chunk of them ran alone")

    def when_idle(self) -> None:
        """The long request is through: a model need not wait for the next one."""
        if self._new and not self._broken:
            self._new = False
            try:
                self._send(self.learner.request_over())
            except Exception as error:
                self._give_up(repr(error))

    def _send(self, learned: calibration.Update | None) -> None:
        if learned is None:
            return
        model = learned.model
        coefficients = None if model is None else (model.a, model.b, model.c, model.gamma)
        self.outbox.post(KIND, coefficients, learned.calibrating, learned.reason)
        if model is None and self.kept is not None:
            self.kept.forget()
        if model is not None and self.learner.fit is not None and self.kept is not None:
            self.kept.save(model)

    def broke(self, name: str) -> None:
        """One who looks on was taken out. Without the times of chunks no model will ever stand."""
        if name in (TIMING, self.timed.__qualname__) and self.sizing.shared.calibrating and not self._broken:
            self._give_up(f"{name} is broken")

    def _give_up(self, why: str) -> None:
        """Nothing may leave the ranks calibrating for ever."""
        self._broken = True
        self._send(calibration.Update(None, calibrating=False, reason=f"no latency model: {why}"))
