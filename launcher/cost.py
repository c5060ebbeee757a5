"""What a row and key costs before anything runs: given, measured before, or of the engine's path."""

from __future__ import annotations

from pathlib import Path

from dynchunk import measured_before
from dynchunk.policy import paths
from dynchunk.policy.score_budget import MIB, PLAIN_LIMIT_BYTES
from dynchunk.settings import Settings
from launcher.setting import Setting


def score_limit_bytes(settings: Settings) -> int:
    """DYNCHUNK_INDEXER_SCORE_MIB; what `auto` comes to at the least, because the GPU is not known."""
    limit = settings.indexer_score_mib
    return limit * MIB if isinstance(limit, int) else PLAIN_LIMIT_BYTES


def given(bytes_each: float) -> paths.Cost:
    """What --bytes says."""
    source = f"{bytes_each:g} B for a row and key, given with --bytes"
    return paths.Cost(measured_before.millibytes(bytes_each), None, source, measured=True)


def measured(file: Path) -> tuple[paths.Cost, int]:
    """What a report of memguard says, and the bytes held beside it. Raises measured_before.ReportError."""
    found = measured_before.of_report(file)
    return paths.Cost(found.millibytes, None, f"measured: {file}", measured=True), found.base_bytes


def of_setting(start: Setting, limit_bytes: int, notes: list[str]) -> tuple[paths.Cost | None, int]:
    """By DYNCHUNK_REPORT, else by the path in the model's file; None where neither says. Bytes held beside it.

    limit_bytes: of the score buffers. notes: takes a sentence for what is left out, and for where the path is from.
    """
    reported = start.settings.report
    if reported is not None:
        try:
            return measured(Path(reported))
        except measured_before.ReportError as error:
            notes.append(f"DYNCHUNK_REPORT={reported} is left out: {error}")
    if not start.path:
        return None, 0
    notes.append(f"memory is that of --path {start.path}, by the model's config.json")
    return paths.of_path(start.path, limit_bytes), 0
