"""What the doctor reads: from this machine, held against others who read it, and from a driver made for the test."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from scripts.doctor import examine, readings
from scripts.doctor.verdict import GIB, Level

DRIVER = """
#include <string.h>
int cuInit(unsigned flags) { return INIT; }
int cuDriverGetVersion(int *v) { *v = 13010; return 0; }
int cuDeviceGetCount(int *n) { *n = 1; return 0; }
int cuDeviceGet(int *d, int i) { *d = i; return 0; }
int cuDeviceGetName(char *name, int size, int d) { strncpy(name, "NVIDIA Something", size); return 0; }
int cuDeviceTotalMem_v2(size_t *bytes, int d) { *bytes = 127600748ul << 10; return 0; }
int cuDeviceGetAttribute(int *value, int what, int d) {
    *value = what == 18 ? INTEGRATED : what == 75 ? 12 : what == 76 ? 1 : what == 16 ? 48 : -1;
    return 0;
}
"""
NVML = """
struct memory { unsigned long long total, free, used; };
int nvmlInit_v2(void) { return 0; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *n) { *n = 1; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, void **h) { *h = 0; return 0; }
int nvmlDeviceGetMemoryInfo(void *h, struct memory *m) {
    m->total = 85899345920ull; m->free = 1; m->used = 2; return ANSWER;
}
"""


def driver(folder: Path, *, integrated: int = 0, nvml: int = 0, init: int = 0) -> None:
    """Libraries with the driver's names and calls, whose answers are given."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler to make a driver with")
    defines = [f"-DINTEGRATED={integrated}", f"-DANSWER={nvml}", f"-DINIT={init}"]
    for name, source in (("libcuda.so.1", DRIVER), ("libnvidia-ml.so.1", NVML)):
        command = [compiler, "-shared", "-fPIC", *defines, "-xc", "-", "-o", str(folder / name)]
        subprocess.run(command, input=source, text=True, check=True)


def machine_with(folder: Path, monkeypatch: pytest.MonkeyPatch) -> readings.Machine:
    monkeypatch.setenv("LD_LIBRARY_PATH", str(folder))
    return readings.machine(interval_s=0)


def test_integrated_is_the_devices_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that says it is integrated, and NVML that answers "not supported": unified, memory unknown and not 0."""
    driver(tmp_path, integrated=1, nvml=3)
    here = machine_with(tmp_path, monkeypatch)
    assert here.unified is True
    assert here.devices["nvml_memory"] == ["not supported"]
    [check] = examine.devices(here)
    assert check.level is Level.OK
    for shown in ("capability 12.1", "48 multiprocessors", "121.69 GiB", "is host memory", "unknown, not 0"):
        assert shown in check.reason


def test_a_discrete_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same name, not integrated: memory of its own, whose size NVML gives."""
    driver(tmp_path)
    here = machine_with(tmp_path, monkeypatch)
    assert here.unified is False
    assert here.devices["nvml_memory"][0]["total"] == 80 * GIB


def test_a_driver_that_does_not_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error of cuInit is a warning with its number, not "no GPU"."""
    driver(tmp_path, init=999)
    [check] = examine.devices(machine_with(tmp_path, monkeypatch))
    assert (check.level, "999" in check.reason) == (Level.WARN, True)


def test_a_driver_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time limit ends the question, and the report says so."""
    slow = tmp_path / "slow.py"
    slow.write_text("import time\ntime.sleep(600)\n")
    monkeypatch.setattr(readings, "DEVICES", slow)
    monkeypatch.setattr(readings, "DEVICES_WAIT_S", 0.5)
    assert "did not answer" in readings.read_devices()["error"]


def test_meminfo_against_psutil(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Total, swap and available memory of one moment, as psutil reads them."""
    (tmp_path / "meminfo").write_bytes(Path("/proc/meminfo").read_bytes())
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(tmp_path))
    seen, other = readings.meminfo(tmp_path / "meminfo"), psutil.virtual_memory()
    assert seen["MemTotal"] == other.total
    assert seen["SwapTotal"] == readings.meminfo()["SwapTotal"]
    assert seen["MemAvailable"] == other.available


def test_a_kernel_without_pressure(tmp_path: Path) -> None:
    """No file, no figure; with one it is the `full` line's."""
    assert readings.full_avg10(tmp_path / "none") is None
    file = tmp_path / "memory"
    file.write_text("some avg10=64.00 avg60=1.00 avg300=0.00 total=1\nfull avg10=7.25 avg60=0.10 avg300=0.00 total=1\n")
    assert readings.full_avg10(file) == 7.25


def test_a_killer_that_runs_is_found_with_its_arguments(tmp_path: Path) -> None:
    """By the program's name, whatever started it."""
    program = tmp_path / "earlyoom"
    program.write_text("#!/bin/sh\nread line\n")
    program.chmod(0o755)
    with subprocess.Popen([program, "-m", "4"], stdin=subprocess.PIPE) as process:
        found = readings.machine(interval_s=0).killers
        process.communicate(b"\n")
    assert found["earlyoom"][-2:] == ["-m", "4"]


def test_devices_is_a_program_of_the_standard_library() -> None:
    """It runs without site packages and prints JSON, GPU or not."""
    done = subprocess.run(
        [sys.executable, "-S", "-E", str(readings.DEVICES)],
        capture_output=True,
        text=True,
        check=True,
        env={"PATH": os.environ["PATH"]},
    )
    assert "devices" in json.loads(done.stdout)
