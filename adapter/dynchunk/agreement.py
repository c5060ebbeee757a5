"""What all ranks must have in common: settings, compared at start, and changes, adopted at one step.

Every rank runs a scheduler of its own and must come to the same batches. At start each rank puts its settings into the
store that the ranks met in and reads everybody else's. Later changes ride the stream of requests: the entry rank
appends an Update to what it has received, the engine broadcasts and relays the list as it does anyway, and every rank,
the sender included, adopts it where it processes that list, before it schedules. No new collective, no new deadlock.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

KEY = "dynchunk/rank{}"
READ = "dynchunk/read{}"
LAST_READER_S = 5
# Ranks reach this point within seconds of each other: they have just finished collectives together.
MISSING_RANK_S = 300


class DisagreementError(RuntimeError):
    """The ranks of one engine do not run under the same settings."""


class Store(Protocol):
    """The part of torch's store that is used. `get` blocks until the key is there, `wait` at most so long."""

    def set(self, key: str, value: str) -> Any:
        """Publish a value."""

    def wait(self, keys: list[str], timeout: timedelta) -> Any:
        """Return when the keys are there; raise when the time is up."""

    def get(self, key: str) -> bytes:
        """Read a value."""


@dataclass(frozen=True)
class Update:
    """A change on its way to all ranks. version: counts up, so that the log can say which one is in force."""

    version: int
    kind: str
    values: tuple[Any, ...]


def compare(
    store: Store,
    rank: int,
    world_size: int,
    mine: Mapping[str, Any],
    *,
    rank_name: str,
    report: Mapping[str, Any],
) -> dict[str, dict[str, Any]]:
    """Publish this rank's settings and read all others'. Raises DisagreementError naming rank, knob and both values.

    report: what may differ, such as free memory. -> everybody's, by rank name: the same on all ranks.
    """
    store.set(KEY.format(rank), json.dumps({"name": rank_name, "report": report, **mine}))
    everybody = []
    for other in range(world_size):
        try:
            store.wait([KEY.format(other)], timedelta(seconds=MISSING_RANK_S))
        except Exception as error:
            raise DisagreementError(
                f"rank {other} has not said within {MISSING_RANK_S} s what it runs under: it has ended, or runs "
                "without DynChunk; start every host with the same image and DYNCHUNK_MODE"
            ) from error
        everybody.append(json.loads(store.get(KEY.format(other))))
    store.set(READ.format(rank), "")
    found = differences(everybody)
    if found:
        # The store lives in one of these ranks; it must not go before the others have read why.
        with suppress(Exception):
            store.wait([READ.format(other) for other in range(world_size)], timedelta(seconds=LAST_READER_S))
        raise DisagreementError(
            "the ranks of this engine run under different settings, which would make them build different batches; "
            "give every host the same environment:\n" + "\n".join(f"  - {line}" for line in found)
        )
    return {one["name"]: one["report"] for one in everybody}


def differences(everybody: list[dict[str, Any]]) -> list[str]:
    """A sentence for each knob on which a rank differs from the first one."""
    first = everybody[0]
    return [
        f"{key}: {first.get(key)!r} on rank 0 ({first['name']}), {other.get(key)!r} on rank {number} ({other['name']})"
        for number, other in enumerate(everybody[1:], start=1)
        for key in sorted({*first, *other} - {"name", "report"})
        if first.get(key) != other.get(key)
    ]


class Outbox:
    """Updates of the entry rank that wait for the next round of requests."""

    def __init__(self) -> None:
        self._version = 0
        self._waiting: list[Update] = []

    def post(self, kind: str, *values: Any) -> Update:
        """Send a change to all ranks with the next requests."""
        self._version += 1
        update = Update(self._version, kind, values)
        self._waiting.append(update)
        return update

    def take(self) -> list[Update]:
        """What is to ride with the requests just received."""
        taken, self._waiting = self._waiting, []
        return taken
