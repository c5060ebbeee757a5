"""The parts of gpu_check, each run in a process of its own. Torch and DynChunk's own parts, no engine.

Every part returns rows for one table; what a row does not measure is None. `ok` is None where a row is there to compare
with. Without a GPU (`--cpu-self-test`) the reserve is the allocator model's and the rest runs on the CPU.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from types import SimpleNamespace
from typing import Any

from dynchunk.cache_release import GIB, CacheRelease
from dynchunk.peak import Memory, ProcessMemory
from dynchunk.policy import allocator, score_budget
from dynchunk.prime_cache import PrimeCache

MIB = 1 << 20
HEADS = 32
LAYERS = 2  # the second layer of a chunk finds the blocks of the first
# For the remedies that act when memory is short: it is short beyond so many limits.
SHORT_AT_LIMITS = 8
RELEASE_FROM_TOKENS = 8192
NONE, ALWAYS, LOW, PRIMED, FRACTION = "none", "empty_cache always", "empty_cache low", "primed", "fraction + gc"
REMEDIES = (NONE, ALWAYS, LOW, PRIMED, FRACTION)
GC_THRESHOLD = 0.5
KEPT_FLAT = 1.25  # a reserve that does not grow is at most so many times the limit


@dataclass(frozen=True)
class Size:
    """How large the checks are: rows of a chunk, keys of the longest prompt, how often a timed step is repeated."""

    rows: int
    keys: int
    repeats: int


@dataclass
class Row:
    """One row of the table. Memory in MiB."""

    check: str
    variant: str
    reserved_mib: float | None = None
    live_mib: float | None = None
    device_calls: int | None = None
    flushes: int | None = None
    ms: float | None = None
    ok: bool | None = None
    note: str = ""


class CudaDevice:
    """The GPU, through the calls that serve DynChunk in an engine. cap_bytes: the most the allocator may hold."""

    def __init__(self, cap_bytes: int) -> None:
        import torch

        from dynchunk.patches.cuda_memory import CudaMemory

        self.torch, self.cap_bytes = torch, cap_bytes
        self.memory = CudaMemory(torch.cuda.current_device(), SimpleNamespace(_engine_paused=False))

    def __getattr__(self, name: str) -> Any:
        """Everything else is DynChunk's own."""
        return getattr(self.memory, name)

    def available_bytes(self) -> int:
        """What the cap leaves, so that memory gets short on a large GPU as well."""
        return self.cap_bytes - int(self.torch.cuda.memory_reserved())

    def use(self, size_bytes: int) -> None:
        """A buffer that is written, as scores are."""
        self.torch.empty(size_bytes // 4, dtype=self.torch.float32, device="cuda").fill_(1.0)

    def finish(self) -> None:
        """Wait for all of it."""
        self.torch.cuda.synchronize()

    def counters(self) -> tuple[int, int, int]:
        """(reserved at the peak, segments asked of the device, flushes)."""
        stats = self.torch.cuda.memory_stats()
        return stats["reserved_bytes.all.peak"], stats["segment.all.allocated"], stats["num_alloc_retries"]


def cap_allocator(cap_bytes: int) -> None:
    """The most that torch may hold on the GPU in this process."""
    import torch

    torch.cuda.set_per_process_memory_fraction(cap_bytes / torch.cuda.mem_get_info()[1])


class ModelledDevice:
    """Stands for a GPU in the self-test: the allocator is the model, nothing is written."""

    def __init__(self, cap_bytes: int, gc_threshold: float) -> None:
        self.model = allocator.Allocator(cap_bytes, gc_threshold)
        self.cap_bytes = cap_bytes
        self.empty_cache = self.model.empty_cache

    def available_bytes(self) -> int:
        """What the cap leaves."""
        return self.cap_bytes - self.model.reserved_bytes

    def unused_reserved_bytes(self) -> int:
        """Reserved less allocated."""
        return self.model.reserved_bytes - self.model.allocated_bytes

    def reserved_peak_bytes(self) -> int:
        """The most it has held."""
        return self.model.reserved_peak_bytes

    def must_not_release(self) -> bool:
        """Never."""
        return False

    def allocate_and_free(self, size_bytes: int) -> None:
        """One block, taken and given back."""
        self.model.free(self.model.allocate(size_bytes))

    use = allocate_and_free

    def finish(self) -> None:
        """Nothing is under way."""

    def counters(self) -> tuple[int, int, int]:
        """(reserved at the peak, segments, flushes)."""
        return self.model.reserved_peak_bytes, self.model.segments_made, self.model.flushes


def reserve(remedy: str, limit_mib: int, size: Size, cap_bytes: int, *, on_cpu: bool) -> list[Row]:
    """A ramp to size.keys with the engine's tiles under one limit and one remedy."""
    limit_bytes = limit_mib * MIB
    if remedy in (LOW, FRACTION):
        cap_bytes = min(cap_bytes, SHORT_AT_LIMITS * limit_bytes)
    device: Any
    if on_cpu:
        device = ModelledDevice(cap_bytes, GC_THRESHOLD if remedy == FRACTION else 0.0)
    else:
        if remedy != FRACTION:  # there, the cap is PYTORCH_ALLOC_CONF's, and that it holds is what is checked
            cap_allocator(cap_bytes)
        device = CudaDevice(cap_bytes)
    modes = {ALWAYS: "always", LOW: "low"}
    release = CacheRelease(device, modes[remedy], RELEASE_FROM_TOKENS, cap_bytes // 4) if remedy in modes else None
    prime = PrimeCache(device, limit_bytes) if remedy == PRIMED else None
    started = time.perf_counter()
    for rows, keys in allocator.static_chunks(size.rows, size.keys):
        if release is not None:
            release.before_launch()
        if prime is not None:
            prime.before(rows)
        for tile_bytes in allocator.tiles(rows, keys, limit_bytes, heads=HEADS) * LAYERS:
            device.use(tile_bytes)
        if release is not None:
            release.after_forward(keys)
    device.finish()
    ms = None if on_cpu else (time.perf_counter() - started) * 1000
    reserved, calls, flushes = device.counters()
    fits = reserved <= cap_bytes
    flat = limit_bytes * KEPT_FLAT + 64 * MIB
    # Without a remedy there is nothing to expect; `low` is to release before the device has to refuse.
    ok = {NONE: None, LOW: fits and not flushes, FRACTION: fits}.get(remedy, reserved <= flat)
    note = f"primings: {prime.calls}, new blocks: {prime.blocks} {prime.gave_up}".strip() if prime else ""
    return [Row("reserve", f"{remedy}, limit {limit_mib:,} MiB", reserved / MIB, None, calls, flushes, ms, ok, note)]


def timing(size: Size, *, on_cpu: bool) -> list[Row]:
    """Forwards timed by events that nobody waits for, with their peaks read; a wait inside is an error."""
    import torch

    from dynchunk.patches import forward_time

    device = "cpu" if on_cpu else "cuda"
    width = 512 if on_cpu else 8192
    factor = torch.ones(width, width, device=device) / width
    timer, memory = forward_time.for_device(device), _memory(on_cpu=on_cpu)
    torch.mm(factor, factor)
    _wait(on_cpu=on_cpu)
    found: list[tuple[int, float]] = []
    if not on_cpu:
        torch.cuda.set_sync_debug_mode("error")
    started = time.perf_counter()
    for number in range(size.repeats * 4):
        memory.mark()
        timer.start()
        torch.mm(factor, factor)
        timer.stop(number)
        memory.transient_bytes()
        found += timer.finished()
    launched_ms = (time.perf_counter() - started) * 1000
    early = len(found)
    if not on_cpu:
        torch.cuda.set_sync_debug_mode("default")
    _wait(on_cpu=on_cpu)
    wall_ms = (time.perf_counter() - started) * 1000
    found += timer.finished()
    timed_ms = sum(ms for _, ms in found)
    # On a GPU launching must be over long before the work is; on the CPU the two are one.
    ok = len(found) == size.repeats * 4 and 0.5 < timed_ms / wall_ms < 1.2 and (on_cpu or launched_ms < wall_ms / 2)
    note = f"launched in {launched_ms:.1f} ms, {early} of {len(found)} known by then, wall clock {wall_ms:.1f} ms"
    return [Row("event timing", f"{len(found)} forwards", ms=timed_ms, ok=ok, note=note)]


def empty_cache(size: Size) -> list[Row]:
    """What a release costs while the GPU is idle and while it works, and what the next buffer then costs. GPU only."""
    import torch

    factor = torch.ones(8192, 8192, device="cuda") / 8192
    cached_bytes = min(2 * GIB, int(torch.cuda.mem_get_info()[0]) // 4)

    def cost(busy: int, step: Callable[[], Any]) -> float:
        taken = []
        for _ in range(size.repeats):
            torch.empty(cached_bytes, dtype=torch.uint8, device="cuda")
            torch.cuda.synchronize()
            for _ in range(busy):
                torch.mm(factor, factor)
            started = time.perf_counter()
            step()
            taken.append((time.perf_counter() - started) * 1000)
        return median(taken)

    def anew() -> None:
        torch.cuda.empty_cache()
        torch.empty(cached_bytes, dtype=torch.uint8, device="cuda").fill_(1)
        torch.cuda.synchronize()

    def again() -> None:
        torch.empty(cached_bytes, dtype=torch.uint8, device="cuda").fill_(1)
        torch.cuda.synchronize()

    idle, working = cost(0, torch.cuda.empty_cache), cost(20, torch.cuda.empty_cache)
    what = f"{cached_bytes // MIB:,} MiB cached"
    return [
        Row("empty_cache", f"before a launch, GPU idle, {what}", ms=idle),
        Row("empty_cache", f"after a launch, GPU at work, {what}", ms=working, note="waits for the work"),
        Row("empty_cache", "released, then a buffer written anew", ms=cost(0, anew)),
        Row("empty_cache", "the same buffer from the cache", ms=cost(0, again)),
    ]


def selection(size: Size, *, on_cpu: bool) -> list[Row]:
    """The best 512 keys of each row: all scores at once, in row tiles, in key blocks. Values must be bit-equal.

    Scores are products of whole numbers small enough to be exact in fp32, whatever order a GPU adds them in, so that
    tiles of any shape score alike and a difference is one of the selection.
    """
    import torch

    torch.manual_seed(0)
    device, limit_bytes = ("cpu", 2 * MIB) if on_cpu else ("cuda", 256 * MIB)
    query = torch.randint(-512, 513, (size.rows, 64), device=device).float()
    key = torch.randint(-512, 513, (size.keys, 64), device=device).float()
    tile = score_budget.rows_per_tile(limit_bytes, size.keys, HEADS)
    blocks = (score_budget.SMALLEST_KEY_BLOCK,) if on_cpu else (8192, score_budget.KEY_BLOCK)
    found: list[Row] = []
    for name, rounded in (("fp32", False), ("bf16-rounded", True)):
        select = Selection(functools.partial(_scores, rounded=rounded), query, key)
        whole = _timed(select.at_once, size.repeats, on_cpu=on_cpu)
        untied = select.untied(whole.result[0], tile)
        found.append(Row("selection", f"{name}, all at once", live_mib=whole.peak_mib, ms=whole.ms))
        variants = [(f"rows, {tile:,} at a time", functools.partial(select.in_rows, tile))]
        variants += [(f"keys, {block:,} at a time", functools.partial(select.in_keys, block)) for block in blocks]
        for variant, run in variants:
            cut = _timed(run, size.repeats, on_cpu=on_cpu)
            same_ids = (cut.result[1].sort(1).values == whole.result[1].sort(1).values).all(1)
            ok = torch.equal(cut.result[0], whole.result[0]) and bool(same_ids[untied].all())
            note = (
                f"{cut.ms / whole.ms:.2f} times all at once; {int((~untied).sum()):,} of {size.rows:,} rows tied, "
                f"ids equal in {int(same_ids.sum()):,}"
            )
            found.append(Row("selection", f"{name}, {variant}", live_mib=cut.peak_mib, ms=cut.ms, ok=ok, note=note))
    return found


def _scores(query: Any, key: Any, *, rounded: bool) -> Any:
    scores = query @ key.T
    return scores.bfloat16().float() if rounded else scores


@dataclass
class Selection:
    """(values, ids) of the best keys of each row of `query`, three ways. score: of some rows against some keys."""

    score: Callable[[Any, Any], Any]
    query: Any
    key: Any
    best: int = 512

    def at_once(self) -> tuple[Any, Any]:
        """All scores live at the same time."""
        values, ids = self.score(self.query, self.key).topk(self.best)
        return values, ids

    def in_rows(self, tile: int) -> tuple[Any, Any]:
        """So many rows at a time, all keys."""
        import torch

        parts = [self.score(rows, self.key).topk(self.best) for rows in self.query.split(tile)]
        return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])

    def in_keys(self, block: int) -> tuple[Any, Any]:
        """All rows, so many keys at a time; the best of each block join the best so far."""
        import torch

        values = ids = None
        for number, keys in enumerate(self.key.split(block)):
            more, at = self.score(self.query, keys).topk(min(self.best, len(keys)))
            at += number * block
            if values is not None:
                more, at = torch.cat([values, more], 1), torch.cat([ids, at], 1)
                more, place = more.topk(self.best)
                at = at.gather(1, place)
            values, ids = more, at
        return values, ids

    def untied(self, values: Any, tile: int) -> Any:
        """For each row whether its last selected value is no other key's too, so that the ids are determined."""
        import torch

        parts = []
        for rows, selected in zip(self.query.split(tile), values.split(tile), strict=True):
            everywhere = (self.score(rows, self.key) == selected[:, -1:]).sum(1)
            parts.append(everywhere == (selected == selected[:, -1:]).sum(1))
        return torch.cat(parts)


@dataclass
class Timed:
    """The result of the last run, the median time and the peak above what was live afterwards."""

    result: Any
    ms: float
    peak_mib: float


def _timed(run: Callable[[], Any], repeats: int, *, on_cpu: bool) -> Timed:
    memory, taken, result = _memory(on_cpu=on_cpu), [], None
    run()
    _wait(on_cpu=on_cpu)
    memory.mark()
    for _ in range(repeats):
        result = None
        started = time.perf_counter()
        result = run()
        _wait(on_cpu=on_cpu)
        taken.append((time.perf_counter() - started) * 1000)
    return Timed(result, median(taken), memory.transient_bytes() / MIB)


def _memory(*, on_cpu: bool) -> Memory:
    if on_cpu:
        return ProcessMemory()
    import torch

    from dynchunk.patches.cuda_memory import CudaMemory

    return CudaMemory(torch.cuda.current_device(), None)


def _wait(*, on_cpu: bool) -> None:
    if not on_cpu:
        import torch

        torch.cuda.synchronize()
