"""`--compare OLD NEW`: two reports, what they hold for and how their figures differ."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path

from scripts.verify import side_by_side
from scripts.verify.decide import GIB
from scripts.verify.results import Probe, Run, Verdict, holds_for, smallest_aborted_tokens
from tests.conftest import ROOT, clean_environ
from tests.verify.test_memguard_report import a_run, record


def changed(run: Run, **flags: object) -> Run:
    other = copy.deepcopy(run)
    other.engine["flags"] |= flags
    return other


def test_figures_of_the_same_thing_can_be_compared() -> None:
    """Speed in percent, low water in GiB, verdicts beside each other."""
    new = a_run()
    new.probes[0].end_s = 1_002.0
    new.probes[0].low_water_bytes = 2 * GIB
    text = side_by_side.render([a_run()], [new])
    assert "Same host, driver, image, engine, model, flags and chunk" in text
    assert "| 4,000 | 2,000 | 4,000 | +100.0% | 3.00 GiB | 2.00 GiB | -1.00 GiB | passed | passed |" in text


def test_verdicts_of_different_things_are_told_apart() -> None:
    """Each of host, driver, image, engine, model, flags and chunk is named if it differs."""
    old = a_run()
    differing = {
        "host": a_run(machine={**old.machine, "machine_id": "other"}),
        "driver": a_run(machine={**old.machine, "driver": "590"}),
        "image": a_run(image="lmsysorg/sglang:other"),
        "engine": a_run(engine={**old.engine, "version": "0.5.22"}),
        "model": a_run(engine={**old.engine, "model": "other"}),
        "flags": changed(old, mem_fraction_static=0.8),
        "chunk": a_run(engine={**old.engine, "dynchunk": [{"mode": "on", "effective": {"summary": "budget 1"}}]}),
    }
    assert set(differing) == set(holds_for(old))
    for name, new in differing.items():
        text = side_by_side.conditions(old, new)
        assert "These verdicts hold for different things" in text
        assert [line for line in text.splitlines() if line.startswith("- ")] == [
            f"- {name}: {holds_for(old)[name]} / {holds_for(new)[name]}"
        ]


def test_runs_of_one_label_belong_together() -> None:
    """Two runs in each report are set side by side by their names; sizes that only one has get dashes."""
    more = a_run("static", probes=[Probe(8_000, Verdict.GUARDED)])
    text = side_by_side.render([a_run("budget"), a_run("static")], [a_run("budget"), more])
    assert text.count("Same host, driver") == 2
    assert "| 8,000 | - | - | - | - | - | - | - | ended by the guard |" in text
    assert "old: budget" in text
    assert "new: static" in text
    assert "No label is in both: a, b / c" in side_by_side.render([a_run("a"), a_run("b")], [a_run("c")])


def test_only_the_very_same_conditions_forbid_a_size() -> None:
    """A size that was aborted with another chunk, or on another host, says nothing here."""
    aborted = [Probe(32_000, Verdict.GUARDED), Probe(64_000, Verdict.NOT_RUN)]
    here = a_run(probes=[Probe(1_000)])
    assert smallest_aborted_tokens([a_run(probes=aborted)], here) == 32_000
    assert smallest_aborted_tokens([changed(a_run(probes=aborted), chunked_prefill_size=8)], here) is None
    assert smallest_aborted_tokens([a_run(probes=[Probe(32_000, Verdict.PASSED)])], here) is None


def test_the_command(tmp_path: Path) -> None:
    """It prints Markdown and ends with 0; a folder without a report is an error."""
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        record(tmp_path / name, a_run(), [])
    command = [sys.executable, "-m", "scripts.verify.memguard", "--compare", str(tmp_path / "old")]
    environ = clean_environ(PYTHONPATH=f"{ROOT}/adapter:{ROOT}")

    def run(new: Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*command, str(new)], cwd=ROOT, env=environ, capture_output=True, text=True, timeout=30, check=False
        )

    done = run(tmp_path / "new")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("# memguard: two reports side by side\n")
    done = run(tmp_path)
    assert done.returncode == 1
    assert "holds no run.json" in done.stderr
