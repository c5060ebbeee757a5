"""What follows a decision of the sampler, with nothing in between that could block.

The ladder: the request is aborted through the server; if neither a request ended nor memory came back, which is the
sampler's next decision, the engine gets SIGTERM, and then SIGKILL. Every step is written down. The sampler's thread
only sets events; two threads have been waiting for them since the start, so that it goes on reading while a server
answers or a process ends.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import NamedTuple

from scripts.verify.decide import Action, Decision, Sample
from scripts.verify.engine_process import EngineProcess
from scripts.verify.errors import MemguardError
from scripts.verify.results import Step

REPEAT_S = 0.25
PATIENCE_S = 5.0


class Trip(NamedTuple):
    """The moment the guard tripped, and which request was running (None: between two)."""

    decision: Decision
    sample: Sample
    rid: str | None


class Guard:
    """Trips once, until `calm`. `post_abort` sends one abort to the server and may raise MemguardError.

    engine: the process that may be signalled, or why none may be. now_s: the sampler's clock. in_danger: whether
    memory is still short, asked before the next step.
    """

    def __init__(
        self,
        post_abort: Callable[[str], None],
        *,
        now_s: Callable[[], float],
        in_danger: Callable[[], bool],
        engine: EngineProcess | str = "signals are off",
        repeat_s: float = REPEAT_S,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self.trip_seen: Trip | None = None
        self.last_error = ""
        self.engine = engine
        self.steps: list[Step] = []  # grows at its end only
        self._post_abort = post_abort
        self._now_s = now_s
        self._in_danger = in_danger
        self._repeat_s = repeat_s
        self._patience_s = patience_s
        self._rid: str | None = None
        self._over = False
        self._tripped = threading.Event()
        self._request_over = threading.Event()
        self._escalated = threading.Event()
        self._threads = [
            threading.Thread(target=self._abort, name="memguard-abort", daemon=True),
            threading.Thread(target=self._signal, name="memguard-signal", daemon=True),
        ]

    def start(self) -> None:
        """Start the threads that will do what is decided."""
        for thread in self._threads:
            thread.start()

    def watch(self, rid: str) -> None:
        """This request is in flight now."""
        self._request_over.clear()
        self._rid = rid

    def release(self) -> None:
        """No request is in flight any more."""
        self._rid = None
        self._request_over.set()

    def act(self, decision: Decision, sample: Sample) -> None:
        """Memory runs out. Called in the sampler's thread; returns at once."""
        self.log(decision.reason)
        if self.trip_seen is None:
            self.trip_seen = Trip(decision, sample, self._rid)
        if decision.action is Action.ESCALATE:
            self._escalated.set()
        self._tripped.set()

    def calm(self) -> None:
        """What has tripped it is over: it may trip again."""
        self.trip_seen = None

    @property
    def tripped(self) -> bool:
        """Whether the guard has tripped."""
        return self.trip_seen is not None

    def log(self, what: str) -> None:
        """One step, with its time."""
        self.steps.append(Step(self._now_s(), what))

    def end(self) -> None:
        """Let the waiting threads go."""
        self._over = True
        self.release()
        self._tripped.set()
        self._escalated.set()

    def _abort(self) -> None:
        while True:
            self._tripped.wait()
            if self._over:
                return
            self._tripped.clear()
            asked: str | None = None
            # Again until the request is over: the engine ignores an abort that overtakes the request it is for.
            while (rid := self._rid) is not None and self.tripped:
                if rid != asked:
                    self.log(f"the server is asked to abort {rid}")
                    asked = rid
                try:
                    self._post_abort(rid)
                    self.last_error = ""
                except MemguardError as error:
                    if str(error) != self.last_error:
                        self.log(f"the abort failed: {error}")
                    self.last_error = str(error)
                self._request_over.wait(self._repeat_s)

    def _signal(self) -> None:
        while True:
            self._escalated.wait()
            if self._over:
                return
            self._escalated.clear()
            self._signal_until_it_helps()

    def _signal_until_it_helps(self) -> None:
        engine = self.engine
        if isinstance(engine, str):
            self.log(f"nothing is signalled: {engine}")
            return
        for number in (signal.SIGTERM, signal.SIGKILL):
            self.log(engine.send(number))
            if engine.wait(self._patience_s):
                self.log("the engine has ended")
                return
            if not self._in_danger():
                self.log("memory is back; the engine is left to end by itself")
                return
        self.log("the engine has not ended: a process that waits for its driver cannot be killed")
