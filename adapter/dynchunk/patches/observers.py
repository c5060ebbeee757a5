"""Who looks on at forwards: cache release, priming, the meter of peaks, the trace, metrics, timing."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from dynchunk import gpu_checked, in_force, journal, latency_learning, peak, prime_cache, settings
from dynchunk.cache_release import GIB, CacheRelease
from dynchunk.patches import cuda_memory, facts, forward_time, score_limits
from dynchunk.patches.model_runner import Observer, Prefill, hook
from dynchunk.prefill_log import PrefillLog
from dynchunk.trace import Trace


def install(scheduler: Any) -> None:
    """Hook this scheduler's target model. Called when weights, graphs and pools are there, and the limits settled."""
    runner = scheduler.tp_worker.model_runner
    observers: list[Observer] = [LimitsInForce(), *_for_memory(scheduler, runner.device)]
    if (path := settings.current().trace) is not None:
        trace = Trace(path if facts.is_entry_rank(scheduler) else f"{path}.{facts.rank_name(scheduler)}")
        observers.append(Tracing(trace, synchronous=runner.device == "cpu"))
    observers += _for_people(scheduler)
    if in_force.listeners:
        # Last, so that what the others do is not timed.
        timing = Timing(forward_time.for_device(runner.device), in_force.listeners)
        observers.append(timing)
        in_force.when_idle.insert(0, timing.tell)
    runner.forward = hook(runner.forward, observers)


def _for_memory(scheduler: Any, device: str) -> list[Observer]:
    """What keeps the reserve from growing, and the meter."""
    configured = settings.current()
    cuda = cuda_memory.CudaMemory.of(scheduler) if device == "cuda" else None
    meter = peak.PeakMeter(cuda or peak.ProcessMemory(), configured.empty_cache_min_tokens)
    in_force.meter, in_force.device = meter, cuda
    if cuda is None:
        for hook_name in ("cache_release", "prime_cache"):
            journal.record(hook_name, journal.NO_DEVICE, "no CUDA device")
        return [meter]
    cuda_memory.record_memory_fraction()
    gpu_checked.record(cuda.name)
    remedy = prime_cache.resolve(
        configured, score_limit_bytes=score_limits.in_force_bytes() or 0, is_integrated=cuda.is_integrated
    )
    observers: list[Observer] = []
    if remedy.empty_cache == "off":
        journal.record("cache_release", journal.NOT_IN_USE, "DYNCHUNK_EMPTY_CACHE=off")
    else:
        release = CacheRelease(
            cuda, remedy.empty_cache, configured.empty_cache_min_tokens, int(configured.empty_cache_below_gib * GIB)
        )
        in_force.release = release
        in_force.when_idle.append(release.before_launch)
        observers.append(Releasing(release))
        journal.record("cache_release", journal.APPLIED, remedy.empty_cache)
    if remedy.prime_bytes:
        in_force.primed = prime_cache.PrimeCache(cuda, remedy.prime_bytes)
        observers.append(in_force.primed)
    journal.record("prime_cache", journal.APPLIED if remedy.prime_bytes else journal.NOT_IN_USE, remedy.reason)
    return [*observers, meter]


def _for_people(scheduler: Any) -> list[Observer]:
    """The line for each long prefill, and the metrics."""
    context = scheduler.metrics_collector_context
    entry = facts.is_entry_rank(scheduler)
    if not entry and context.collector is None:
        return []
    prefills = in_force.prefills = PrefillLog(journal.say if entry else None)
    in_force.listeners.append(prefills.ran)
    in_force.when_idle.append(prefills.when_idle)
    if context.collector is None:
        return []
    from dynchunk.metrics import Metrics

    metrics = Metrics(
        context.collector.labels,
        facts.rank_name(scheduler),
        log=prefills,
        reports=context.current_scheduler_metrics_enabled,
    )
    in_force.listeners.append(metrics.timed)
    in_force.when_idle.append(metrics.when_idle)
    journal.record("metrics", journal.APPLIED)
    return [metrics]


class LimitsInForce:
    """Reads the score limits again at the first prefill: some are bound for good when they are first used."""

    name = "score limits in force"

    def __init__(self) -> None:
        self._read = False

    def before(self, prefill: Prefill | None) -> None:
        """Nothing before a launch."""

    def after(self, prefill: Prefill) -> None:
        """Once."""
        if not self._read:
            self._read = True
            for problem in score_limits.verify():
                journal.record(f"{self.name}: {problem.partition(':')[0]}", journal.REFUSED, problem)


class Releasing:
    """Gives cached memory back before the launch that follows a long prefill."""

    name = "cache_release"

    def __init__(self, release: CacheRelease) -> None:
        self.release = release

    def before(self, prefill: Prefill | None) -> None:
        """A release may be due."""
        self.release.before_launch()

    def after(self, prefill: Prefill) -> None:
        """A long prefill makes one due."""
        self.release.after_forward(max(prefix + new for _, prefix, new in prefill.reqs))


class Tracing:
    """Writes the trace at launch, so that the chunk that ends a host is in it."""

    name = "trace"

    def __init__(self, trace: Trace, *, synchronous: bool) -> None:
        """synchronous: a forward is over when it returns, so that its time can be given."""
        self.trace = trace
        self.synchronous = synchronous
        self._start_s = 0.0

    def before(self, prefill: Prefill | None) -> None:
        """Note the time."""
        self._start_s = time.perf_counter()

    def after(self, prefill: Prefill) -> None:
        """Write the line."""
        took_ms = (time.perf_counter() - self._start_s) * 1000 if self.synchronous else None
        self.trace.write(prefill.launched_s, took_ms, prefill.mode, prefill.reqs)


class Timing:
    """Times prefills and tells listeners, when they are through: at once on the CPU, some launches later elsewhere."""

    name = latency_learning.TIMING

    def __init__(self, timer: forward_time.ForwardTimer, listeners: list[Callable[[Prefill, float], None]]) -> None:
        self.timer = timer
        self.listeners = listeners

    def before(self, prefill: Prefill | None) -> None:
        """Hand on what has finished, then start the clock."""
        self.tell()
        if prefill is not None:
            self.timer.start()

    def after(self, prefill: Prefill) -> None:
        """Stop it."""
        self.timer.stop(prefill)
        self.tell()

    def tell(self) -> None:
        """Hand on what has finished."""
        for prefill, took_ms in self.timer.finished():
            for listen in list(self.listeners):
                try:
                    listen(prefill, took_ms)
                except Exception as error:
                    self.listeners.remove(listen)
                    in_force.broke(listen.__qualname__, error)
