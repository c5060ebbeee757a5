"""Whether scripts/verify/gpu_check.py has passed on this kind of GPU.

What no CPU can show (the allocator's behaviour, event timing, the selection's kernels) is a model or a contract until
then, and the journal says so. The check's reports lie in logs/ beside the adapter.
"""

from __future__ import annotations

from pathlib import Path

from dynchunk import journal
from dynchunk.values import parsed

HOOK = "gpu_check"
LOGS = Path(__file__).resolve().parents[2] / "logs"


def report_of(device: str, logs: Path = LOGS) -> Path | None:
    """The newest report of a check that passed on `device` (its name, as the driver gives it)."""
    for path in sorted(logs.glob("gpu-check-*/gpu-check.json"), reverse=True):
        try:
            report = parsed(path.read_text(encoding="utf-8"))
            if report["device"] == device and report["passed"] is True and report["self_test"] is False:
                return path
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return None


def record(device: str, logs: Path = LOGS) -> None:
    """Note whether a check of `device` has passed."""
    report = report_of(device, logs)
    if report is None:
        journal.record(HOOK, journal.UNVERIFIED, f"{device}; python -m scripts.verify.gpu_check looks, in ten minutes")
    else:
        journal.record(HOOK, journal.VERIFIED, f"{device}: {report}")
