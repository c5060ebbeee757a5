"""Breaks DynChunk from outside, in the engine's processes; tests put this folder behind the boot folder.

FAULT=decision: the fifth decision about a continuing chunk raises, on every rank alike (all of them make the same
decisions). FAULT=forward: the fifth line of one rank's trace raises, on that rank alone. FAULT=slow: that rank takes
longer over each forward. FAULT=noise: measured times are off by a factor of up to ten. FAULT=fit: every fit raises.
"""

import os
import random
import time
from collections.abc import Callable

FAULT = os.environ.get("FAULT")
RAISE_AT = 5


def _wrap(owner: object, name: str, around: Callable[..., object]) -> None:
    original = getattr(owner, name)
    setattr(owner, name, lambda *args: around(original, *args))


def _raise_once() -> Callable[..., object]:
    calls = 0

    def around(original: Callable[..., object], *args: object) -> object:
        nonlocal calls
        calls += 1
        if calls == RAISE_AT:
            raise RuntimeError("broken by the test")
        return original(*args)

    return around


def _on_one_rank(step: Callable[..., object]) -> Callable[..., object]:
    def around(original: Callable[..., object], trace: object, *args: object) -> object:
        return (step if str(trace.path).endswith("tp1") else lambda call, *a: call(*a))(original, trace, *args)

    return around


def _slowly(original: Callable[..., object], *args: object) -> object:
    time.sleep(0.05)
    return original(*args)


def _noisily(
    original: Callable[..., object], learner: object, ordinal: int, prefix: int, tokens: int, ms: float
) -> object:
    return original(learner, ordinal, prefix, tokens, ms * 10 ** random.uniform(-0.5, 0.5))


def _broken(*_args: object) -> object:
    raise RuntimeError("broken by the test")


if FAULT == "decision":
    from dynchunk.policy import admission

    _wrap(admission, "continue_chunk", _raise_once())
elif FAULT in ("forward", "slow"):
    from dynchunk.trace import Trace

    _wrap(Trace, "write", _on_one_rank(_slowly if FAULT == "slow" else _raise_once()))
elif FAULT in ("noise", "fit"):
    from dynchunk.policy.learner import Learner

    _wrap(*((Learner, "timed", _noisily) if FAULT == "noise" else (Learner, "_attempt", _broken)))
