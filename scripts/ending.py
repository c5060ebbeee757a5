"""Ctrl-C, SIGTERM and SIGHUP end a program of ours once: what it started is cleaned up undisturbed.

A second Ctrl-C in the middle of the cleaning up would leave engines and reports behind. So only the first one counts;
whoever uses this sees to it that what follows takes a bounded time.
"""

from __future__ import annotations

import signal
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def end_once() -> None:
    """From now on the first of the signals raises KeyboardInterrupt in the main thread, and the later ones do nothing.

    One that is ignored already stays so, as nohup wants it.
    """
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _first)


def _first(_number: int, _frame: FrameType | None) -> None:
    for other in SIGNALS:
        if signal.getsignal(other) is _first:
            signal.signal(other, _later)
    raise KeyboardInterrupt


def _later(_number: int, _frame: FrameType | None) -> None:
    pass
