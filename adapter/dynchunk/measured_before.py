"""What a row and key costs, from a report of memguard, and what is wrong with one that does not say.

DYNCHUNK_BUDGET=auto, plan and doctor read it alike. For the automatic budget it counts only on the engine, model and
device that it was measured on.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple

from dynchunk import belongs_to, values
from dynchunk.policy import paths
from dynchunk.policy.coefficient import LINE
from dynchunk.shortened import shortened

LEAST_BYTES_PER_PAIR = 1 / paths.MILLI  # a report has no more decimals, and 0 would say that any chunk fits
MOST_BYTES_PER_PAIR = 10**6
MOST_BASE_BYTES = 1 << 50
NOTHING_MEASURED = (
    "this report has no measured coefficient: it is of an older version or of a stock engine; run memguard again"
)


class ReportError(ValueError):
    """A report holds nothing to count with. The message says why, with the cure."""


class Measured(NamedTuple):
    """Thousandths of a byte for each row and key, rounded up, and bytes that are held however small the chunk."""

    millibytes: int
    base_bytes: int


def of_report(file: Path) -> Measured:
    """The line that a run has measured. Raises ReportError."""
    return _line(_coefficient(file))


def of_this_engine(file: Path, here: Mapping[str, str]) -> Measured:
    """The same, if what it belongs to is what the figures of this engine belong to. Raises ReportError."""
    measured = _coefficient(file)
    there = measured.get("belongs_to")
    if not isinstance(there, Mapping):
        raise ReportError("it does not say which engine it was measured on; run memguard again")
    differs = belongs_to.of_another(here, there)
    if differs:
        raise ReportError(f"it is {differs}")
    return _line(measured)


def millibytes(bytes_per_pair: float) -> int:
    """Thousandths of a byte, rounded up; at least one, as nothing costs nothing."""
    return max(ceil(bytes_per_pair * paths.MILLI), 1)


def _line(measured: Mapping[str, Any]) -> Measured:
    if measured.get("kind") != LINE:
        kind = shortened(str(measured.get("kind")))
        raise ReportError(f"what it measured follows no line ({kind}), so nothing can be counted with it")
    if measured.get("trusted", True) is not True:  # reports of older versions do not say
        raise ReportError("it says itself that its measured coefficient is not to be trusted; run memguard again")
    try:
        each = values.number(measured.get("bytes_per_pair"), LEAST_BYTES_PER_PAIR, MOST_BYTES_PER_PAIR)
        base = values.number(measured.get("base_bytes"), 0, MOST_BASE_BYTES)
    except ValueError as error:
        raise ReportError(f"its measured coefficient is damaged: {error}") from None
    return Measured(millibytes(each), int(base))


def _coefficient(file: Path) -> Mapping[str, Any]:
    try:
        report = values.parsed(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ReportError("there is no such file") from None
    except IsADirectoryError:
        own = file / "run.json"
        cure = f"name its run.json: {own}" if own.is_file() else "name the run.json that memguard wrote"
        raise ReportError(f"it is a folder; {cure}") from None
    except OSError as error:
        raise ReportError(f"it cannot be read: {error.strerror}") from None
    except ValueError:
        raise ReportError("it is no JSON; name a run.json that memguard wrote") from None
    if not isinstance(report, Mapping):
        raise ReportError("it is no report; name a run.json that memguard wrote")
    measured = report.get("coefficient")
    if not isinstance(measured, Mapping):
        raise ReportError(NOTHING_MEASURED)
    return measured
