"""What this process's scheduler runs under. Filled once, when the scheduler is ready; engine hooks read it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dynchunk.cache_release import CacheRelease
    from dynchunk.policy.budget import Budget

limits: Budget | None = None
release: CacheRelease | None = None


def counters() -> dict[str, Any]:
    """Counts since start, as plain JSON values."""
    if release is None:
        return {}
    return {"empty_cache": {"calls": release.calls, "ms": round(release.ms, 1)}}
