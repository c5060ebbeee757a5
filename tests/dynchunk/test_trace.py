"""The trace: one whole JSON line a batch, and never a reason for the server to fail."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dynchunk.trace import Trace


def test_one_line_a_batch(tmp_path: Path) -> None:
    """Rows are summed, the longest prefix is named, requests keep their order."""
    path = tmp_path / "trace.jsonl"
    trace = Trace(str(path))
    trace.write(1000.1234567, 12.34567, "extend", [("a", 4096, 1024), ("b", 0, 500)])
    trace.write(1001.0, None, "mixed", [("a", 5120, 512), ("c", 77, 1)])
    first, second = map(json.loads, path.read_text().splitlines())
    assert first == {
        "t": 1000.123457,
        "ms": 12.346,
        "mode": "extend",
        "rows": 1524,
        "longest": 4096,
        "reqs": [["a", 4096, 1024], ["b", 0, 500]],
    }
    assert (second["ms"], second["rows"], second["longest"]) == (None, 513, 5120)


def test_lines_are_appended(tmp_path: Path) -> None:
    """An earlier run's trace is the user's data and stays."""
    path = tmp_path / "trace.jsonl"
    path.write_text("before\n")
    Trace(str(path)).write(0, None, "extend", [("a", 0, 1)])
    assert path.read_text().startswith("before\n{")


def test_a_folder_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A trace that cannot be opened is noted with the reason; writing to it does nothing."""
    from dynchunk import journal

    Trace(str(tmp_path / "none" / "trace")).write(0, None, "extend", [("a", 0, 1)])
    noted = journal.snapshot()["hooks"]["trace"]
    assert noted["outcome"] == "refused"
    assert "No such file or directory" in noted["detail"]


def test_a_full_disk_ends_the_trace_not_the_server() -> None:
    """The first failed write is noted; later ones are not tried."""
    from dynchunk import journal

    trace = Trace("/dev/full")
    trace.write(0, None, "extend", [("a", 0, 1)])
    trace.write(0, None, "extend", [("a", 0, 1)])
    assert "No space left" in journal.snapshot()["hooks"]["trace"]["detail"]
