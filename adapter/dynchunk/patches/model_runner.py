"""sglang.srt.model_executor.model_runner: see every prefill forward of the target model.

The hook sits on the instance, not on the class: it is put there when weights, autotuning and graph capture are done,
and draft models run through objects of their own.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol

from dynchunk import in_force, journal, settings
from dynchunk.cache_release import CacheRelease
from dynchunk.contract import Patch, apply_all
from dynchunk.patches import contracts, cuda_device, facts, forward_time
from dynchunk.trace import Trace


def apply(module: ModuleType) -> None:
    """Only the check: `install` puts the hook on the instance that serves."""
    mode = settings.current().mode
    apply_all(module, [Patch(contracts.FORWARD)], change=mode == "on", hint=contracts.HINT)


@dataclass(slots=True)
class Prefill:
    """A prefill forward. mode: `extend` or `mixed`. reqs: (request id, prefix, new tokens). launched_s: unix time."""

    mode: str
    reqs: list[tuple[str, int, int]]
    launched_s: float


class Observer(Protocol):
    """Something that looks on at forwards. It decides nothing, so a fault of it changes nothing but itself."""

    name: str

    def before(self, prefill: Prefill | None) -> None:
        """Called before each launch; None where it is no prefill."""

    def after(self, prefill: Prefill) -> None:
        """Called after the launch of a prefill."""


def install(scheduler: Any) -> None:
    """Hook this scheduler's target model."""
    runner = scheduler.tp_worker.model_runner
    observers: list[Observer] = []
    release = in_force.release = cuda_device.release_policy(scheduler)
    if release is not None:
        observers.append(Releasing(release))
        in_force.when_idle.append(release.before_launch)
    if (path := settings.current().trace) is not None:
        trace = Trace(path if facts.is_entry_rank(scheduler) else f"{path}.{facts.rank_name(scheduler)}")
        observers.append(Tracing(trace, synchronous=runner.device == "cpu"))
    if in_force.listeners:
        # Last, so that what the others do is not timed.
        timing = Timing(forward_time.for_device(runner.device), in_force.listeners)
        observers.append(timing)
        in_force.when_idle.append(timing.tell)
    if observers:
        runner.forward = hook(runner.forward, observers)


def hook(forward: Callable[..., Any], observers: list[Observer]) -> Callable[..., Any]:
    """`forward`, with observers. One that raises is taken out, and the journal says so."""

    def each(step: str, prefill: Prefill | None) -> None:
        for observer in list(observers):
            try:
                getattr(observer, step)(prefill)
            except Exception as error:
                observers.remove(observer)
                journal.record(observer.name, journal.REFUSED, f"broken, and off from now on: {error!r}")

    @functools.wraps(forward)
    def hooked(forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        # Read before the call: data-parallel padding rewrites the mode and appends dummy rows during it.
        prefill = _prefill(forward_batch)
        each("before", prefill)
        output = forward(forward_batch, *args, **kwargs)
        if prefill is not None:
            each("after", prefill)
        return output

    return hooked


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

    name = "forward timing"

    def __init__(self, timer: forward_time.ForwardTimer, listeners: Sequence[Callable[[Prefill, float], None]]) -> None:
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
            for listen in self.listeners:
                listen(prefill, took_ms)


def _prefill(forward_batch: Any) -> Prefill | None:
    mode = forward_batch.forward_mode
    reqs = _prefill_rows(forward_batch) if mode.is_context_parallel_extend() else None
    return Prefill(mode.name.lower(), reqs, time.time()) if reqs else None


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
