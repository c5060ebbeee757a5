"""What goes on whatever the ramp is waiting for: the sampler and its guard, the record on disk, the display."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

from scripts.ending import asked
from scripts.verify.decide import LOAD, START, Action, by_phase
from scripts.verify.device import Devices
from scripts.verify.engine_process import EngineProcess
from scripts.verify.errors import RecordError
from scripts.verify.guard import Guard
from scripts.verify.host import Host
from scripts.verify.options import Surroundings
from scripts.verify.own_memory import OwnMemory
from scripts.verify.progress import Display, Now
from scripts.verify.records import Recorder
from scripts.verify.results import Run
from scripts.verify.sampler import Sampler, let_go

_FOLLOW_EVERY_S = 1.0

_FIRST_READING_S = 60.0  # without one there is no baseline


class Watch:
    """Everything that watches one run. All of it but the sampler and the abort happens in the caller's thread."""

    def __init__(
        self,
        run: Run,
        around: Surroundings,
        *,
        host: Host,
        post_abort: Callable[[str], None],
        engine: EngineProcess | str,
        recorder: Recorder,
        display: Display,
    ) -> None:
        self.run = run
        self.display = display
        self.recorder = recorder
        self.devices = Devices()
        self._around = around
        self.guard = Guard(
            post_abort,
            now_s=self.now_s,
            in_danger=self.in_danger,
            engine=engine,
            patience_s=around.patience_s,
        )
        self._sampler = Sampler(host, self.guard.act, around.sample_interval_s)
        self._steps_shown = 0
        self._followed_s = 0.0

    def start(self) -> None:
        """Start reading. Nothing is sent to the server before this."""
        self.run.locked_in_memory = self._around.hold_ground()
        self.guard.start()
        self.devices.start()
        self._sampler.start()
        self.wait(_FIRST_READING_S, lambda: bool(self._sampler.samples), "reading memory")

    def arm(self, guard_bytes: int, start_guard_bytes: int) -> None:
        """From now on the guard trips."""
        self._sampler.arm(by_phase(guard_bytes, start_guard_bytes, self._around.escalate_s))

    def judge_own(self, own: OwnMemory) -> None:
        """From now on, judge what the engine's own processes take."""
        self._sampler.own = own
        self.run.own_memory = True

    def phase(self, name: str, running: int | None = 0) -> None:
        """What is going on now, and how many requests the engine has; it decides which limits count."""
        self._sampler.phase, self._sampler.running = name, running

    def end(self) -> None:
        """Stop reading, and write down what was read last."""
        self._sampler.end()
        self.guard.end()
        self.devices.end()
        self._show_steps()
        self.display.close()
        if self.run.locked_in_memory:
            let_go()
        samples = self._sampler.samples
        self.run.steps = list(self.guard.steps)
        if samples:
            first, last = samples[0], samples[-1]
            self.run.swap_in_pages = last.swap_in_pages - first.swap_in_pages
            self.run.kernel_oom = last.kernel_oom - first.kernel_oom
            self.run.psi_full_max = max(
                (sample.psi_full_avg10 for sample in samples if sample.psi_full_avg10 is not None), default=None
            )
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

    def host_low_bytes(self, since: int) -> int | None:
        """The least that the host had left since a mark, where that is not what is judged."""
        readings = [sample.host_available_bytes for sample in self._sampler.samples[since:]]
        return min((reading for reading in readings if reading is not None), default=None)

    def available_bytes(self) -> int:
        """MemAvailable now."""
        samples = self._sampler.samples
        return samples[-1].available_bytes if samples else 0

    def in_danger(self) -> bool:
        """Whether memory is so short that requests have to end."""
        return self._sampler.latest.action.severity >= Action.ABORT.severity

    def warning(self) -> bool:
        """Whether memory is close to the guard."""
        return self._sampler.latest.action is not Action.CONTINUE

    def note(self, sentence: str) -> None:
        """A sentence for the report, once."""
        if sentence not in self.run.notes:
            self.run.notes.append(sentence)

    def tick(self, now: Now) -> None:
        """Record and show one moment. Raises MemguardError when memory is no longer read or recorded, KeyboardInterrupt
        when the program was told to end.
        """
        if asked():
            raise KeyboardInterrupt
        self._sampler.check()
        self._follow_engine()
        self._show_steps()
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
        starting = self._sampler.phase in (START, LOAD)
        guard = self.run.start_guard_bytes if starting else self.run.guard_bytes
        return Now(available, available if low is None else low, guard, doing=doing, figure=self.run.figure)

    def _follow_engine(self) -> None:
        own = self._sampler.own
        if own is not None and time.monotonic() - self._followed_s > _FOLLOW_EVERY_S:
            self._followed_s = time.monotonic()
            own.follow()

    def _show_steps(self) -> None:
        steps = self.guard.steps[self._steps_shown :]
        self._steps_shown += len(steps)
        for step in steps:
            self.display.problem(step.what)

    def _record(self, *, raising: bool) -> None:
        try:
            self.recorder.samples(self._sampler.samples)
        except RecordError as error:
            if raising:
                raise
            self.note(f"{error}.")
