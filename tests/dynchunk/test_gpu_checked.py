"""`unverified on this device` stands in the journal until gpu_check has passed there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dynchunk import gpu_checked, journal

PASSED = {"device": "NVIDIA GB10", "passed": True, "self_test": False}


def outcome(logs: Path) -> str:
    gpu_checked.record("NVIDIA GB10", logs)
    return str(journal.snapshot()["hooks"]["gpu_check"]["outcome"])


@pytest.mark.parametrize(
    ("report", "expected"),
    [
        (PASSED, "verified"),
        (PASSED | {"passed": False}, "unverified on this device"),
        (PASSED | {"self_test": True}, "unverified on this device"),
        (PASSED | {"device": "NVIDIA H200"}, "unverified on this device"),
        ([], "unverified on this device"),
        ({}, "unverified on this device"),
    ],
)
def test_only_a_check_that_passed_on_this_gpu_counts(tmp_path: Path, report: Any, expected: str) -> None:
    """A self-test on a CPU, another GPU, a failure or a broken file verify nothing."""
    assert outcome(tmp_path) == "unverified on this device"
    for name, text in (
        ("a", json.dumps(report)),
        ("b", "{"),
        ("d", "[" * 100_000),
        ("c", json.dumps({"device": "NVIDIA GB10"})),
    ):
        (tmp_path / f"gpu-check-{name}").mkdir()
        (tmp_path / f"gpu-check-{name}" / "gpu-check.json").write_text(text)
    assert outcome(tmp_path) == expected


def test_what_gpu_check_writes_is_what_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The field names are the script's own."""
    from scripts.verify import gpu_check
    from scripts.verify.gpu_parts import Row

    facts = {"device": "NVIDIA GB10", "torch": "2.14.1", "cap_bytes": 1 << 30}
    monkeypatch.setattr(gpu_check, "_facts", lambda *, on_cpu: (facts, ""))
    monkeypatch.setattr(gpu_check, "run_all", lambda facts, *, on_cpu: [Row("reserve", "primed", ok=True)])
    assert gpu_check.main(["--out", str(tmp_path / "gpu-check-2026")]) == 0
    assert outcome(tmp_path) == "verified"
    assert gpu_checked.LOGS.joinpath("..", "adapter", "dynchunk").resolve() == Path(gpu_checked.__file__).parent
