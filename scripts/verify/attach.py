"""A watch beside a serving engine, without a ramp: on every host that serves, for as long as it serves.

The same sampler, limits and ladder as for a ramp. What is different: nobody knows which request is to blame, so all are
aborted; the engine may start, end and start again; and after an abort the watch goes on. What was read around an abort
is kept in a file that `--replay` takes.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from datetime import datetime, timezone
from pathlib import Path
from subprocess import Popen

from rich.markup import escape

from scripts.ending import asked
from scripts.verify import launch, place, records
from scripts.verify.decide import IDLE, RAMP, START, Action, by_phase, gib
from scripts.verify.engine_process import EngineProcess
from scripts.verify.errors import EXIT_GUARD, EXIT_PASSED, MemguardError, RecordError
from scripts.verify.guard import Guard
from scripts.verify.host import Host
from scripts.verify.options import Options, Surroundings
from scripts.verify.recovery import enough
from scripts.verify.sampler import Sampler
from scripts.verify.server import Server

SAY_EVERY_S = 600.0
FIND_EVERY_S = 5.0
KEPT_S = 120.0  # of readings
_ALL = "all requests"


def run(options: Options, around: Surroundings) -> int:
    """Watch until Ctrl-C, or until the engine ends that memguard has started -> the exit code."""
    niceness = os.getpriority(os.PRIO_PROCESS, 0)
    with ExitStack() as stack:
        server = stack.enter_context(closing(Server(options.url, options.api_key)))
        watch = Attached(options, around, server)
        watch.start()
        stack.callback(watch.end)
        if options.launch:
            watch.launched = stack.enter_context(launch.launched(options.launch, None, niceness))
            watch.find_engine()
        try:
            while not asked() and (watch.launched is None or watch.launched.poll() is None):
                watch.look()
                time.sleep(around.look_s)
        except KeyboardInterrupt:
            pass
    return EXIT_GUARD if watch.trips else EXIT_PASSED


class Attached:
    """One watch in progress. trips: how often the guard has tripped."""

    def __init__(self, options: Options, around: Surroundings, server: Server) -> None:
        self.trips = 0
        self.launched: Popen[bytes] | None = None
        self._options = options
        self._around = around
        self._server = server
        self._limits = by_phase(options.guard_bytes or 0, options.start_guard_bytes, around.escalate_s)
        self._guard = Guard(
            lambda _: server.abort_all(),
            now_s=self._now_s,
            in_danger=self._in_danger,
            engine="none has been found yet",
            patience_s=around.patience_s,
        )
        self._sampler = Sampler(
            Host(around.proc, around.kmsg),
            self._guard.act,
            around.sample_interval_s,
            keep=round(KEPT_S / around.sample_interval_s),
        )
        self._baseline_bytes = 0
        self._served = False  # whether the engine that runs now has ever answered
        self._armed = False  # not after an abort, until memory is well above the guard again
        self._close = False
        self._found_s = self._said_s = time.monotonic()
        self._steps_said = 0
        self._folder: Path | None = None

    def start(self) -> None:
        """Begin to read. The guard is armed from the first reading on."""
        locked = self._around.hold_ground()
        self._guard.start()
        self._rearm()
        if self._options.launch:
            self._sampler.phase = START
        else:
            self.find_engine()
        self._sampler.start()
        self._say(
            f"watching the engine at {self._server.shown}; guard {gib(self._limits[RAMP].guard_bytes)}, "
            f"{gib(self._limits[START].guard_bytes)} while it starts; {'' if locked else 'not '}locked in memory"
        )

    def end(self) -> None:
        """Watch no longer."""
        self._sampler.end()
        self._guard.end()
        self._say_steps()
        self._say(f"ended; the guard has tripped {self.trips} times")

    def look(self) -> None:
        """One round: what is going on, what has to be said, what has to be done. Raises MemguardError."""
        self._sampler.check()
        self._say_steps()
        if self._tripped_anew():
            self._deal_with_it()
        self._rearm_if_calm()
        self._ask()
        if time.monotonic() - self._found_s > FIND_EVERY_S:
            self.find_engine()
        self._say_how_it_is()

    def find_engine(self) -> None:
        """Hold the process that may be signalled, while all is well; another one if that has ended."""
        self._found_s = time.monotonic()
        before = self._guard.engine
        if isinstance(before, EngineProcess):
            if not before.ended():
                return
            self._served = False
            self._guard.release()
        if not self._options.signals:
            found: EngineProcess | str = place.SIGNALS_OFF
        elif self.launched is not None:
            found = launch.held(self.launched)
        else:
            found = place.engine_process(self._options.url)
        self._guard.engine = found
        # From this reading on: one that only starts may take what memory it likes before the next question.
        self._sampler.phase = self._phase(self._sampler.running)
        if found != before:
            self._say(f"signals to the engine: {place.reach(found)}")

    def _ask(self) -> None:
        """Whether the engine serves, and how much it has to do: that decides which limits count."""
        requests = self._server.requests()
        self._served = self._served or requests is not None or self._server.healthy(self._around.look_s)
        self._sampler.running = requests
        self._sampler.phase = self._phase(requests)
        if self._served and self._armed:
            self._guard.watch(_ALL)
        samples = self._sampler.samples[-max(1, round(1 / self._around.sample_interval_s)) :]
        if samples and self._armed and (requests == 0 or not self._baseline_bytes):
            self._baseline_bytes = int(statistics.median(sample.available_bytes for sample in samples))

    def _phase(self, requests: int | None) -> str:
        if self._served:
            return IDLE if requests == 0 else RAMP
        if self.launched is not None:
            return launch.phase(self.launched)
        engine = self._guard.engine
        # One that serves with a head elsewhere never answers here; it is not always starting.
        return START if isinstance(engine, EngineProcess) and engine.is_head else RAMP

    def _deal_with_it(self) -> None:
        """The guard has tripped, and its threads are at work: wait for memory, then say and keep what has happened."""
        self.trips += 1
        self._armed = False
        try:
            self._until_memory_is_back(self._around.recovery_s)
        finally:
            self._keep_readings()

    def _until_memory_is_back(self, wait_s: float) -> None:
        self._wait(self._around.abort_wait_s, lambda: not self._in_danger())
        self._guard.release()
        enough_bytes = enough(self._baseline_bytes, self._limits[RAMP].guard_bytes)

        def back() -> bool:
            return self._available_bytes() >= enough_bytes

        if not self._wait(wait_s / 2, back):
            self._say("emptying the server's cache")
            try:
                self._server.flush_cache()
            except MemguardError as error:
                self._say(f"the cache could not be emptied: {error}")
        if self._wait(wait_s / 2, back):
            self._say(f"recovered: MemAvailable {gib(self._available_bytes())}")
        else:
            self._say(
                f"not recovered: MemAvailable {gib(self._available_bytes())}, before {gib(self._baseline_bytes)}; "
                "restart the engine before it gets long prompts"
            )

    def _wait(self, at_most_s: float, until: Callable[[], bool]) -> bool:
        deadline_s = time.monotonic() + at_most_s
        while not until() and not self._tripped_anew() and time.monotonic() < deadline_s:
            self._sampler.check()
            self._say_steps()
            self._rearm_if_calm()
            self._sampler.running = self._server.requests()
            if self._sampler.running == 0:
                self._guard.release()
            time.sleep(self._around.tick_s)
        return until()

    def _tripped_anew(self) -> bool:
        return self._armed and self._guard.tripped

    def _rearm_if_calm(self) -> None:
        if not self._armed and self._sampler.latest.action is Action.CONTINUE:
            self._rearm()

    def _rearm(self) -> None:
        """The guard may trip (again)."""
        self._armed = True
        self._guard.calm()
        self._sampler.arm(self._limits)

    def _now_s(self) -> float:
        return self._sampler.now_s()

    def _in_danger(self) -> bool:
        return self._sampler.latest.action.severity >= Action.ABORT.severity

    def _available_bytes(self) -> int:
        samples = self._sampler.samples
        return samples[-1].available_bytes if samples else 0

    def _keep_readings(self) -> None:
        """The last minutes, for `--replay`. A disk that is full costs the file, not the watch."""
        samples = list(self._sampler.samples)
        lines = [json.dumps(records.sample_to_json(sample), separators=(",", ":")) for sample in samples]
        try:
            if self._folder is None:
                self._folder = self._options.out or records.new_folder(self._around.logs, _today(), "watch")
                self._folder.mkdir(parents=True, exist_ok=True)
            path = self._folder / f"abort-{_now().replace(':', '')}.jsonl"
            path.write_text("\n".join(lines) + "\n")
        except (OSError, RecordError) as error:
            self._say(f"the readings could not be kept: {error}")
        else:
            self._say(f"the last {len(samples):,} readings are in {path}")

    def _say_how_it_is(self) -> None:
        latest = self._sampler.latest
        close = latest.action is Action.WARN
        if close and not self._close:
            self._say(latest.reason)
        self._close = close
        if time.monotonic() - self._said_s > SAY_EVERY_S:
            requests = self._sampler.running
            self._say(
                f"MemAvailable {gib(self._available_bytes())}, {gib(self._baseline_bytes)} when idle; "
                + ("requests unknown" if requests is None else f"{requests} requests")
            )

    def _say_steps(self) -> None:
        steps = self._guard.steps[self._steps_said :]
        self._steps_said += len(steps)
        for step in steps:
            self._say(step.what, step.at_s)

    def _say(self, what: str, at_s: float | None = None) -> None:
        self._said_s = time.monotonic()
        self._around.console.print(f"{_now(at_s)} memguard: {escape(what)}", highlight=False, soft_wrap=True)


def _now(at_s: float | None = None) -> str:
    moment = datetime.now(tz=timezone.utc) if at_s is None else datetime.fromtimestamp(at_s, tz=timezone.utc)
    return moment.astimezone().strftime("%Y-%m-%dT%H:%M:%S")


def _today() -> str:
    return _now().partition("T")[0]
