"""Where the cache release and the trace are hooked in. The CUDA calls are faked: there is no device here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dynchunk import in_force, journal, settings

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]  # the engine warns on import

GIB = 1 << 30


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, empty in {
        **dict.fromkeys(("release", "primed", "meter", "device", "prefills")),
        "listeners": [],
        "when_idle": [],
    }.items():
        monkeypatch.setattr(in_force, name, empty)
    monkeypatch.setattr(journal, "_hooks", {})
    settings.current.cache_clear()
    yield
    settings.current.cache_clear()


class FakeCuda:
    """torch.cuda of one device, whose memory is what a test says. Records what was asked of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, integrated: bool) -> None:
        import torch

        self.free, self.capturing, self.calls = 100 * GIB, False, []
        answers = {
            "is_available": lambda: True,
            "current_device": lambda: 0,
            "get_device_properties": lambda _: SimpleNamespace(name="fake", is_integrated=integrated),
            "mem_get_info": lambda _: (self.free, 200 * GIB),
            "memory_reserved": lambda _: 5 * GIB,
            "memory_allocated": lambda _: 3 * GIB,
            "is_current_stream_capturing": lambda: self.capturing,
            "memory_snapshot": list,
            "empty_cache": lambda: self.calls.append("empty_cache"),
        }
        for name, answer in answers.items():
            monkeypatch.setattr(torch.cuda, name, answer)


def scheduler(calls: list[str], device: str = "cuda", **place: int) -> SimpleNamespace:
    def forward(_batch: Any) -> str:
        calls.append("forward")
        return "output"

    ps = SimpleNamespace(**{"dp_rank": None, "pp_rank": 0, "tp_rank": 0, "attn_tp_rank": 0, "attn_cp_rank": 0} | place)
    runner = SimpleNamespace(device=device, forward=forward)
    context = SimpleNamespace(collector=None)
    return SimpleNamespace(
        tp_worker=SimpleNamespace(model_runner=runner), ps=ps, _engine_paused=False, metrics_collector_context=context
    )


def prefill(tokens: int, prefix: int = 0) -> SimpleNamespace:
    mode = SimpleNamespace(is_context_parallel_extend=lambda: True, name="EXTEND")
    return SimpleNamespace(forward_mode=mode, rids=["r"], extend_seq_lens_cpu=[tokens], extend_prefix_lens_cpu=[prefix])


@pytest.mark.parametrize(("integrated", "mode"), [(True, "always"), (False, "low")])
def test_auto_is_always_where_gpu_memory_is_host_memory(
    monkeypatch: pytest.MonkeyPatch, integrated: bool, mode: str
) -> None:
    from dynchunk.patches import observers

    cuda = FakeCuda(monkeypatch, integrated=integrated)
    observers.install(scheduler(cuda.calls))
    release = in_force.release
    assert release is not None
    assert release.mode == mode


def test_what_the_gpu_has_left_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memguard reads it; and that gpu_check has not run on this GPU stands in the journal."""
    from dynchunk.patches import observers

    observers.install(scheduler(FakeCuda(monkeypatch, integrated=False).calls))
    assert in_force.counters()["device"] == {"free_bytes": 100 * GIB, "unused_reserved_bytes": 2 * GIB}
    assert journal.snapshot()["hooks"]["gpu_check"]["outcome"] == "unverified on this device"


def test_a_release_comes_before_the_next_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long prefill runs, and what it left is released just before the forward after it."""
    from dynchunk.patches import observers

    cuda = FakeCuda(monkeypatch, integrated=True)
    engine = scheduler(cuda.calls)
    observers.install(engine)
    forward = engine.tp_worker.model_runner.forward
    assert forward(prefill(2048, 100_000)) == "output"
    assert forward(prefill(2048, 102_048)) == "output"
    assert cuda.calls == ["forward", "empty_cache", "forward"]


def test_the_last_chunk_is_released_from_the_idle_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    from dynchunk.patches import observers
    from dynchunk.patches.scheduler import _work_when_idle

    cuda = FakeCuda(monkeypatch, integrated=True)
    engine = scheduler(cuda.calls)
    observers.install(engine)
    engine.tp_worker.model_runner.forward(prefill(2048, 100_000))
    _work_when_idle(lambda _self: cuda.calls.append("idle"))(engine)
    assert cuda.calls == ["forward", "empty_cache", "idle"]


@pytest.mark.parametrize("state", ["paused", "capturing"])
def test_nothing_is_released_while_paused_or_capturing(monkeypatch: pytest.MonkeyPatch, state: str) -> None:
    from dynchunk.patches import observers

    cuda = FakeCuda(monkeypatch, integrated=True)
    engine = scheduler(cuda.calls)
    observers.install(engine)
    release = in_force.release
    engine.tp_worker.model_runner.forward(prefill(2048, 100_000))
    engine._engine_paused, cuda.capturing = state == "paused", state == "capturing"
    release.before_launch()
    assert "empty_cache" not in cuda.calls
    engine._engine_paused = cuda.capturing = False
    release.before_launch()
    assert "empty_cache" in cuda.calls, "forgotten meanwhile"


@pytest.mark.parametrize(("integrated", "below"), [(True, True), (False, False)])
def test_low_reads_host_memory_only_where_the_device_is_integrated(
    monkeypatch: pytest.MonkeyPatch, integrated: bool, below: bool
) -> None:
    """On a discrete device the driver's free memory counts, on an integrated one MemAvailable."""
    from dynchunk.patches import cuda_device, observers

    cuda = FakeCuda(monkeypatch, integrated=integrated)
    monkeypatch.setattr(cuda_device, "mem_available_bytes", lambda: GIB)
    monkeypatch.setenv("DYNCHUNK_EMPTY_CACHE", "low")
    engine = scheduler(cuda.calls)
    observers.install(engine)
    release = in_force.release
    engine.tp_worker.model_runner.forward(prefill(2048, 100_000))
    release.before_launch()
    assert ("empty_cache" in cuda.calls) is below


def test_a_fault_of_the_hook_does_not_end_the_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver refuses a call: the forward runs all the same, and nothing is released any more."""
    from dynchunk.patches import observers

    cuda = FakeCuda(monkeypatch, integrated=True)
    engine = scheduler(cuda.calls)
    observers.install(engine)
    release = in_force.release
    runner = engine.tp_worker.model_runner
    monkeypatch.setattr(release, "before_launch", lambda: 1 / 0)
    assert runner.forward(prefill(2048)) == "output"
    assert runner.forward(prefill(2048)) == "output"
    assert cuda.calls == ["forward", "forward"]
    assert journal.snapshot()["hooks"]["cache_release"]["outcome"] == "refused"


@pytest.mark.parametrize(
    ("place", "entry"),
    [({}, True), ({"tp_rank": 1, "attn_tp_rank": 1}, False), ({"pp_rank": 1}, False), ({"attn_cp_rank": 1}, False)],
)
def test_one_rank_of_a_replica_writes_the_trace_that_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, place: dict[str, int], entry: bool
) -> None:
    from dynchunk.patches import observers

    trace = tmp_path / "trace"
    monkeypatch.setenv("DYNCHUNK_TRACE", str(trace))
    engine = scheduler([], "cpu", **place)
    observers.install(engine)
    engine.tp_worker.model_runner.forward(prefill(1, 700))
    assert trace.exists() is entry
    [written] = tmp_path.iterdir()
    assert '"reqs":[["r",700,1]]' in written.read_text()
