"""Breaks DynChunk from outside, in the engine's processes; tests put this folder behind the boot folder.

FAULT names one or more, by commas. decision: the fifth decision about a continuing chunk raises, on every rank alike
(all of them make the same decisions). forward: the fifth line of one rank's trace raises, on that rank alone. slow:
that rank takes longer over each forward. fit: every fit raises.
"""

import os
import time
from collections.abc import Callable

FAULTS = os.environ.get("FAULT", "").split(",")
RAISE_AT = 5


def _wrap(owner: object, name: str, around: Callable[..., object]) -> None:
    original = getattr(owner, name)
    setattr(owner, name, lambda *args: around(original, *args))


def _raise_once(where: str) -> Callable[..., object]:
    calls = 0

    def around(original: Callable[..., object], *args: object) -> object:
        nonlocal calls
        calls += 1
        if calls == RAISE_AT:
            raise RuntimeError(f"broken by the test in {where}")
        return original(*args)

    return around


def _on_one_rank(step: Callable[..., object]) -> Callable[..., object]:
    def around(original: Callable[..., object], trace: object, *args: object) -> object:
        return (step if str(trace.path).endswith("tp1") else lambda call, *a: call(*a))(original, trace, *args)

    return around


def _slowly(original: Callable[..., object], *args: object) -> object:
    time.sleep(0.05)
    return original(*args)


def _broken(*_args: object) -> object:
    raise RuntimeError("broken by the test in a fit")


if "decision" in FAULTS:
    from dynchunk.policy import admission

    _wrap(admission, "continue_chunk", _raise_once("a decision"))
if "forward" in FAULTS or "slow" in FAULTS:
    from dynchunk.trace import Trace

    _wrap(Trace, "write", _on_one_rank(_slowly if "slow" in FAULTS else _raise_once("a trace")))
if "fit" in FAULTS:
    from dynchunk.policy.learner import Learner

    _wrap(Learner, "_attempt", _broken)
