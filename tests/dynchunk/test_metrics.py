"""DynChunk's part of /metrics, through prometheus_client as SGLang uses it."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import prometheus_client
import pytest

from dynchunk import in_force, journal, metrics
from dynchunk.latency_sizing import LatencySizing
from dynchunk.metrics import DECLARED, Metrics
from dynchunk.policy.budget import Budget
from dynchunk.policy.calibration import Update
from dynchunk.policy.latency import from_ms, parse_mode
from dynchunk.prefill_log import LARGEST, PrefillLog
from tests.conftest import ROOT, clean_environ, run_python

LABELS = {"model_name": "m", "engine_type": "unified", "tp_rank": 0, "pp_rank": 0, "moe_ep_rank": 0, "priority": ""}
OURS = {"model_name": "m", "engine_type": "unified", "tp_rank": "0", "pp_rank": "0", "moe_ep_rank": "0"}


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """State of this module's own."""
    monkeypatch.setattr(in_force, "counts", Counter())
    monkeypatch.setattr(in_force, "limits", Budget(200_000_000, "prefix", 64, 256, 2048))
    monkeypatch.setattr(in_force, "release", None)
    monkeypatch.setattr(in_force, "latency", LatencySizing())
    monkeypatch.setattr(journal, "_hooks", {})
    yield


class Seen:
    """Metrics in a registry of their own, and what a scrape of it finds."""

    def __init__(self, **how: Any) -> None:
        self.now_s = 0.0
        self.registry = prometheus_client.CollectorRegistry()
        self.metrics = Metrics(LABELS, "pp0tp0", registry=self.registry, clock=lambda: self.now_s, **how)

    def value(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(name, (OURS | labels) if "rank" not in labels else labels)

    def later(self) -> None:
        self.now_s += 1
        self.metrics.when_idle()


def prefill(*reqs: tuple[str, int, int]) -> SimpleNamespace:
    return SimpleNamespace(mode="extend", reqs=list(reqs), launched_s=0.0)


def test_a_batch() -> None:
    """Rows, longest prefix, the long request's chunk, the share of the budget; decodes that run along are no chunk."""
    seen = Seen()
    seen.metrics.after(prefill(("long", 100_000, 1_024), ("new", 0, 500), ("decode", 150_000, 1)))
    assert seen.value("dynchunk_chunk_tokens") == 1_024
    assert seen.value("dynchunk_batch_rows") == 1_525
    assert seen.value("dynchunk_batch_longest_tokens") == 150_000
    assert seen.value("dynchunk_budget_utilisation") == pytest.approx(1_525 * 150_000 / 2e8)
    assert seen.value("dynchunk_budget_tokens_squared") == 200_000_000


def test_the_sequence_rule_counts_own_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Utilisation is by the rule in force."""
    monkeypatch.setattr(in_force, "limits", Budget(1_000_000, "sequence", 64, 256, 2048))
    seen = Seen()
    seen.metrics.after(prefill(("r", 1_000, 500)))
    assert seen.value("dynchunk_budget_utilisation") == pytest.approx(500 * 1_500 / 1_000_000)


def test_counts_reach_the_counters() -> None:
    """What is counted elsewhere is taken over once a second, and never twice."""
    seen = Seen()
    in_force.counts.update({"floor_over_budget: page": 2, "floor: mixed chunk": 1, "first_chunks_lowered": 3})
    in_force.counts.update({"deferred": 4, "chunks_lowered": 5})
    in_force.release = SimpleNamespace(calls=7, ms=1_500.0)
    seen.metrics.when_idle()
    assert seen.value("dynchunk_deferred_requests_total") == 0
    seen.later()
    seen.later()
    assert seen.value("dynchunk_floor_chunks_total", cause="page") == 2
    assert seen.value("dynchunk_floor_chunks_total", cause="mixed chunk") == 1
    assert seen.value("dynchunk_first_chunk_clamped_total") == 3
    assert seen.value("dynchunk_deferred_requests_total") == 4
    assert seen.value("dynchunk_empty_cache_total") == 7
    assert seen.value("dynchunk_empty_cache_seconds_total") == 1.5
    in_force.counts["deferred"] += 1
    seen.later()
    assert seen.value("dynchunk_deferred_requests_total") == 5


def test_series_stay_few() -> None:
    """Whatever causes there are, the number of series is bounded."""
    seen = Seen()
    in_force.counts.update({f"floor_over_budget: cause {number}": 1 for number in range(100)})
    seen.later()
    samples = [s for family in seen.registry.collect() for s in family.samples if s.name.startswith("dynchunk_floor")]
    assert len([s for s in samples if s.name.endswith("_total")]) == metrics.MOST_CAUSES


def test_progress_of_the_long_prefill() -> None:
    """Tokens done, total, cached and the time while it runs; zeros when there is none."""
    clock = [10.0]
    log = PrefillLog(None, lambda: clock[0])
    seen = Seen(log=log)
    log.chunk("r", 500, 2_048, 50_000, LARGEST)
    clock[0] += 3
    seen.metrics.after(prefill(("r", 500, 2_048)))
    names = ("done_tokens", "total_tokens", "cached_tokens", "elapsed_seconds")
    assert [seen.value(f"dynchunk_prefill_{name}") for name in names] == [2_548, 50_000, 500, 3]
    log.when_idle()
    seen.later()
    assert [seen.value(f"dynchunk_prefill_{name}") for name in names] == [0, 0, 0, 0]


def test_predicted_and_measured() -> None:
    """Without a model only what was measured; with one the prediction for the same batch, c counted once."""
    seen = Seen()
    seen.metrics.timed(prefill(("r", 1_000, 100)), 12.5)
    assert seen.value("dynchunk_latency_measured_ms") == 12.5
    assert seen.value("dynchunk_latency_predicted_ms") == 0
    assert seen.value("dynchunk_model_state", state="off") == 1
    in_force.latency.mode = parse_mode("equal")
    in_force.latency.adopt(Update(from_ms(1e-5, 0.01, 3, 0.001), calibrating=False, reason=""))
    seen.metrics.timed(prefill(("r", 1_000, 100), ("s", 0, 10)), 8.0)
    expected = 3 + 1 + 1 + 1e-5 * (2 * 1_000 * 100 + 100**2) + 0.1 + 1e-5 * 100
    assert seen.value("dynchunk_latency_predicted_ms") == pytest.approx(expected)
    seen.later()
    states = {state: seen.value("dynchunk_model_state", state=state) for state in metrics.STATES}
    assert states == {"off": 0, "calibrating": 0, "model": 1, "fixed": 0}


def test_hooks() -> None:
    """1 for what is in place, 0 for what was refused, nothing for what this engine has no use for."""
    journal.record("sizer", journal.APPLIED)
    journal.record("trace", journal.NOT_IN_USE)
    seen = Seen(reports=False)
    assert seen.value("dynchunk_hook_applied", hook="sizer", rank="pp0tp0") == 1
    assert seen.value("dynchunk_hook_applied", hook="trace", rank="pp0tp0") is None
    journal.record("sizer", journal.REFUSED, "broke")
    seen.later()
    assert seen.value("dynchunk_hook_applied", hook="sizer", rank="pp0tp0") == 0


def test_a_rank_that_does_not_report_shows_its_hooks_only() -> None:
    """As the engine's own metrics, which come from the first rank of a group."""
    journal.record("sizer", journal.APPLIED)
    seen = Seen(reports=False)
    seen.metrics.after(prefill(("r", 0, 10)))
    seen.metrics.timed(prefill(("r", 0, 10)), 1.0)
    seen.later()
    names = {sample.name for family in seen.registry.collect() for sample in family.samples}
    assert names == {"dynchunk_hook_applied"}


RANK = """
import sys
from types import SimpleNamespace
from dynchunk import in_force, journal
from dynchunk.metrics import Metrics
from dynchunk.policy.budget import Budget
rank = sys.argv[1]
in_force.limits = Budget(200_000_000, "prefix", 64, 256, 2048)
in_force.counts["deferred"] = 3
journal.record("sizer", journal.APPLIED)
metrics = Metrics({"model_name": "m", "tp_rank": 0, "pp_rank": int(rank)}, f"pp{rank}tp0")
metrics.after(SimpleNamespace(reqs=[("r", 1000 * int(rank), 64)]))
"""


def test_the_engines_multiprocess_mode(tmp_path: Path) -> None:
    """Two scheduler processes, one scrape: every declared metric is there, each rank with its own value."""
    environ = clean_environ(PROMETHEUS_MULTIPROC_DIR=str(tmp_path), PYTHONPATH=str(ROOT / "adapter"))
    for rank in "01":
        subprocess.run([sys.executable, "-c", RANK, rank], env=environ, check=True)
    scrape = (
        "from prometheus_client import CollectorRegistry, generate_latest, multiprocess\n"
        "registry = CollectorRegistry()\n"
        "multiprocess.MultiProcessCollector(registry)\n"
        "print(generate_latest(registry).decode())\n"
    )
    text = subprocess.run(
        [sys.executable, "-c", scrape], env=environ, check=True, capture_output=True, text=True
    ).stdout
    assert 'dynchunk_batch_longest_tokens{model_name="m",pp_rank="0",tp_rank="0"} 0.0' in text
    assert 'dynchunk_batch_longest_tokens{model_name="m",pp_rank="1",tp_rank="0"} 1000.0' in text
    assert 'dynchunk_deferred_requests_total{model_name="m",pp_rank="1",tp_rank="0"} 3.0' in text
    assert 'dynchunk_hook_applied{hook="sizer",rank="pp1tp0"} 1.0' in text
    families = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")}
    # Some libraries name a counter's family without its ending, and a cause that never came has no series.
    declared = {m.name for m in DECLARED if m.name != "dynchunk_floor_chunks_total"}
    assert {name for name in declared if name not in families and name.removesuffix("_total") not in families} == set()


def test_the_library_is_not_imported_before_it_is_needed() -> None:
    """The module itself costs an engine without --enable-metrics nothing of prometheus_client."""
    done = run_python(
        "import sys, dynchunk.metrics; print('prometheus_client' in sys.modules)", path=(ROOT / "adapter",)
    )
    assert done.stdout == "False\n", done.stderr
