"""`--replay`: the guard's decisions on readings from a file, with the exit codes of a live run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.verify.decide import GIB, Sample
from scripts.verify.records import sample_from_json, sample_to_json
from tests.conftest import ROOT, clean_environ
from tests.verify.engine_programs import AT_MOST_S

pytestmark = pytest.mark.slow

FILES = Path(__file__).parent / "replay"


def replay(path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "scripts.verify.memguard", "--replay", str(path), *arguments],
        cwd=ROOT,
        env=clean_environ(COLUMNS="200", PYTHONPATH=f"{ROOT}/adapter:{ROOT}"),
        capture_output=True,
        text=True,
        timeout=AT_MOST_S,
        check=False,
    )


@pytest.mark.parametrize(
    ("name", "code", "said"),
    [
        # A healthy server was killed once for its MemFree.
        ("little-memfree", 0, "6 readings over 5.0 s: quiet"),
        # A start that took the host along: 22, 18, 13 GiB at one reading a second.
        ("collapse", 2, "fell by 9.00 GiB in 2 s: 2.8 s to the guard of 2.00 GiB"),
        # 119 GiB: weights, then a KV cache of 38 GiB in 2.5 s, with one line of the kernel about memory.
        ("healthy-start", 0, "quiet"),
        # Aborted, and nothing came of it.
        ("not-heard", 2, "escalate  MemAvailable 1.40 GiB is below the guard of 2.00 GiB for 5 s"),
        # The transient of each chunk under a budget.
        ("chunk-dips", 0, "quiet"),
    ],
)
def test_reported_readings(name: str, code: int, said: str) -> None:
    """What was reported from real machines, and what must not be taken for it."""
    done = replay(FILES / f"{name}.jsonl", "--guard-gib", "2")
    assert done.returncode == code, done.stdout + done.stderr
    assert said in done.stdout


def test_every_change_of_mind_is_said() -> None:
    """When, in which phase, what and why."""
    lines = replay(FILES / "not-heard.jsonl", "--guard-gib", "2").stdout.splitlines()
    assert [line.split()[3] for line in lines[:-1]] == ["abort", "escalate"]
    assert lines[0].split()[:3] == ["1.0", "s", "ramp"]
    assert lines[-1] == "90 readings over 8.9 s: the guard would have tripped"


def test_the_guard_of_the_start_is_its_own() -> None:
    """A start that ends at 22 GiB is quiet under a guard of 8, and not under one of 30."""
    assert replay(FILES / "healthy-start.jsonl", "--guard-gib", "8").returncode == 0
    assert replay(FILES / "healthy-start.jsonl", "--guard-gib", "2", "--start-guard-gib", "30").returncode == 2


def test_readings_of_the_first_version_can_be_replayed(tmp_path: Path) -> None:
    """Its reports had other names for the same."""
    path = tmp_path / "samples.jsonl"
    line = {"t_s": 1.0, "available_bytes": 2 * GIB, "free_bytes": GIB, "swap_free_bytes": 0}
    path.write_text(json.dumps(line) + "\n")
    assert replay(path, "--guard-gib", "1").returncode == 0
    assert replay(path, "--guard-gib", "3").returncode == 2


def test_the_reference_platforms_ramps() -> None:
    """Recorded there, where chunks take gigabytes within 100 ms and give them back. Under a budget the guard is quiet;
    the static chunk aborts at the guard, and for no fall before it.
    """
    assert replay(FILES / "reference-budget.jsonl", "--guard-gib", "19.1235").returncode == 0
    done = replay(FILES / "reference-static.jsonl", "--guard-gib", "19.2149")
    assert done.returncode == 2
    first = next(line for line in done.stdout.splitlines() if " abort " in line)
    assert first.split()[:3] == ["17.5", "s", "ramp"]
    assert "MemAvailable 19.17 GiB is below the guard of 19.21 GiB" in first


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "holds no readings"),
        ("{}\n{}\n", "line 1: t and mem_available_bytes missing"),
        ("[1]\n[2]\n", "line 1: not an object"),
        ("what\n\n", "line 1"),
        ('{"t": 1, "mem_available_bytes": "much"}\n\n', "mem_available_bytes is 'much', which is no number"),
        ('{"t": NaN, "mem_available_bytes": 1}\n\n', "t is nan, which is no number"),
        ('{"t": 1, "mem_available_bytes": 1, "phase": "end"}\n\n', "phase 'end' is none of start, load, ramp, idle"),
        # Whole lines without an end of line: not cut off, but wrong.
        ('{"t": 1, "mem_available_bytes": "much"}', "line 1: mem_available_bytes is 'much'"),
        ('{"t": 0, "mem_available_bytes": 1}\n{"t": 1}', "line 2: mem_available_bytes missing"),
        (f'{{"t": 1, "mem_available_bytes": {10**400}}}\n', "which is no number"),
        ('{"t": 1e999, "mem_available_bytes": 1}\n', "t is inf, which is no number"),
        ("[" * 100_000 + "\n", "line 1: it is nested too deeply"),
        ('{"t": 2, "mem_available_bytes": 1}\n{"t": 1, "mem_available_bytes": 1}\n', "line 2: t goes back from 2 to 1"),
    ],
)
def test_a_wrong_file_is_named_with_its_line(tmp_path: Path, text: str, said: str) -> None:
    """What is wrong, where, exit code 1."""
    path = tmp_path / "file.jsonl"
    path.write_text(text)
    done = replay(path)
    assert done.returncode == 1
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_no_file_is_said(tmp_path: Path) -> None:
    """A file that is not there."""
    assert "cannot read" in replay(tmp_path / "none").stderr


def test_a_last_line_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    """A host that froze in the middle of a line leaves the rest to replay."""
    path = tmp_path / "file.jsonl"
    path.write_text((FILES / "collapse.jsonl").read_text()[:-20])
    done = replay(path, "--guard-gib", "2")
    assert done.returncode == 0
    assert done.stdout.startswith("2 readings")


def test_a_sample_comes_back_as_it_was() -> None:
    """What is written is what is read; what is not known is not written."""
    full = Sample(1.5, 3 * GIB, GIB, 7, 1.25, 2, 3, "load")
    assert sample_from_json(json.loads(json.dumps(sample_to_json(full)))) == full
    rehearsed = full._replace(host_available_bytes=2 * GIB)
    assert sample_from_json(json.loads(json.dumps(sample_to_json(rehearsed)))) == rehearsed
    assert sample_to_json(rehearsed) == sample_to_json(full) | {"host_mem_available_bytes": 2 * GIB}
    bare = Sample(1.5, 3 * GIB, GIB)
    assert set(sample_to_json(bare)) == {"t", "mem_available_bytes", "mem_free_bytes", "swap_in", "kernel_oom", "phase"}
    assert sample_from_json(sample_to_json(bare)) == bare
    assert sample_from_json({"t": 1, "mem_available_bytes": 2}) == Sample(1, 2, 0)
