"""The primed block, on the allocator's model. There is no device here: FakeCudaDevice stands for it."""

from __future__ import annotations

import pytest

from dynchunk.policy.allocator import MIB, Allocator, Block, DeviceFullError, static_chunks, tiles
from dynchunk.prime_cache import MOST_BLOCKS, PrimeCache, Remedy, resolve
from dynchunk.settings import Settings, SettingsError, from_env

GIB = 1 << 30
LIMIT = 256 * MIB
PREFILL = object()


class FakeCudaDevice:
    """The calls of a CUDA device, answered by the allocator's model."""

    def __init__(self, limit_bytes: int | None = None) -> None:
        self.allocator = Allocator(limit_bytes)
        self.blocked = False

    def reserved_peak_bytes(self) -> int:
        return self.allocator.reserved_peak_bytes

    def must_not_release(self) -> bool:
        return self.blocked

    def allocate_and_free(self, size_bytes: int) -> None:
        self.allocator.free(self.allocator.allocate(size_bytes))


def primed(limit_bytes: int | None = None) -> tuple[FakeCudaDevice, PrimeCache]:
    device = FakeCudaDevice(limit_bytes)
    ticks = iter(range(100_000))
    return device, PrimeCache(device, LIMIT, clock=lambda: next(ticks) / 1000)


def run(device: FakeCudaDevice, prime: PrimeCache, kept: dict[int, int] | None = None) -> None:
    """A ramp to 262,144 keys. kept: chunk -> bytes of a tensor that stays for good from then on."""
    stay: list[Block] = []
    for number, (rows, keys) in enumerate(static_chunks(2048, 262_144)):
        prime.before(PREFILL)
        for size in tiles(rows, keys, LIMIT):
            device.allocate_and_free(size)
        if kept and number in kept:
            stay.append(device.allocator.allocate(kept[number]))


def test_the_reserve_is_the_limit() -> None:
    """One block, made once: what is reserved at the end of the ramp is what the score limit says."""
    device, prime = primed()
    run(device, prime)
    assert device.reserved_peak_bytes() == LIMIT
    assert (prime.calls, prime.blocks, prime.gave_up) == (1, 1, "")


def test_launches_that_change_nothing_cost_nothing() -> None:
    """A thousand launches on a reserve that has not grown: no allocation of ours."""
    device, prime = primed()
    for _ in range(1000):
        prime.before(PREFILL)
    assert (prime.calls, device.allocator.segments_made) == (1, 1)


def test_decodes_do_not_prime() -> None:
    """Only a prefill's launch is on the stream, and of the kind, that the block is for."""
    device, prime = primed()
    prime.before(None)
    assert (prime.calls, device.allocator.segments_made) == (0, 0)


def test_primed_again_when_a_tensor_has_taken_a_piece() -> None:
    """A tensor that stays splits the block; one whole block later the reserve is flat again."""
    device, prime = primed()
    run(device, prime, kept={5: 4 * MIB})
    assert prime.calls == 2
    assert device.reserved_peak_bytes() == 2 * LIMIT
    before = device.reserved_peak_bytes()
    run(device, prime)
    assert device.reserved_peak_bytes() == before


def test_growth_elsewhere_finds_the_block_in_its_place() -> None:
    """Other buffers grow too; priming again then costs a look into the cache and takes nothing."""
    device, prime = primed()
    prime.before(PREFILL)
    stay = []
    for number in range(50):
        stay.append(device.allocator.allocate(LIMIT + (number + 1) * 2 * MIB))
        prime.before(PREFILL)
    assert (prime.calls, prime.blocks, prime.gave_up) == (51, 1, "")


def test_it_gives_up_rather_than_grow_for_ever() -> None:
    """Where every block is taken apart, the remedy would be the disease; it ends and says why."""
    device, prime = primed()
    stay = []
    for _ in range(20):
        prime.before(PREFILL)
        stay.append(device.allocator.allocate(LIMIT // 2))
        stay.append(device.allocator.allocate(LIMIT))
    assert prime.blocks == MOST_BLOCKS
    assert "taken apart" in prime.gave_up


def test_no_memory_for_the_block() -> None:
    """The engine may still find room for smaller ones, so a refusal is noted and goes no further."""
    _, prime = primed(limit_bytes=LIMIT // 2)
    prime.before(PREFILL)
    prime.before(PREFILL)
    assert prime.calls == 0
    assert "no block of 256 MiB" in prime.gave_up
    assert DeviceFullError.__name__ in prime.state()["gave_up"]


def test_capture_and_pause_put_it_off() -> None:
    """Memory taken during graph capture would belong to the graph's pool."""
    device, prime = primed()
    device.blocked = True
    prime.before(PREFILL)
    assert prime.calls == 0
    device.blocked = False
    prime.before(PREFILL)
    assert prime.calls == 1


def knobs(**environ: str) -> Settings:
    return from_env({f"DYNCHUNK_{name}": value for name, value in environ.items()})


@pytest.mark.parametrize(
    ("prime", "release", "is_integrated", "limit_mib", "expected"),
    [
        ("auto", "auto", False, 256, (256, "low")),
        ("auto", "auto", True, 256, (0, "always")),
        ("auto", "low", True, 256, (256, "low")),
        ("auto", "off", True, 256, (256, "off")),
        ("auto", "always", False, 256, (0, "always")),
        ("auto", "auto", False, 0, (0, "low")),
        ("512", "auto", True, 256, (512, "low")),
        ("512", "low", False, 0, (512, "low")),
        ("off", "auto", True, 256, (0, "always")),
        ("off", "auto", False, 256, (0, "low")),
    ],
)
def test_priming_and_releasing_exclude_each_other(
    prime: str, release: str, is_integrated: bool, limit_mib: int, expected: tuple[int, str]
) -> None:
    """Whatever the two settings and the device: never both, and the reason is a sentence."""
    settings = knobs(PRIME_CACHE=prime, EMPTY_CACHE=release)
    found = resolve(settings, score_limit_bytes=limit_mib * MIB, is_integrated=is_integrated)
    assert found == Remedy(expected[0] * MIB, expected[1], found.reason)
    assert found.reason
    assert not (found.prime_bytes and found.empty_cache == "always")


def test_both_by_name_are_refused() -> None:
    """A size and a release after every chunk contradict each other; the message has both and the cure."""
    with pytest.raises(SettingsError, match=r"DYNCHUNK_PRIME_CACHE=256 and DYNCHUNK_EMPTY_CACHE=always.*low"):
        knobs(PRIME_CACHE="256", EMPTY_CACHE="always")


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "yes", "nan"])
def test_what_is_no_size_is_refused(text: str) -> None:
    """The words, or a whole number of MiB."""
    with pytest.raises(SettingsError, match=r"accepted: off \| auto \| MiB"):
        knobs(PRIME_CACHE=text)


def test_the_words_in_any_case() -> None:
    """As with every choice."""
    assert knobs(PRIME_CACHE="OFF").prime_cache == "off"
    assert knobs(PRIME_CACHE="512").prime_cache == 512
