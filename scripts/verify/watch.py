"""What goes on whatever the ramp is waiting for: the sampler and its guard, the record on disk, the display."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

from scripts.verify.decide import Action, Limits
from scripts.verify.errors import RecordError
from scripts.verify.guard import Guard
from scripts.verify.options import Surroundings
from scripts.verify.progress import Display, Now
from scripts.verify.records import Recorder
from scripts.verify.results import Run
from scripts.verify.sampler import Meminfo, Sampler


class Watch:
    """Everything that watches one run. All of it but the sampler and the abort happens in the caller's thread."""

    def __init__(
        self, run: Run, around: Surroundings, *, meminfo: Meminfo, guard: Guard, recorder: Recorder, display: Display
    ) -> None:
        self.run = run
        self.guard = guard
        self.display = display
        self.recorder = recorder
        self._around = around
        self._sampler = Sampler(meminfo, guard.trip, around.sample_interval_s)

    def start(self) -> None:
        """Start reading. Nothing is sent to the server before this."""
        self.run.locked_in_memory = self._around.hold_ground()
        self.guard.start()
        self._sampler.start()

    def arm(self, limits: Limits) -> None:
        """From now on the guard trips."""
        self._sampler.arm(limits)

    def end(self) -> None:
        """Stop reading, and write down what was read last."""
        self._sampler.end()
        self.guard.end()
        self.display.close()
        samples = self._sampler.samples
        self.run.ended_s = self.now_s()
        self.run.samples = len(samples)
        self.run.largest_sample_gap_s = max(
            (later.t_s - earlier.t_s for earlier, later in itertools.pairwise(samples)), default=0.0
        )
        self._record(raising=False)

    def now_s(self) -> float:
        """Unix seconds on the sampler's clock."""
        return self._sampler.now_s()

    def mark(self) -> int:
        """The newest reading, to look back to with `low_bytes` and `readings`."""
        return max(0, len(self._sampler.samples) - 1)

    def readings(self, since: int) -> list[int]:
        """MemAvailable of each reading since a mark."""
        return [sample.available_bytes for sample in self._sampler.samples[since:]]

    def low_bytes(self, since: int) -> int | None:
        """The least MemAvailable since a mark."""
        return min(self.readings(since), default=None)

    def available_bytes(self) -> int:
        """MemAvailable now."""
        samples = self._sampler.samples
        return samples[-1].available_bytes if samples else 0

    def warning(self) -> bool:
        """Whether memory is close to the guard."""
        return self._sampler.latest.action is not Action.CONTINUE

    def note(self, sentence: str) -> None:
        """A sentence for the report, once."""
        if sentence not in self.run.notes:
            self.run.notes.append(sentence)

    def tick(self, now: Now) -> None:
        """Record and show one moment. Raises MemguardError when memory is no longer read or recorded."""
        self._sampler.check()
        self._record(raising=not self.guard.tripped)  # after a trip, memory matters more than the record
        self.display.now(now)

    def wait(self, at_most_s: float, until: Callable[[], bool], doing: str) -> bool:
        """Tick until something is so, or the time is up. -> whether it is so."""
        deadline_s = time.monotonic() + at_most_s
        while not until() and time.monotonic() < deadline_s:
            self.tick(self.moment(doing))
            time.sleep(min(self._around.tick_s, max(0.0, deadline_s - time.monotonic())))
        return until()

    def moment(self, doing: str) -> Now:
        """Now, between two prompts."""
        available = self.available_bytes()
        low = self.run.low_water_bytes
        return Now(available, available if low is None else low, self.run.guard_bytes, doing=doing)

    def _record(self, *, raising: bool) -> None:
        try:
            self.recorder.samples(self._sampler.samples)
        except RecordError as error:
            if raising:
                raise
            self.note(f"{error}.")
