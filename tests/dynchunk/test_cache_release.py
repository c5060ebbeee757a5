"""When the allocator's unused memory goes back. The CUDA calls are faked: there is no device here."""

from __future__ import annotations

from dynchunk.cache_release import GIB, CacheRelease


class FakeCudaDevice:
    """Counts releases; its memory is whatever a test says."""

    def __init__(self) -> None:
        self.available = 6 * GIB
        self.unused = GIB
        self.blocked = False
        self.released = 0

    def available_bytes(self) -> int:
        return self.available

    def unused_reserved_bytes(self) -> int:
        return self.unused

    def must_not_release(self) -> bool:
        return self.blocked

    def empty_cache(self) -> None:
        self.released += 1
        self.unused = 0


def policy(mode: str) -> tuple[FakeCudaDevice, CacheRelease]:
    device = FakeCudaDevice()
    ticks = iter(range(1000))
    return device, CacheRelease(device, mode, 8192, int(2.5 * GIB), clock=lambda: next(ticks) / 1000)


def test_before_the_next_launch_not_after_the_chunk() -> None:
    """Right after a launch the GPU is still at it and a release would wait; the next launch is when it happens."""
    device, release = policy("always")
    release.after_forward(8192)
    assert device.released == 0
    release.before_launch()
    assert device.released == 1
    release.before_launch()
    assert device.released == 1


def test_short_prefills_do_not_count() -> None:
    """8,191 tokens are one too few."""
    device, release = policy("always")
    release.after_forward(8191)
    release.before_launch()
    assert device.released == 0


def test_decodes_do_not_count() -> None:
    """A decode step is never reported as a prefill, so launching a thousand of them releases nothing."""
    device, release = policy("always")
    for _ in range(1000):
        release.before_launch()
    assert device.released == 0


def test_low_looks_at_what_is_available() -> None:
    """With 6 GiB available nothing is released; with 2.4 GiB once."""
    device, release = policy("low")
    release.after_forward(50_000)
    release.before_launch()
    assert device.released == 0
    device.available = int(2.4 * GIB)
    release.after_forward(50_000)
    release.before_launch()
    release.before_launch()
    assert device.released == 1


def test_nothing_to_give_back_costs_nothing() -> None:
    """When the allocator holds next to nothing unused, the device is not asked."""
    device, release = policy("always")
    device.unused = 1 << 20
    release.after_forward(50_000)
    release.before_launch()
    assert (device.released, release.calls) == (0, 0)


def test_capture_and_pause_put_it_off() -> None:
    """During graph capture or while the engine is paused nothing is released; afterwards it still is."""
    device, release = policy("always")
    release.after_forward(50_000)
    device.blocked = True
    release.before_launch()
    assert device.released == 0
    device.blocked = False
    release.before_launch()
    assert device.released == 1


def test_calls_and_milliseconds_are_counted() -> None:
    """What releasing costs is known."""
    _, release = policy("always")
    release.after_forward(50_000)
    release.before_launch()
    assert (release.calls, round(release.ms, 6)) == (1, 1.0)
