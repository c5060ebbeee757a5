"""One request in flight in a thread of its own, so that the main thread can watch files and hear Ctrl-C."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


class Call(threading.Thread):
    """`done` is set when there is an answer or an error. A daemon: a server that never answers keeps nobody here."""

    def __init__(self, work: Callable[[], dict[str, Any]]) -> None:
        super().__init__(name="memguard-request", daemon=True)
        self.done = threading.Event()
        self.answer: dict[str, Any] = {}
        self.error: Exception | None = None
        self._work = work

    def run(self) -> None:
        """What the thread does."""
        try:
            self.answer = self._work()
        except Exception as error:
            self.error = error
        finally:
            self.done.set()
