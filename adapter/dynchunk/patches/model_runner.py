"""sglang.srt.model_executor.model_runner: see every prefill forward of the target model.

The hook sits on the instance, not on the class: it is put there when weights, autotuning and graph capture are done,
and draft models run through objects of their own.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from dynchunk import in_force, journal, settings
from dynchunk.cache_release import GIB, CacheRelease
from dynchunk.contract import Patch, apply_all
from dynchunk.patches import contracts, facts
from dynchunk.trace import Trace


def apply(module: ModuleType) -> None:
    """Only the check: `install` puts the hook on the instance that serves."""
    mode = settings.current().mode
    apply_all(module, [Patch(contracts.FORWARD)], change=mode == "on", hint=contracts.HINT)


def install(scheduler: Any) -> CacheRelease | None:
    """Hook this scheduler's target model. Returns the release policy where there is a CUDA device for it.

    What happens here decides nothing, so a fault of it must neither end a forward nor make this rank another one than
    the others: the hook takes itself out and says so.
    """
    runner = scheduler.tp_worker.model_runner
    release = _release_policy(scheduler)
    trace = _trace(scheduler)
    forward = runner.forward
    synchronous = runner.device == "cpu"

    def before(forward_batch: Any) -> Seen | None:
        # Read before the call: data-parallel padding rewrites the mode and appends dummy rows during it.
        mode = forward_batch.forward_mode
        reqs = _prefill_rows(forward_batch) if mode.is_context_parallel_extend() else None
        if release is not None:
            release.before_launch()
        return Seen(mode.name.lower(), reqs, time.time(), time.perf_counter()) if reqs else None

    def after(seen: Seen) -> None:
        took_ms = (time.perf_counter() - seen.start_s) * 1000 if synchronous else None
        if release is not None:
            release.after_forward(max(prefix + new for _, prefix, new in seen.reqs))
        if trace is not None:
            trace.write(seen.launched_s, took_ms, seen.mode, seen.reqs)

    def guarded(step: Callable[[Any], Any], argument: Any) -> Any:
        try:
            return step(argument)
        except Exception as error:
            runner.forward = forward
            in_force.release = None
            journal.record("forward", journal.REFUSED, f"no cache release and no trace from now on: {error!r}")

    @functools.wraps(forward)
    def hooked(forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        seen = guarded(before, forward_batch)
        output = forward(forward_batch, *args, **kwargs)
        if seen is not None:
            guarded(after, seen)
        return output

    runner.forward = hooked
    return release


@dataclass(slots=True)
class Seen:
    """A prefill on its way. reqs: (request id, prefix, new tokens). launched_s: unix time; start_s: perf_counter."""

    mode: str
    reqs: list[tuple[str, int, int]]
    launched_s: float
    start_s: float


def _prefill_rows(forward_batch: Any) -> list[tuple[str, int, int]] | None:
    """(request id, prefix, new tokens) of each row; None where this is not a prefill of requests.

    Left out: replays of a sliding window (they repeat rows of the forward before), and decodes that data-parallel
    attention has turned into extends of one token each (there a prompt's last single token is taken for one of them).
    """
    new_tokens = forward_batch.extend_seq_lens_cpu
    prefixes = forward_batch.extend_prefix_lens_cpu
    if not new_tokens or prefixes is None or getattr(forward_batch, "encoder_swa_replay", False):
        return None
    if max(new_tokens) <= 1 and getattr(forward_batch, "global_num_tokens_cpu", None) is not None:
        return None
    rids = forward_batch.rids or [""] * len(new_tokens)
    return [(r, int(p), int(n)) for r, p, n in zip(rids, prefixes, new_tokens, strict=True)]


def _trace(scheduler: Any) -> Trace | None:
    path = settings.current().trace
    if path is None:
        return None
    return Trace(path if facts.is_entry_rank(scheduler) else f"{path}.{facts.rank_name(scheduler)}")


def _release_policy(scheduler: Any) -> CacheRelease | None:
    configured = settings.current()
    mode = configured.empty_cache
    if mode == "off":
        journal.record("cache_release", journal.NOT_IN_USE, "DYNCHUNK_EMPTY_CACHE=off")
        return None
    if scheduler.tp_worker.model_runner.device != "cuda" or not torch.cuda.is_available():
        journal.record("cache_release", journal.NO_DEVICE, "no CUDA device")
        return None
    device = CudaDevice(torch.cuda.current_device(), scheduler)
    if mode == "auto":
        mode = "always" if device.is_integrated else "low"
    journal.record("cache_release", journal.APPLIED, mode)
    return CacheRelease(
        device,
        mode,
        configured.empty_cache_min_tokens,
        int(configured.empty_cache_below_gib * GIB),
    )


class CudaDevice:
    """The CUDA calls behind cache_release.Device."""

    def __init__(self, index: int, scheduler: Any) -> None:
        self.index = index
        self.scheduler = scheduler
        # GPU memory is host memory there; CUDA's own "free" would count the page cache as taken.
        self.is_integrated = bool(torch.cuda.get_device_properties(index).is_integrated)

    def available_bytes(self) -> int:
        """MemAvailable on an integrated device, the driver's free memory on a discrete one."""
        if self.is_integrated:
            return _mem_available_bytes()
        free_bytes, _ = torch.cuda.mem_get_info(self.index)
        return int(free_bytes)

    def unused_reserved_bytes(self) -> int:
        """Reserved less allocated, from the allocator's own counters."""
        return int(torch.cuda.memory_reserved(self.index) - torch.cuda.memory_allocated(self.index))

    def must_not_release(self) -> bool:
        """While a graph is captured, and while generation is paused (the engine guards its own releases so)."""
        return bool(self.scheduler._engine_paused) or torch.cuda.is_current_stream_capturing()

    def empty_cache(self) -> None:
        """Torch's own call. Not the platform's: on a CPU that is a full garbage collection."""
        torch.cuda.empty_cache()


def _mem_available_bytes() -> int:
    with Path("/proc/meminfo").open(encoding="ascii") as meminfo:
        for line in meminfo:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    raise OSError("/proc/meminfo has no MemAvailable")
