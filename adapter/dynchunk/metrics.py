"""What DynChunk adds to the server's own /metrics, where the engine runs with --enable-metrics.

SGLang collects the metrics of all its processes through prometheus_client's multiprocess mode: whatever a scheduler
registers in the library's default registry appears at /metrics. Each series carries the labels that SGLang gives this
scheduler's own, so that the two can be joined, and the number of series is bounded: no label comes from a request.

    metrics = Metrics(labels, rank, log=in_force.prefills)    # scheduler.metrics_collector.labels; facts.rank_name
    observers.append(metrics)                  # patches/model_runner: after(prefill) at each prefill's launch
    in_force.listeners.append(metrics.timed)   # timed(prefill, ms) when one has run
    in_force.when_idle.append(metrics.when_idle)

On ranks whose metrics SGLang does not export (all but the first of a tensor-parallel group), `reports=False`: only the
hooks' state is shown then. prometheus_client is imported here and nowhere else, when a Metrics is made.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from dynchunk import in_force, journal
from dynchunk.policy import latency
from dynchunk.policy.budget import SEQUENCE
from dynchunk.prefill_log import PrefillLog

GAUGE, COUNTER = "gauge", "counter"
STATES = ("off", "calibrating", "model", "fixed")
MOST_CAUSES = 16
PUBLISH_EVERY_S = 1.0
MEMINFO = Path("/proc/meminfo")


@dataclass(frozen=True)
class Metric:
    """One metric. labels: beside the engine's, or alone where a rank is among them."""

    name: str
    kind: str
    meaning: str
    labels: tuple[str, ...] = ()


DECLARED = (
    Metric("dynchunk_chunk_tokens", GAUGE, "New tokens of the longest request in the newest prefill batch."),
    Metric("dynchunk_batch_rows", GAUGE, "New tokens in the newest prefill batch."),
    Metric("dynchunk_batch_longest_tokens", GAUGE, "Longest prefix in the newest prefill batch."),
    Metric("dynchunk_budget_tokens_squared", GAUGE, "The budget in force."),
    Metric("dynchunk_budget_utilisation", GAUGE, "Rows x longest prefix of the newest prefill batch / the budget."),
    Metric("dynchunk_pair_bytes", GAUGE, "What a row and key costs, as measured; 0 while no line fits."),
    Metric("dynchunk_floor_chunks_total", COUNTER, "Chunks at a floor that exceeds the budget.", ("cause",)),
    Metric("dynchunk_first_chunk_clamped_total", COUNTER, "First chunks that were made smaller."),
    Metric("dynchunk_deferred_requests_total", COUNTER, "Times a waiting request was left for a later batch."),
    Metric("dynchunk_empty_cache_total", COUNTER, "Releases of the allocator's unused memory."),
    Metric("dynchunk_empty_cache_seconds_total", COUNTER, "What these releases have cost."),
    Metric("dynchunk_latency_predicted_ms", GAUGE, "What the model says of the newest timed prefill."),
    Metric("dynchunk_latency_measured_ms", GAUGE, "What the newest timed prefill took."),
    Metric("dynchunk_model_state", GAUGE, "1 for the latency model's state, 0 for the others.", ("state",)),
    Metric("dynchunk_hook_applied", GAUGE, "1: a hook is in place; 0: it was refused or broke.", ("hook", "rank")),
    Metric("dynchunk_prefill_done_tokens", GAUGE, "Of the long prefill in flight: tokens computed or cached."),
    Metric("dynchunk_prefill_total_tokens", GAUGE, "Of the long prefill in flight: all its tokens; 0 without one."),
    Metric("dynchunk_prefill_cached_tokens", GAUGE, "Of the long prefill in flight: tokens found in the cache."),
    Metric("dynchunk_prefill_elapsed_seconds", GAUGE, "Of the long prefill in flight: since its first chunk."),
    Metric("dynchunk_mem_available_bytes", GAUGE, "The host's MemAvailable, read once a second at the most."),
)


class Prefill(Protocol):
    """What is needed of a prefill. reqs: (request id, prefix, new tokens)."""

    @property
    def reqs(self) -> Sequence[tuple[str, int, int]]:
        """The rows of its batch."""


class Metrics:
    """This scheduler's part of /metrics. An observer of forwards and a listener to their times."""

    name = "metrics"

    def __init__(
        self,
        labels: Mapping[str, object],
        rank: str,
        *,
        log: PrefillLog | None = None,
        reports: bool = True,
        registry: Any = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """labels: the engine's for this scheduler. rank: its name. registry: the library's own where None."""
        # Some versions count by priority under a label that is empty otherwise; nothing of ours is by priority.
        self._labels = {name: str(value) for name, value in labels.items() if name != "priority"}
        self._rank = rank
        self._log = log
        self._reports = reports
        self._clock = clock
        self._published_s = -PUBLISH_EVERY_S
        self._counted: dict[tuple[str, str], float] = {}
        self._hooks: dict[str, bool] = {}
        self._state = ""
        self._measured = 0
        self._made = {metric.name: self._make(metric, registry) for metric in DECLARED}
        self._plain = {
            metric.name: self._made[metric.name].labels(**self._labels)
            for metric in DECLARED
            if reports and not metric.labels
        }
        self.publish()

    def before(self, prefill: Prefill | None) -> None:
        """Nothing before a launch."""

    def after(self, prefill: Prefill) -> None:
        """A prefill was launched."""
        if not self._reports:
            return self._publish_now_and_then()
        rows = sum(new for _, _, new in prefill.reqs)
        limits = in_force.limits
        own_rows = limits is not None and limits.rule == SEQUENCE
        longest = max(prefix + (new if own_rows else 0) for _, prefix, new in prefill.reqs)
        # Decoding requests that run along have one new token each.
        prefilling = [req for req in prefill.reqs if req[2] > 1] or prefill.reqs
        self._set("dynchunk_chunk_tokens", max(prefilling, key=lambda req: req[1] + req[2])[2])
        self._set("dynchunk_batch_rows", rows)
        self._set("dynchunk_batch_longest_tokens", longest)
        if limits is not None:
            self._set("dynchunk_budget_tokens_squared", limits.budget)
            self._set("dynchunk_budget_utilisation", rows * longest / limits.budget)
        self._show_progress()
        return self._publish_now_and_then()

    def timed(self, prefill: Prefill, ms: float) -> None:
        """A prefill took so long."""
        if not self._reports:
            return
        self._set("dynchunk_latency_measured_ms", ms)
        ticks = 0
        for _, prefix, new in prefill.reqs:
            ticks = in_force.latency.ticks(prefix, new, ticks)
        if ticks:
            self._set("dynchunk_latency_predicted_ms", latency.in_ms(ticks))

    def when_idle(self) -> None:
        """Called over and over while nothing runs."""
        self._publish_now_and_then()

    def publish(self) -> None:
        """Bring everything that is counted elsewhere up to date."""
        self._published_s = self._clock()
        for hook, entry in journal.snapshot()["hooks"].items():
            if entry["outcome"] in (journal.APPLIED, journal.REFUSED):
                self._show_hook(hook, applied=entry["outcome"] == journal.APPLIED)
        if not self._reports:
            return
        for name, total in list(in_force.counts.items()):
            self._show_count(name, total)
        release = in_force.release
        if release is not None:
            self._raise_to("dynchunk_empty_cache_total", release.calls)
            self._raise_to("dynchunk_empty_cache_seconds_total", release.ms / 1000)
        meter = in_force.meter
        if meter is not None and meter.measured != self._measured:
            self._measured = meter.measured
            self._set("dynchunk_pair_bytes", meter.fit().bytes_per_pair)
        self._show_state(in_force.latency.state()["state"])
        self._show_progress()
        available = mem_available_bytes()
        if available is not None:
            self._set("dynchunk_mem_available_bytes", available)

    def _publish_now_and_then(self) -> None:
        if self._clock() - self._published_s >= PUBLISH_EVERY_S:
            self.publish()

    def _make(self, metric: Metric, registry: Any) -> Any:
        from prometheus_client import REGISTRY, Counter, Gauge

        own = metric.labels if "rank" in metric.labels else (*self._labels, *metric.labels)
        registry = REGISTRY if registry is None else registry
        if metric.kind == COUNTER:
            return Counter(metric.name, metric.meaning, own, registry=registry)
        # As the engine's own: a series is one scheduler's, so its newest value is the value.
        return Gauge(metric.name, metric.meaning, own, registry=registry, multiprocess_mode="mostrecent")

    def _set(self, name: str, value: float) -> None:
        self._plain[name].set(value)

    def _raise_to(self, name: str, total: float, **more: str) -> None:
        """Bring a counter to what was counted elsewhere."""
        key = (name, "".join(more.values()))
        increase = total - self._counted.get(key, 0)
        if increase > 0:
            child = self._made[name].labels(**self._labels, **more) if more else self._plain[name]
            child.inc(increase)
            self._counted[key] = total

    def _show_count(self, name: str, total: int) -> None:
        floor, colon, cause = name.partition(": ")
        if colon and floor in ("floor", "floor_over_budget"):
            known = [key for key in self._counted if key[0] == "dynchunk_floor_chunks_total"]
            # A cause is a word of ours; should that ever change, the series stay few all the same.
            if ("dynchunk_floor_chunks_total", cause) in known or len(known) < MOST_CAUSES:
                self._raise_to("dynchunk_floor_chunks_total", total, cause=cause)
        elif name == "first_chunks_lowered":
            self._raise_to("dynchunk_first_chunk_clamped_total", total)
        elif name == "deferred":
            self._raise_to("dynchunk_deferred_requests_total", total)

    def _show_hook(self, hook: str, *, applied: bool) -> None:
        if self._hooks.get(hook) is not applied:
            self._hooks[hook] = applied
            self._made["dynchunk_hook_applied"].labels(hook=hook, rank=self._rank).set(int(applied))

    def _show_state(self, state: str) -> None:
        if state != self._state:
            self._state = state
            for each in STATES:
                self._made["dynchunk_model_state"].labels(**self._labels, state=each).set(int(each == state))

    def _show_progress(self) -> None:
        running = None if self._log is None else self._log.running
        self._set("dynchunk_prefill_done_tokens", running.done if running else 0)
        self._set("dynchunk_prefill_total_tokens", running.total if running else 0)
        self._set("dynchunk_prefill_cached_tokens", running.cached if running else 0)
        self._set("dynchunk_prefill_elapsed_seconds", self._log.elapsed_s() if self._log and running else 0)


def mem_available_bytes() -> int | None:
    """The host's MemAvailable; None where there is none to read."""
    try:
        with MEMINFO.open(encoding="ascii") as meminfo:
            for line in meminfo:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        return None
    return None
