"""Fixtures: a fake engine, and memguard around it at a pace for tests."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from scripts.verify import figures, machine, records, session
from scripts.verify.decide import GIB
from scripts.verify.options import Options, Surroundings
from scripts.verify.results import Run
from scripts.verify.session import run_memguard
from tests.verify.counted_host import CountedHost
from tests.verify.engine_programs import PATIENT
from tests.verify.fake_engine import FakeEngine

QUICK = {
    "sample_interval_s": 0.005,
    "baseline_s": 0.08,
    "tick_s": 0.02,
    **PATIENT,
    "hold_ground": lambda: False,
}


@pytest.fixture
def start_engine(tmp_path: Path) -> Iterator[Callable[..., FakeEngine]]:
    """Start fake engines; they end with the test."""
    started: list[FakeEngine] = []

    def start(**how: Any) -> FakeEngine:
        folder = tmp_path / f"engine{len(started)}"
        folder.mkdir()
        started.append(FakeEngine(folder, **how))
        return started[-1]

    yield start
    for engine in started:
        engine.stop()


@dataclass
class Ran:
    """One run of memguard: its exit code, what the terminal showed, what the folder holds."""

    code: int
    shown: str
    folder: Path

    @property
    def runs(self) -> list[Run]:
        return records.load(self.folder)

    @property
    def run(self) -> Run:
        return self.runs[-1]

    @property
    def report(self) -> str:
        return (self.folder / "REPORT.md").read_text()


@pytest.fixture
def memguard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ran]:
    """Run memguard against a fake engine; plots are not drawn unless asked for, they take a second each time."""
    draw = figures.draw
    monkeypatch.setattr(machine, "commit", lambda: "0123456789ab")
    monkeypatch.setattr(session, "Host", CountedHost)

    def run(
        engine: FakeEngine, *sizes: int, plots: bool | None = False, around: dict[str, Any] | None = None, **how: Any
    ) -> Ran:
        if plots is not None:
            monkeypatch.setattr(figures, "draw", draw if plots else lambda folder, measured: [])
        output = io.StringIO()
        surroundings = Surroundings(
            Console(file=output, width=200),
            **{
                "logs": tmp_path / "logs",
                "proc": engine.folder,
                "kmsg": engine.folder / "kmsg",
                **QUICK,
                **(around or {}),
            },
        )
        if "headroom_bytes" not in how:
            how.setdefault("guard_bytes", 2 * GIB)
        options = Options(url=how.pop("url", engine.url), sizes_tokens=sizes, command="memguard", **how)
        code = run_memguard(options, surroundings)
        folders = sorted((tmp_path / "logs").glob("profile-*"), key=lambda folder: folder.stat().st_mtime_ns)
        return Ran(code, output.getvalue(), options.append or options.out or folders[-1])

    return run
