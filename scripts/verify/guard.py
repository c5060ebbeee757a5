"""From the sampler's decision to the abort at the server, with nothing in between that could block.

The sampler's thread only sets an event; a second thread has been waiting for it since the start, so the sampler goes on
reading while the server answers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple

from scripts.verify.decide import Decision, Sample
from scripts.verify.errors import MemguardError

REPEAT_S = 0.25


class Trip(NamedTuple):
    """The moment the guard tripped, and which request was running (None: between two)."""

    decision: Decision
    sample: Sample
    rid: str | None


class Guard:
    """Trips at most once. `post_abort` sends one abort to the server and may raise MemguardError."""

    def __init__(self, post_abort: Callable[[str], None], repeat_s: float = REPEAT_S) -> None:
        self.trip_seen: Trip | None = None
        self.last_error = ""
        self._post_abort = post_abort
        self._repeat_s = repeat_s
        self._rid: str | None = None
        self._woken = threading.Event()
        self._request_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memguard-abort", daemon=True)

    def start(self) -> None:
        """Start the thread that will post the abort."""
        self._thread.start()

    def watch(self, rid: str) -> None:
        """This request is in flight now."""
        self._request_over.clear()
        self._rid = rid

    def release(self) -> None:
        """No request is in flight any more."""
        self._rid = None
        self._request_over.set()

    def trip(self, decision: Decision, sample: Sample) -> None:
        """Memory ran out. Called in the sampler's thread; returns at once."""
        self.trip_seen = Trip(decision, sample, self._rid)
        self._woken.set()

    @property
    def tripped(self) -> bool:
        """Whether the guard has tripped."""
        return self.trip_seen is not None

    def end(self) -> None:
        """Let the waiting thread go."""
        self.release()
        self._woken.set()

    def _run(self) -> None:
        self._woken.wait()
        # Again until the request is over: the engine ignores an abort that overtakes the request it is for.
        while (rid := self._rid) is not None:
            try:
                self._post_abort(rid)
                self.last_error = ""
            except MemguardError as error:
                self.last_error = str(error)
            self._request_over.wait(self._repeat_s)
