"""A report of an earlier run: what counts on which engine, and what is said of any other."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from dynchunk import measured_before
from dynchunk.measured_before import Measured, ReportError

HERE = {"engine": "0.5.23", "model": "/m", "score limit": "268,435,456 bytes"}
LINE: dict[str, Any] = {"kind": "line", "bytes_per_pair": 12.0009, "base_bytes": 7, "belongs_to": HERE}


def test_an_earlier_report_counts_on_the_same_engine(tmp_path: Path) -> None:
    """Rounded up to a thousandth of a byte; what it says of other things does not matter."""
    file = tmp_path / "run.json"
    file.write_text(json.dumps({"coefficient": LINE | {"belongs_to": HERE | {"colour": "red"}}, "probes": []}))
    assert measured_before.of_this_engine(file, HERE) == Measured(12_001, 7)
    file.write_text(json.dumps({"coefficient": LINE | {"trusted": True, "bytes_per_pair": 0.001}}))
    assert measured_before.of_this_engine(file, HERE) == Measured(1, 7)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"belongs_to": HERE | {"engine": "0.5.22"}}, "engine is '0.5.23' here and '0.5.22' there"),
        ({"belongs_to": {}}, "of another engine"),
        ({"belongs_to": None}, "does not say which engine"),
        ({"belongs_to": HERE | {"model": "x" * 100_000}}, "(100,002 characters)"),
        ({"kind": "steps"}, "follows no line (steps)"),
        ({"bytes_per_pair": float("nan")}, "nan: not a number"),
        ({"bytes_per_pair": True}, "True: not a number"),
        ({"bytes_per_pair": 0}, "its measured coefficient is damaged: 0: not a number from 0.001 to 1,000,000"),
        ({"bytes_per_pair": 0.0}, "its measured coefficient is damaged: 0.0: not a number"),
        ({"trusted": False}, "not to be trusted; run memguard again"),
        ({"trusted": None}, "not to be trusted; run memguard again"),
        ({"base_bytes": -1}, "-1: not a number"),
    ],
)
def test_a_report_that_does_not_count_says_why(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    """Another engine, no measurement, a step function, a damaged figure."""
    file = tmp_path / "run.json"
    file.write_text(json.dumps({"coefficient": LINE | changes}))
    with pytest.raises(ReportError, match=re.escape(reason)):
        measured_before.of_this_engine(file, HERE)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"coefficient": null}', "[" * 100_000, "\x00", '{"coefficient": 1}'])
def test_what_is_no_report(tmp_path: Path, text: str) -> None:
    """Whatever a file holds, it is said and nothing else happens."""
    file = tmp_path / "run.json"
    file.write_text(text)
    with pytest.raises(ReportError, match=r"run\.json that memguard wrote|run memguard again"):
        measured_before.of_this_engine(file, HERE)
