"""Whether figures that were kept are of the engine that runs: what they belong to, against what this one is."""

from __future__ import annotations

from collections.abc import Mapping

from dynchunk.shortened import shortened


def of_another(here: Mapping[str, str], there: Mapping[str, object]) -> str:
    """The first thing in which they differ, as a phrase; empty where figures from `there` count `here`."""
    for name, mine in here.items():
        if there.get(name) != mine:
            return f"of another engine: {name} is {mine!r} here and {shortened(repr(there.get(name)))} there"
    return ""
