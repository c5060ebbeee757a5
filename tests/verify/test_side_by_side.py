"""`--compare OLD NEW`: two reports, what they hold for and how their figures differ."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts.verify import records, report, side_by_side
from scripts.verify.decide import GIB
from scripts.verify.errors import RecordError
from scripts.verify.results import Abort, Probe, Run, Step, Verdict, holds_for, smallest_aborted_tokens, to_json
from tests.conftest import ROOT, clean_environ
from tests.verify.engine_programs import AT_MOST_S
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
            [*command, str(new)], cwd=ROOT, env=environ, capture_output=True, text=True, timeout=AT_MOST_S, check=False
        )

    done = run(tmp_path / "new")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("# memguard: two reports side by side\n")
    by_file = run(tmp_path / "new" / "run.json")
    assert (by_file.returncode, by_file.stdout) == (0, done.stdout)
    done = run(tmp_path)
    assert done.returncode == 1
    assert "holds no run.json" in done.stderr


def test_one_run_of_a_report_by_its_file(tmp_path: Path) -> None:
    """Its folder is all of them."""
    for name, label in (("run.json", "first"), ("run-2.json", "second")):
        (tmp_path / name).write_text(json.dumps(to_json(a_run(label))))
    assert [run.label for run in records.load_named(tmp_path)] == ["first", "second"]
    assert [run.label for run in records.load_named(tmp_path / "run-2.json")] == ["second"]
    (tmp_path / "other.txt").write_text("{}")
    with pytest.raises(RecordError, match=r"other\.txt is not a run of this memguard"):
        records.load_named(tmp_path / "other.txt")


FULL = a_run(
    abort=Abort(1_002.0, GIB, "low", 4_000),
    steps=[Step(1_001.0, "asked")],
    machine={"memory_total_bytes": GIB, "gpus": [{"name": "g"}], "swap_total_bytes": None},
    engine={"flags": {"page_size": 64}, "dynchunk": [{"mode": "on", "effective": None, "hooks": {"a": {}}}]},
    coefficient={"kind": "line"},
)


def test_a_full_run_comes_back(tmp_path: Path) -> None:
    """Everything that memguard writes is read again, and can be rendered."""
    (tmp_path / "run.json").write_text(json.dumps(to_json(FULL)))
    [read] = records.load(tmp_path)
    assert read == FULL
    assert "side by side" in side_by_side.render([read], [read])
    assert "asked" in report.render([read], [])


@pytest.mark.parametrize(
    ("where", "value"),
    [
        (("engine",), {}),
        (("engine",), None),
        (("engine", "flags"), None),
        (("engine", "dynchunk"), [5]),
        (("engine", "dynchunk"), None),
        (("engine", "dynchunk", 0, "effective"), "x"),
        (("engine", "dynchunk", 0, "hooks"), {"sizer": 5}),
        (("machine",), None),
        (("machine", "gpus"), [None]),
        (("machine", "gpus", 0), {}),
        (("machine", "gpus", 0, "memory_bytes"), "all"),
        (("machine", "memory_total_bytes"), "much"),
        (("label",), None),
        (("started_s",), "now"),
        (("started_s",), float("inf")),
        (("guard_bytes",), 10**400),
        (("sizes_tokens",), ["many"]),
        (("coefficient",), 5),
        (("notes",), [1]),
        (("steps",), None),
        (("steps", 0), [1, 2]),
        (("abort",), 5),
        (("abort", "available_bytes"), None),
        (("outcome",), []),
        (("probes",), [5]),
        (("probes", 0, "low_water_bytes"), "low"),
        (("probes", 0, "verdict"), None),
        (("probes", 0, "size_tokens"), True),
        (("probes", 0, "chunks"), [5]),
        (("probes", 0, "chunks", 0), [0, 1.5, 1, 2]),
    ],
)
def test_a_run_that_was_broken_by_hand(tmp_path: Path, where: tuple[Any, ...], value: Any) -> None:
    """JSON that no memguard wrote is named with its file, whatever is wrong in it."""
    values = to_json(FULL)
    *folders, name = where
    inner = values
    for folder in folders:
        inner = inner[folder]
    inner[name] = value
    (tmp_path / "run.json").write_text(json.dumps(values))
    with pytest.raises(RecordError, match=r"run\.json is not a run of this memguard"):
        records.load(tmp_path)


@pytest.mark.parametrize("text", ["", "5", "[]", "{}", "[" * 100_000, "9" * 5000])
def test_a_file_that_is_no_run(tmp_path: Path, text: str) -> None:
    """The same sentence."""
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(RecordError, match="is not a run of this memguard"):
        records.load(tmp_path)
