"""The measured peak of a prefill: on real process memory, and on a faked device."""

from __future__ import annotations

import mmap
from dataclasses import dataclass

import pytest

from dynchunk.peak import KEPT_OF_A_SHAPE, SHAPES_KEPT, PeakMeter, ProcessMemory
from dynchunk.policy.budget import Budget, chunk_tokens

MIB = 1 << 20
# Other memory of the test's process moves a little meanwhile.
TOLERANCE = 8 * MIB


@dataclass
class Prefill:
    reqs: list[tuple[str, int, int]]


def prefill(prefix: int, rows: int) -> Prefill:
    return Prefill([("r", prefix, rows)])


def touched(size_bytes: int) -> mmap.mmap:
    """Pages that are really there, straight from the kernel."""
    memory = mmap.mmap(-1, size_bytes)
    for offset in range(0, size_bytes, mmap.PAGESIZE):
        memory[offset] = 1
    return memory


@dataclass
class FakeCudaMemory:
    """Stands for a device; each forward takes what the test says."""

    transient: int = 0
    marks: int = 0
    reads: int = 0

    def mark(self) -> None:
        self.marks += 1

    def transient_bytes(self) -> int:
        self.reads += 1
        return self.transient


class TestProcessMemory:
    """On this process, real pages."""

    def test_what_comes_and_goes_is_counted(self) -> None:
        """200 MiB held for a moment."""
        memory = ProcessMemory()
        memory.mark()
        touched(200 * MIB).close()
        assert memory.transient_bytes() == pytest.approx(200 * MIB, abs=TOLERANCE)

    def test_what_stays_is_not(self) -> None:
        """A KV cache that fills up under the forward is no transient: 150 MiB stay, 100 go."""
        memory = ProcessMemory()
        memory.mark()
        kept = touched(150 * MIB)
        touched(100 * MIB).close()
        assert memory.transient_bytes() == pytest.approx(100 * MIB, abs=TOLERANCE)
        kept.close()

    def test_an_earlier_peak_is_forgotten(self) -> None:
        """The mark is what separates one forward from the one before."""
        memory = ProcessMemory()
        memory.mark()
        touched(200 * MIB).close()
        memory.mark()
        touched(50 * MIB).close()
        assert memory.transient_bytes() == pytest.approx(50 * MIB, abs=TOLERANCE)

    def test_the_coefficient_of_real_forwards(self) -> None:
        """Forwards that hold 24 bytes for each row and key, above a cache that grows: c is found within 5 %."""
        meter, cache, prefix = PeakMeter(ProcessMemory(), 1), [], 0
        for rows in [1024] * 5 + [768] * 5 + [512] * 6:
            meter.before(prefill(prefix, rows))
            cache.append(touched(rows * 1024))
            touched(24 * rows * (prefix + rows)).close()
            meter.after(prefill(prefix, rows))
            prefix += rows
        found = meter.fit()
        assert found.trusted
        assert found.bytes_per_pair == pytest.approx(24, rel=0.05)


def test_only_long_prefills_of_one_request_are_measured() -> None:
    """Decodes, short prefills and batches of several cost not even a mark."""
    memory = FakeCudaMemory()
    meter = PeakMeter(memory, 8192)
    for batch in (prefill(4096, 2048), Prefill([("a", 50_000, 512), ("b", 0, 512)])):
        meter.before(batch)
        meter.after(batch)
    meter.before(None)
    assert (memory.marks, memory.reads) == (0, 0)
    meter.before(prefill(6144, 2048))
    meter.after(prefill(6144, 2048))
    assert (memory.marks, memory.reads) == (1, 1)


def test_a_forward_that_failed_is_not_counted() -> None:
    """`after` does not come when a forward raises; the next one starts anew."""
    memory = FakeCudaMemory(transient=7)
    meter = PeakMeter(memory, 1)
    meter.before(prefill(0, 100))
    meter.before(prefill(0, 100))
    meter.after(prefill(0, 100))
    assert (memory.marks, meter.fit().forwards) == (2, 1)


def test_what_is_kept_has_an_end() -> None:
    """Days of serving keep the last forwards of a bounded number of shapes."""
    meter = PeakMeter(FakeCudaMemory(), 1)
    for rows in range(1, SHAPES_KEPT + 40):
        for _ in range(KEPT_OF_A_SHAPE + 3):
            meter.before(prefill(100_000, rows))
            meter.after(prefill(100_000, rows))
    found = meter.fit()
    assert found.forwards == SHAPES_KEPT * KEPT_OF_A_SHAPE


def test_a_very_long_prompt_leaves_enough_for_a_line() -> None:
    """Of a million tokens most chunks have the same rows x keys; what is kept still tells c."""
    memory = FakeCudaMemory()
    meter = PeakMeter(memory, 8192)
    limits = Budget(200_000_000, "prefix", page=64, chunk_min=64, chunk_max=2048)
    prefix = 0
    while prefix < 1_000_000:
        rows = chunk_tokens(limits, prefix)
        memory.transient = 100 * MIB + 14 * rows * (prefix + rows)
        meter.before(prefill(prefix, rows))
        meter.after(prefill(prefix, rows))
        prefix += rows
    assert meter.fit().trusted
    assert meter.fit().bytes_per_pair == pytest.approx(14, rel=0.01)
