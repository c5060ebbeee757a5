"""Ctrl-C, SIGTERM and SIGHUP end a program of ours once: what it started is cleaned up undisturbed.

A second Ctrl-C in the middle of the cleaning up would leave engines and reports behind. So only the first one counts;
whoever uses this sees to it that what follows takes a bounded time.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
STOP_S = 20.0  # for a process to end by itself

_came = threading.Event()


def end_once() -> None:
    """From now on the first of the signals raises KeyboardInterrupt in the main thread, and the later ones do nothing.

    One that is ignored already stays so, as nohup wants it. Loops should ask `asked` as well: what is raised while
    Python happens to clean up some object goes nowhere.
    """
    _came.clear()
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _first)


def asked() -> bool:
    """Whether one of the signals has come."""
    return _came.is_set()


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """The signals wait until the block is over: a process that is just being started must not be lost sight of."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: handler for number in SIGNALS if callable(handler := signal.getsignal(number))}
    came: list[int] = []
    for number in handlers:
        signal.signal(number, lambda number, _frame: came.append(number))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if came:
        signal.raise_signal(came[0])


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a process and all it started, if it was started in a session of its own. SIGTERM, then SIGKILL.

    Being interrupted only takes the patience away.
    """
    try:
        _signal_session(process, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=STOP_S)
    finally:
        _signal_session(process, signal.SIGKILL)
        process.wait()


def _signal_session(process: subprocess.Popen[bytes], number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def _first(_number: int, _frame: FrameType | None) -> None:
    for other in SIGNALS:
        if signal.getsignal(other) is _first:
            signal.signal(other, _later)
    _came.set()
    raise KeyboardInterrupt


def _later(_number: int, _frame: FrameType | None) -> None:
    pass
