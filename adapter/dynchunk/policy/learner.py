"""The entry rank's half of calibration: from timed chunks to updates for all ranks, and giving up in time.

Pure: it is handed timings and returns updates. What it concludes changes nothing before the update has come back with
the request stream, here neither. Floats: none of them reaches a size, except as a model of whole ticks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from dynchunk.policy.calibration import Update
from dynchunk.policy.fit import Fit, Refusal, Sample, fit, lacking
from dynchunk.policy.latency import Model, in_ms, predict

MOST_REFUSED_FITS = 8
MOST_REQUESTS_WITHOUT_ENOUGH = 8
MOST_RELEARNED = 3
TIMINGS_KEPT = 4  # of a shape, the latest
SHAPES_KEPT = 256  # of each arm
# The running error of the model in force, as a share of the measured time: over some 16 chunks, each counted with at
# most 100 % so that one odd chunk drops nothing, and above the bound for 16 chunks on end.
ERROR_WINDOW = 16
MOST_RUNNING_ERROR = 0.25
CHUNKS_ABOVE = 16


@dataclass
class _Arm:
    """The timings of one arm, by shape. Thinned out evenly when there are too many shapes to fit quickly."""

    shapes: dict[tuple[int, int], deque[float]] = field(default_factory=dict)
    stride: int = 1

    def add(self, sample: Sample) -> bool:
        """Keep a timing. False if it is one of those that are thinned out."""
        shape = (sample.prefix, sample.tokens)
        if shape not in self.shapes and len(self.shapes) >= SHAPES_KEPT:
            self.stride *= 2
            self.shapes = {s: ms for s, ms in self.shapes.items() if self._kept(s)}
        if not self._kept(shape):
            return False
        self.shapes.setdefault(shape, deque(maxlen=TIMINGS_KEPT)).append(sample.ms)
        return True

    def _kept(self, shape: tuple[int, int]) -> bool:
        prefix, tokens = shape
        return prefix // tokens % self.stride == 0

    def samples(self) -> Iterator[Sample]:
        for shape, times in self.shapes.items():
            for ms in times:
                yield Sample(*shape, ms)


class Learner:
    """Feed it the timed chunks of long requests, and send the updates that it returns.

    fit: the one the model in force came from. running_error: of the model in force, a share of the measured time.
    """

    def __init__(
        self, model: Model | None = None, fitted_by: Callable[[Sequence[Sample]], Fit | Refusal] = fit
    ) -> None:
        """model: one that is in force already (from a file), and only watched until it is dropped."""
        self.fit: Fit | None = None
        self.running_error = 0.0
        self._fitted_by = fitted_by
        self._model = model
        self._done = False
        self._relearned = 0
        self._first: int | None = None  # the process's first long request
        self._forget()

    def _forget(self) -> None:
        """Start measuring anew."""
        self.running_error = 0.0
        self._above = 0
        self._arms = (_Arm(), _Arm())
        self._sizes_seen: set[int] = set()
        self._newest = -1
        self._requests = self._refused = 0
        self._something_new = False

    def timed(self, ordinal: int, prefix: int, tokens: int, ms: float) -> Update | None:
        """A chunk of `tokens` of the ordinal-th long request took `ms` on `prefix`. An update, where one follows."""
        if self._done:
            return None
        sample = Sample(prefix, tokens, ms)
        if self._model is not None:
            return self._watch(self._model, sample)
        update = None
        if ordinal > self._newest:
            update = self.request_over()
            self._newest = ordinal
            self._requests += 1
        if update is None:
            self._take(ordinal, sample)
        return update

    def _take(self, ordinal: int, sample: Sample) -> None:
        """Keep a sample, unless kernels or the allocator were still warming up for it."""
        if self._first is None:
            self._first = ordinal
        if ordinal != self._first and sample.tokens in self._sizes_seen:
            self._something_new |= self._arms[ordinal % 2].add(sample)
        self._sizes_seen.add(sample.tokens)

    def request_over(self) -> Update | None:
        """The newest long request has been prefilled: try a fit if there is something new.

        Optional: without it, the next long request's first chunk is the occasion.
        """
        if self._done or self._model is not None:
            return None
        samples = [sample for kept in self._arms for sample in kept.samples()]
        missing = lacking(samples)
        if missing is None:
            return self._attempt(samples) if self._something_new else None
        if self._requests < MOST_REQUESTS_WITHOUT_ENOUGH:
            return None
        return self._give_up(f"{self._requests} long requests, and only {missing}")

    def _attempt(self, samples: Sequence[Sample]) -> Update | None:
        self._something_new = False
        try:
            found = self._fitted_by(samples)
        except Exception as error:
            found = Refusal(f"the fit failed: {error!r}")
        if isinstance(found, Fit):
            self._forget()
            self.fit, self._model = found, found.model
            return Update(found.model, calibrating=False, reason=_describe(found))
        self._refused += 1
        if self._refused < MOST_REFUSED_FITS:
            return None
        return self._give_up(f"{self._refused} fits were refused, the last one because {found.reason}")

    def _watch(self, model: Model, sample: Sample) -> Update | None:
        """Hold the model in force against a measured chunk."""
        predicted_ms = in_ms(predict(model, sample.prefix, sample.tokens))
        error = min(abs(predicted_ms - sample.ms) / sample.ms, 1.0) if sample.ms > 0 else 1.0
        self.running_error += (error - self.running_error) / ERROR_WINDOW
        self._above = self._above + 1 if self.running_error > MOST_RUNNING_ERROR else 0
        if self._above < CHUNKS_ABOVE:
            return None
        why = f"its predictions are off by {self.running_error:.0%} on average, at most {MOST_RUNNING_ERROR:.0%}"
        self.fit = self._model = None
        if self._relearned >= MOST_RELEARNED:
            return self._give_up(f"the model was learned anew {self._relearned} times, and again {why}")
        self._relearned += 1
        self._forget()
        return Update(None, calibrating=True, reason=f"the latency model is dropped and learned anew: {why}")

    def _give_up(self, why: str) -> Update:
        self._done = True
        self._forget()
        return Update(None, calibrating=False, reason=f"no latency model, chunks are sized by memory alone: {why}")


def _describe(found: Fit) -> str:
    model = found.model
    a, b, c, gamma = map(in_ms, (model.a, model.b, model.c, model.gamma))
    aside = f" ({found.set_aside} set aside)" if found.set_aside else ""
    return (
        f"latency model in force: a={a:.3g}, b={b:.3g}, c={c:.3g}, gamma={gamma:.3g} ms, from {found.shapes} shapes"
        f"{aside}; off by {found.rms_share:.1%} of the mean, uncertain by {found.stderr_share:.1%}"
    )
