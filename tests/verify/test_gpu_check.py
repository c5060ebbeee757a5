"""gpu_check without a GPU: its self-test, and that it notices what is wrong."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from dynchunk.prime_cache import PrimeCache
from scripts.verify import gpu_check, gpu_parts
from scripts.verify.gpu_parts import Row, Selection, Size
from tests.conftest import ROOT, clean_environ

pytestmark = pytest.mark.slow

needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed here")
GIB = 1 << 30
SMALL = Size(rows=24, keys=9_000, repeats=1)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "scripts.verify.gpu_check", *arguments],
        env=clean_environ(PYTHONPATH=f"{ROOT / 'adapter'}:{ROOT}", CUDA_VISIBLE_DEVICES=""),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


@needs_torch
def test_the_self_test(tmp_path: Path) -> None:
    """Every part runs, the figures of the model are the known ones, and the report says that it is of no GPU."""
    done = run("--cpu-self-test", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    data = json.loads((tmp_path / "gpu-check.json").read_text())
    assert (data["passed"], data["self_test"]) == (True, True)
    reserved = {row["variant"]: row["reserved_mib"] for row in data["rows"] if row["check"] == "reserve"}
    assert reserved["none, limit 2,048 MiB"] == 129 * 1024
    assert reserved["primed, limit 2,048 MiB"] == 2048
    assert reserved["none, limit 256 MiB"] == 2176
    assert reserved["primed, limit 256 MiB"] == 256
    assert {row["check"] for row in data["rows"]} == {"reserve", "event timing", "selection"}
    assert len(reserved) == 2 * len(gpu_parts.REMEDIES)
    report = (tmp_path / "REPORT.md").read_text()
    assert "nothing about any GPU" in report
    assert report in done.stdout


@needs_torch
def test_without_a_gpu_it_says_so() -> None:
    """No table that could be taken for one, and an exit code of its own."""
    done = run()
    assert done.returncode == 2
    assert "no GPU that torch can use" in done.stdout


@needs_torch
@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("block", [512, 1000, 4096, 9000])
def test_the_selections_agree(block: int, *, rounded: bool) -> None:
    """Bit-equal values for blocks that do and do not divide the keys; equal ids wherever nothing is tied."""
    import torch

    torch.manual_seed(block)
    query = torch.randint(-512, 513, (SMALL.rows, 64)).float()
    key = torch.randint(-512, 513, (SMALL.keys, 64)).float()
    select = Selection(lambda q, k: gpu_parts._scores(q, k, rounded=rounded), query, key)
    values, ids = select.at_once()
    untied = select.untied(values, 7)
    for more, at in (select.in_keys(block), select.in_rows(7)):
        assert torch.equal(more, values)
        assert torch.equal(at.sort(1).values[untied], ids.sort(1).values[untied])
        assert torch.equal(select.score(query, key).gather(1, at), more)
    assert bool(untied.all()) != rounded


@needs_torch
def test_all_equal_scores() -> None:
    """Everything is tied: values still agree, and no id is called determined."""
    import torch

    select = Selection(lambda q, k: torch.zeros(len(q), len(k)), torch.zeros(5, 64), torch.zeros(2000, 64))
    values, ids = select.in_keys(600)
    assert torch.equal(values, select.at_once()[0])
    assert all(len(set(row.tolist())) == select.best for row in ids)
    assert not bool(select.untied(values, 2).any())


@needs_torch
def test_a_selection_that_loses_a_key_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check is one: a key block too few fails its row, and the others stay."""
    whole = Selection.in_keys
    monkeypatch.setattr(
        Selection, "in_keys", lambda self, block: whole(Selection(self.score, self.query, self.key[:-2000]), block)
    )
    rows = gpu_parts.selection(SMALL, on_cpu=True)
    assert [row.ok for row in rows] == [None, True, False] * 2
    assert not gpu_check.passed(rows)


def test_a_priming_that_does_nothing_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reserve then grows as without a remedy."""
    [row] = gpu_parts.reserve(gpu_parts.PRIMED, 256, gpu_check.FULL, 160 * GIB, on_cpu=True)
    assert row.ok
    monkeypatch.setattr(PrimeCache, "before", lambda self, prefill: None)
    [row] = gpu_parts.reserve(gpu_parts.PRIMED, 256, gpu_check.FULL, 160 * GIB, on_cpu=True)
    assert row.ok is False


def test_what_passes() -> None:
    """One failed row fails all; rows that only compare do not count, and nothing but them is no pass."""
    good, bad, other = Row("a", "b", ok=True), Row("a", "c", ok=False), Row("a", "d")
    assert gpu_check.passed([good, other])
    assert not gpu_check.passed([good, bad])
    assert not gpu_check.passed([other])
    assert not gpu_check.passed([])


def test_a_part_that_breaks_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part that cannot run, and one that there is no time for, are failed rows with the reason."""
    monkeypatch.setattr(gpu_parts, "REMEDIES", ())
    monkeypatch.setattr(gpu_check, "LIMITS_MIB", ())
    monkeypatch.setattr(sys, "executable", "/bin/false")
    facts = {"cap_bytes": GIB, "device": "none", "torch": "0"}
    rows = gpu_check.run_all(facts, on_cpu=True)
    assert [(row.check, row.ok) for row in rows] == [("timing", False), ("selection", False)]
    assert all("exit code 1" in row.note for row in rows)
    monkeypatch.setattr(gpu_check, "DEADLINE_S", 0)
    assert all("not run: 0 s are over" in row.note for row in gpu_check.run_all(facts, on_cpu=True))
    assert "**FAILED**" in gpu_check.render(facts, rows, on_cpu=True)
