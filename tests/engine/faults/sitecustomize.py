"""Breaks DynChunk from outside, in the engine's processes; test_ranks.py puts this folder behind the boot folder.

FAULT=decision: the fifth decision about a continuing chunk raises, on every rank alike (all of them make the same
decisions). FAULT=forward: the fifth line of one rank's trace raises, on that rank alone.
"""

import os

RAISE_AT = 5


def _break(owner: object, name: str, *, only: str = "") -> None:
    original = getattr(owner, name)
    calls = 0

    def broken(*args: object, **kwargs: object) -> object:
        nonlocal calls
        if only in str(getattr(args[0], "path", "")):
            calls += 1
            if calls == RAISE_AT:
                raise RuntimeError("broken by the test")
        return original(*args, **kwargs)

    setattr(owner, name, broken)


if os.environ.get("FAULT") == "decision":
    from dynchunk.policy import admission

    _break(admission, "continue_chunk")
elif os.environ.get("FAULT") == "forward":
    from dynchunk.trace import Trace

    _break(Trace, "write", only=".pp0tp1")
