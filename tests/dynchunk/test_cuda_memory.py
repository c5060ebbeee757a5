"""The CUDA calls behind priming and measuring. Without a device the counters are faked; the names are torch's own."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dynchunk.policy.allocator import Allocator
from tests.conftest import ROOT, run_python

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed here"),
]
GIB = 1 << 30
MIB = 1 << 20


class FakeTorchCuda:
    """Answers torch.cuda's questions from the allocator's model."""

    def __init__(self) -> None:
        self.model = Allocator()
        self.allocated_peak = 0
        self.segments: list[dict[str, Any]] = []

    def memory_stats_as_nested_dict(self, index: int) -> dict[str, Any]:
        peak = max(self.allocated_peak, self.model.allocated_peak_bytes)
        return {
            "reserved_bytes": {
                "all": {"current": self.model.reserved_bytes, "peak": self.model.reserved_peak_bytes},
            },
            "allocated_bytes": {"all": {"current": self.model.allocated_bytes, "peak": peak}},
        }

    def reset_peak_memory_stats(self, index: int) -> None:
        self.model.allocated_peak_bytes = self.model.allocated_bytes

    def memory_snapshot(self) -> list[dict[str, Any]]:
        return self.segments

    def mem_get_info(self, index: int) -> tuple[int, int]:
        return 5 * GIB, 100 * GIB


def fake_device(monkeypatch: pytest.MonkeyPatch, *, is_integrated: bool = False) -> tuple[FakeTorchCuda, Any]:
    import torch

    from dynchunk.patches.cuda_memory import CudaMemory

    fake = FakeTorchCuda()
    for name in ("memory_stats_as_nested_dict", "reset_peak_memory_stats", "mem_get_info", "memory_snapshot"):
        # raising=True, the default: a name that torch does not have fails here.
        monkeypatch.setattr(torch.cuda, name, getattr(fake, name))
    properties = SimpleNamespace(name="fake", is_integrated=is_integrated)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    return fake, CudaMemory(0, SimpleNamespace(_engine_paused=False))


def test_a_forward_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peak since the mark less what is live: 300 MiB for a moment, of which 100 stay, are 200."""
    fake, memory = fake_device(monkeypatch)
    fake.model.free(fake.model.allocate(GIB))
    memory.mark()
    fake.model.allocate(100 * MIB)
    fake.model.free(fake.model.allocate(200 * MIB))
    assert memory.transient_bytes() == 200 * MIB
    assert memory.reserved_peak_bytes() == fake.model.reserved_peak_bytes


def test_headroom_on_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the driver has, and what the allocator holds unused."""
    fake, memory = fake_device(monkeypatch)
    fake.model.free(fake.model.allocate(3 * GIB))
    assert memory.headroom_bytes(guard_bytes=2 * GIB) == 8 * GIB


def test_what_graphs_keep_is_no_headroom(monkeypatch: pytest.MonkeyPatch) -> None:
    """A captured graph's pool is reserved, and what is unused in it cannot be had: 2 of these 3 GiB."""
    import torch

    from dynchunk.patches.cuda_memory import CudaMemory

    fake, _ = fake_device(monkeypatch)
    fake.model.free(fake.model.allocate(3 * GIB))
    fake.segments = [
        {"device": 0, "segment_pool_id": (0, 1), "total_size": 2 * GIB, "allocated_size": 0},
        {"device": 0, "segment_pool_id": (0, 0), "total_size": GIB, "allocated_size": 0},
        {"device": 1, "segment_pool_id": (0, 1), "total_size": GIB, "allocated_size": 0},
    ]
    memory = CudaMemory(0, SimpleNamespace(_engine_paused=False))
    assert memory.headroom_bytes(guard_bytes=0) == 6 * GIB
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda index: 3 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda index: 0)
    assert memory.unused_reserved_bytes() == GIB


def test_headroom_on_shared_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """MemAvailable less the guard, whatever the driver says."""
    _, memory = fake_device(monkeypatch, is_integrated=True)
    meminfo = tmp_path / "meminfo"
    meminfo.write_text(f"MemFree: 1 kB\nMemAvailable: {7 * GIB // 1024} kB\n")
    monkeypatch.setattr("dynchunk.patches.cuda_device.Path", lambda _: meminfo)
    assert memory.available_bytes() == 7 * GIB
    assert memory.headroom_bytes(guard_bytes=GIB) == 6 * GIB


@pytest.mark.parametrize(
    ("conf", "outcome"),
    [("per_process_memory_fraction:0.92,garbage_collection_threshold:0.95", "applied"), ("", "not in use")],
)
def test_whether_the_fraction_is_in_force(conf: str, outcome: str) -> None:
    """Read back from the real torch, not from what was wished for."""
    done = run_python(
        "from dynchunk import journal\nfrom dynchunk.patches.cuda_memory import record_memory_fraction\n"
        "record_memory_fraction(); print(journal.snapshot()['hooks']['memory_fraction'])",
        path=(ROOT / "adapter",),
        DYNCHUNK_MEMORY_FRACTION="0.92",
        PYTORCH_ALLOC_CONF=conf,
        PATH=os.environ["PATH"],
    )
    assert f"'outcome': '{outcome}'" in done.stdout, done.stderr
