"""What the report says, and that its data survives being written and read."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scripts.verify import device, engine, figures, machine, plots, records, report
from scripts.verify.decide import GIB, Sample
from scripts.verify.errors import RecordError
from scripts.verify.results import Abort, Chunk, Outcome, Probe, Run, Step, Verdict, from_json, to_json
from tests.verify.engine_programs import AT_MOST_S, until


def a_run(label: str = "budget", **fields: Any) -> Run:
    run = Run(
        label=label,
        started_s=1_000.0,
        date="2026-11-29",
        command="memguard",
        url="http://127.0.0.1:30000",
        machine={"machine_id": "abc", "memory_total_bytes": 16 * GIB},
        engine={"version": "0.5.23", "flags": {"page_size": 64}, "dynchunk": [], "model": "m"},
        sizes_tokens=[4_000],
        guard_bytes=2 * GIB,
        baseline_bytes=8 * GIB,
        outcome=Outcome.PASSED,
        exit_code=0,
        probes=[
            Probe(
                4_000,
                Verdict.PASSED,
                start_s=1_001.0,
                end_s=1_003.0,
                prompt_tokens=4_000,
                cached_tokens=0,
                low_water_bytes=3 * GIB,
                chunks=[Chunk(0, 2_000, 1_001.0, 1_002.0), Chunk(2_000, 2_000, 1_002.0, 1_003.0)],
            )
        ],
    )
    for name, value in fields.items():
        setattr(run, name, value)
    return run


def test_a_row_says_what_was_measured() -> None:
    """Seconds, tokens/s, chunk sizes, cached tokens, low water, distance to the guard, verdict."""
    assert "| 4,000 | 2.0 | 2,000 | 2 of 2,000 | 0 | 3.00 GiB | 1.00 GiB | passed |" in report.results_table(a_run())


def test_cached_tokens_are_not_counted_as_computed() -> None:
    """Half a prompt from the cache is half the speed, and the report says that it happened."""
    run = a_run()
    run.probes[0].cached_tokens = 2_000
    assert run.probes[0].tokens_per_s == 1_000
    assert "Prompts that found cached tokens: 1;" in report.render([run], [])


def test_a_trace_with_lines_missing_is_said_to_be_incomplete() -> None:
    """Half of the prompt's lines: how much they cover stands in row and text, and no speed is made of them."""
    run = a_run()
    del run.probes[0].chunks[0]
    text = report.render([run], [])
    assert "1 of 2,000 (2,000 of 4,000 tokens)" in report.results_table(run)
    assert "**The trace covers only 2,000 of 4,000 tokens**" in text
    assert "Unknown (the trace is incomplete)." in text
    assert figures.tokens_per_second([(run, [])]) is None


def test_a_hole_in_the_trace_of_an_aborted_prompt_is_seen() -> None:
    """How far it got is where the last chunk ends; what is missing before it is counted, cached tokens are not."""
    probe = Probe(9_000, Verdict.GUARDED, chunks=[Chunk(0, 1_000, 0, 1), Chunk(3_000, 1_000, 2, 3)])
    assert probe.untraced_tokens == 2_000
    assert Probe(9_000, Verdict.GUARDED, chunks=[Chunk(0, 1_000, 0, 1)]).untraced_tokens == 0
    cached = Probe(2_000, Verdict.PASSED, prompt_tokens=2_000, cached_tokens=500, chunks=[Chunk(500, 1_500, 0, 1)])
    assert cached.untraced_tokens == 0


def test_chunk_sizes_in_few_words() -> None:
    """Few sizes are named, many are counted; the rest at the end of a prompt is no size of its own."""
    chunks = [Chunk(0, size, 0.0, 1.0) for size in (2048, 2048, 17)]
    assert report.chunk_summary(chunks) == "3 of 2,048"
    falling = [Chunk(0, size, 0.0, 1.0) for size in (2048, 1024, 768, 512, 17)]
    assert report.chunk_summary(falling) == "5: 2,048 to 512 in 4 sizes"
    assert report.chunk_summary([Chunk(0, 17, 0.0, 1.0)]) == "1 of 17"
    assert report.chunk_summary([]) == ""


def test_a_slow_sampler_is_confessed() -> None:
    """Below four readings a second the report says that a dip may have been missed."""
    assert "may have been missed" not in report.render([a_run(largest_sample_gap_s=0.2)], [])
    assert "The longest gap was 0.90 s" in report.render([a_run(largest_sample_gap_s=0.9)], [])


def test_what_stands_between_bars_cannot_break_a_table() -> None:
    """A message with a bar or a line break stays in its cell."""
    run = a_run()
    run.probes[0].detail = "a|b\nc"
    row = next(line for line in report.results_table(run).splitlines() if "4,000" in line)
    assert row.endswith("passed: a\\|b c |")


def test_a_run_without_any_size_can_be_reported() -> None:
    """A ramp that failed before its first prompt has a report all the same."""
    text = report.render([a_run(probes=[Probe(4_000)], outcome=Outcome.FAILED, notes=["It broke."])], [])
    assert "It broke." in text
    assert "not run" in text


def test_two_runs_with_different_sizes_share_a_table() -> None:
    """A size that only one of them ran has dashes for the other."""
    other = a_run("static", probes=[Probe(8_000, Verdict.GUARDED)])
    table = report.joint_table([a_run(), other])
    assert "| 4,000 | 2.0 | 2,000 | 3.00 GiB | passed | - | - | - | - |" in table
    assert "| 8,000 | - | - | - | - | - | - | - | ended by the guard |" in table


times = st.floats(0, 2e9, allow_nan=False).map(lambda value: round(value, 3))
tokens = st.integers(0, 50_000)
memory = st.none() | st.integers(0, 2**45)


@settings(max_examples=40)
@given(
    st.lists(
        st.builds(
            Probe,
            tokens,
            verdict=st.sampled_from(Verdict),
            detail=st.text(),
            start_s=st.none() | times,
            end_s=st.none() | times,
            low_water_bytes=memory,
            chunks=st.lists(st.builds(Chunk, tokens, st.integers(1, 10_000), times, times), max_size=5),
        ),
        max_size=4,
    ),
    st.none() | st.builds(Abort, times, tokens, st.text(), st.none() | tokens, recovery_s=st.none() | times),
    st.sampled_from(Outcome),
)
def test_a_run_comes_back_as_it_was(probes: list[Probe], abort: Abort | None, outcome: Outcome) -> None:
    """What is written to run.json is what is read from it, and any run can be rendered."""
    run = a_run(probes=probes, abort=abort, outcome=outcome)
    assert from_json(json.loads(json.dumps(to_json(run)))) == run
    assert report.render([run, run], []).startswith("# memguard")


def record(folder: Path, run: Run, samples: list[Sample]) -> None:
    recorder = records.Recorder(folder)
    run.samples_file = recorder.samples_file
    recorder.samples(samples)
    recorder.run(run)
    recorder.close()


def test_a_line_that_was_cut_off_costs_only_itself(tmp_path: Path) -> None:
    """A host that froze in the middle of a line leaves the rest readable."""
    samples = [Sample(1_000.0 + index, GIB, GIB, 0) for index in range(3)]
    record(tmp_path, a_run(), samples)
    path = tmp_path / "samples.jsonl"
    path.write_text(path.read_text()[:-20])
    run = records.load(tmp_path)[0]
    assert records.load_samples(tmp_path, run) == samples[:2]


def test_each_chunk_is_one_line_of_the_file(tmp_path: Path) -> None:
    """run.json can be read by people, thousands of chunks or not."""
    record(tmp_path, a_run(), [])
    lines = (tmp_path / "run.json").read_text().splitlines()
    assert [line.strip() for line in lines if "2000, 2000" in line] == ["[2000, 2000, 1002.0, 1003.0]"]


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"schema": 99}', '{"schema": 1, "probes": [{}]}'])
def test_a_file_of_another_kind_is_named(tmp_path: Path, content: str) -> None:
    """A run.json that is none is an error with its path."""
    (tmp_path / "run.json").write_text(content)
    with pytest.raises(RecordError, match=r"run\.json is not a run of this memguard"):
        records.load(tmp_path)


def test_plots_are_drawn_from_the_data_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`plots FOLDER` draws all four and the report that shows them, long after the run."""
    record(tmp_path, a_run(), [Sample(1_000.0 + index, (8 - index) * GIB, GIB, 0) for index in range(4)])
    assert plots.main([str(tmp_path)]) == 0
    assert len(list(tmp_path.glob("*.png"))) == 4
    assert (tmp_path / "REPORT.md").read_text().count("![") == 4
    assert "4 plots are drawn again" in capsys.readouterr().out


def test_nothing_is_drawn_of_nothing() -> None:
    """Without samples and chunks there is no empty plot."""
    measured = [(a_run(probes=[Probe(4_000)]), [])]
    assert figures.memory(measured) is None
    assert figures.chunks_over_time(measured) is None
    assert figures.chunk_by_prefix(measured) is None
    assert figures.tokens_per_second(measured) is None


def test_the_guard_is_in_the_plot_of_memory() -> None:
    """The line of the guard and the moment it tripped are drawn and named, inside the axes."""
    run = a_run("static", abort=Abort(1_003.0, GIB, "why", 4_000))
    figure = figures.memory([(run, [Sample(1_000.0 + index, (8 - index) * GIB, GIB, 0) for index in range(4)])])
    axes = figure.axes[0]
    labels = axes.get_legend_handles_labels()[1]
    assert labels == ["static: MemAvailable", "guard, 2.00 GiB", "static: guard tripped"]
    low, high = axes.get_ylim()
    assert low < 1.0
    assert high > 8.0
    assert axes.get_ylabel() == "MemAvailable (GiB)"
    assert axes.get_xlabel() == "time since the ramp started (s)"


def test_a_rehearsal_shows_both_figures() -> None:
    """What was judged and what the host had, each with its name: in text, tables, words and plot."""
    run = a_run("static", own_memory=True)
    run.probes[0].host_low_water_bytes = 5 * GIB
    text = report.render([run, a_run()], [])
    assert "MemAvailable (engine alone) was 8.00 GiB before the ramp and 3.00 GiB at its lowest" in text
    assert "whatever other programs took or gave back; the host's own MemAvailable was 5.00 GiB at its lowest." in text
    assert "| 2 of 2,000 | 0 | 3.00 GiB | 1.00 GiB | 5.00 GiB | passed |" in report.results_table(run)
    assert "| 3.00 GiB | 5.00 GiB | passed | 2.0 | 2,000 | 3.00 GiB | - | passed |" in report.joint_table(
        [run, a_run()]
    )
    assert "2.00 GiB (MemAvailable, by what the engine's own processes take)" in text
    assert "**MemAvailable (engine alone)**: " in text
    samples = [Sample(1_000.0 + at, 8 * GIB, GIB, host_available_bytes=(10 + at) * GIB) for at in range(4)]
    axes = figures.memory([(run, samples), (a_run(), samples[:0])]).axes[0]
    labels = axes.get_legend_handles_labels()[1]
    assert labels[:2] == ["static: MemAvailable (engine alone)", "static: MemAvailable"]
    judged, host = axes.lines[:2]
    assert host.get_linewidth() < judged.get_linewidth()
    assert list(host.get_ydata()) == [10, 11, 12, 13]
    assert axes.get_ylim()[1] > 13


def test_an_older_report_is_of_the_host(tmp_path: Path) -> None:
    """A run.json and readings from before there was a choice load, and say nothing of another figure."""
    values = to_json(a_run())
    del values["own_memory"]
    for probe in values["probes"]:
        del probe["host_low_water_bytes"]
    run = from_json(values)
    assert run == a_run()
    assert "engine alone" not in report.render([run], [])
    (tmp_path / "samples.jsonl").write_text('{"t":1000.0,"mem_available_bytes":7,"mem_free_bytes":5,"phase":"ramp"}\n')
    assert records.load_samples(tmp_path, run) == [Sample(1_000.0, 7, 5)]


def test_every_guard_has_its_own_line_where_they_differ() -> None:
    """Two rehearsals with different baselines have different guards."""
    samples = [Sample(1_000.0, 8 * GIB, GIB, 0), Sample(1_001.0, 7 * GIB, GIB, 0)]
    figure = figures.memory([(a_run("a"), samples), (a_run("b", guard_bytes=3 * GIB), samples)])
    labels = figure.axes[0].get_legend_handles_labels()[1]
    assert "a: guard, 2.00 GiB" in labels
    assert "b: guard, 3.00 GiB" in labels


def test_thousands_of_readings_are_drawn_with_their_lowest() -> None:
    """However many readings share a point of the plot, the lowest of them is on the line."""
    samples = [Sample(1_000.0 + index / 10, (2 if index == 7_777 else 8) * GIB, GIB, 0) for index in range(20_000)]
    line = figures.memory([(a_run(), samples)]).axes[0].lines[0]
    assert len(line.get_ydata()) < 2_000
    assert min(line.get_ydata()) == 2.0


class FakeNvml:
    """NVML as on a machine whose GPU memory is host memory: it has no memory to report."""

    @staticmethod
    def nvmlInit() -> None: ...  # noqa: N802
    @staticmethod
    def nvmlShutdown() -> None: ...  # noqa: N802
    @staticmethod
    def nvmlSystemGetDriverVersion() -> bytes:  # noqa: N802
        return b"580.173.02"

    @staticmethod
    def nvmlDeviceGetCount() -> int:  # noqa: N802
        return 1

    @staticmethod
    def nvmlDeviceGetHandleByIndex(index: int) -> int:  # noqa: N802
        return index

    @staticmethod
    def nvmlDeviceGetName(handle: int) -> str:  # noqa: N802
        return "NVIDIA GB10"

    @staticmethod
    def nvmlDeviceGetMemoryInfo(handle: int) -> SimpleNamespace:  # noqa: N802
        raise RuntimeError("Not Supported")


def test_memory_that_nvml_does_not_know_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """NOT_SUPPORTED is not 0 bytes: the GPU is named, its memory is said to be not reported."""
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml)
    facts = machine.facts()
    assert facts["gpus"] == [{"name": "NVIDIA GB10", "memory_bytes": None}]
    assert facts["driver"] == "580.173.02"
    assert "NVIDIA GB10 (memory not reported" in report.render([a_run(machine=facts)], [])


class DiscreteNvml(FakeNvml):
    """NVML of two GPUs with memory of their own; the second becomes full, then the driver fails."""

    # The first reading is the look whether there is one.
    free: ClassVar = [[50 * GIB, 60 * GIB, 40 * GIB], [20 * GIB, 30 * GIB]]

    @staticmethod
    def nvmlDeviceGetCount() -> int:  # noqa: N802
        return 2

    @classmethod
    def nvmlDeviceGetMemoryInfo(cls, handle: int) -> SimpleNamespace:  # noqa: N802
        readings = cls.free[handle]
        return SimpleNamespace(free=readings.pop(0) if len(readings) > 1 else readings[0], total=80 * GIB)


def test_gpus_with_memory_of_their_own_are_read_beside_the_ramp(monkeypatch: pytest.MonkeyPatch) -> None:
    """The least that was free on each since the mark; where GPU memory is the host's nothing is read."""
    monkeypatch.setattr(DiscreteNvml, "free", [list(readings) for readings in DiscreteNvml.free])  # they are used up
    monkeypatch.setitem(sys.modules, "pynvml", DiscreteNvml)
    monkeypatch.setattr(device, "POLL_S", 0.01)
    devices = device.Devices()
    assert devices.present
    devices.start()
    assert until(lambda: devices.low_bytes() == [40 * GIB, 30 * GIB]), devices.low_bytes()
    devices.mark()
    devices.end()
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml)
    assert not device.Devices().present


def test_a_driver_that_fails_costs_only_its_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread ends, the ramp goes on, and the last figures are not taken for those of now."""

    class Failing(DiscreteNvml):
        calls = 0

        @classmethod
        def nvmlDeviceGetMemoryInfo(cls, handle: int) -> SimpleNamespace:  # noqa: N802
            cls.calls += 1
            if cls.calls > 6:
                raise RuntimeError("GPU is lost")
            return SimpleNamespace(free=GIB, total=GIB)

    monkeypatch.setitem(sys.modules, "pynvml", Failing)
    monkeypatch.setattr(device, "POLL_S", 0.01)
    devices = device.Devices()
    devices.start()
    devices.join(timeout=AT_MOST_S)
    assert not devices.is_alive()
    assert devices.low_bytes() == []


def test_free_gpu_memory_has_a_column_where_it_was_read() -> None:
    """The fullest GPU at its worst, and what the engine's allocator held unused."""
    run = a_run()
    assert "GPU free |" not in report.results_table(run)
    run.probes[0].gpu_free_low_bytes = [5 * GIB, 3 * GIB]
    assert "| 3.00 GiB | 1.00 GiB | 3.00 GiB | passed |" in report.results_table(run)
    run.probes[0].gpu_unused_bytes = 6 * GIB
    assert "| 3.00 GiB, 6.00 GiB reserved unused | passed |" in report.results_table(run)
    info = {"internal_states": [{"dynchunk": {"device": {"unused_reserved_bytes": 2}}}, {"dynchunk": {}}, {}]}
    assert engine.unused_reserved_bytes(info) == 2
    assert engine.unused_reserved_bytes({"internal_states": [{"dynchunk": {}}]}) is None


def test_what_the_guard_did_is_in_the_report() -> None:
    """Each step with its second, distress of the host, and whether the engine could have been signalled."""
    run = a_run(
        steps=[Step(1_002.5, "SIGTERM was sent to the engine (process 7)")],
        swap_in_pages=1_234,
        kernel_oom=2,
        psi_full_max=12.5,
        signals="could reach the engine (process 7)",
        image="lmsysorg/sglang:v0.5.23",
    )
    text = report.render([run], [])
    for part in (
        "- 2.5: SIGTERM was sent to the engine (process 7)",
        "1,234 pages came back from swap",
        "all tasks waited for memory in 12.5 % of 10 s",
        "The kernel was out of memory 2 times",
        "| signals to the engine | could reach the engine (process 7) |",
        "| image | lmsysorg/sglang:v0.5.23 |",
    ):
        assert part in text
    assert from_json(json.loads(json.dumps(to_json(run)))) == run


def test_no_nvml_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without NVML, or where it fails, the report simply has no GPU."""
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert machine.facts()["gpus"] == []


def test_machines_are_told_apart_without_their_names(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The id follows the machine and holds neither its id nor its name."""
    (tmp_path / "machine-id").write_text("0123456789abcdef\n")
    monkeypatch.setattr(machine, "_MACHINE_ID", tmp_path / "machine-id")
    first = machine.machine_id()
    assert first == machine.machine_id()
    assert first not in "0123456789abcdef"
    (tmp_path / "machine-id").write_text("another\n")
    assert machine.machine_id() != first


@pytest.mark.parametrize(
    ("info", "context_tokens", "expected"),
    [
        ({}, None, None),
        ({"context_length": 4_096}, None, (4_095, "the context length of 4,096")),
        ({}, 4_096, (4_095, "the context length of 4,096")),
        ({"context_length": 4_096, "max_req_input_len": 4_090}, None, (4_089, "the context length of 4,096")),
        (
            {"context_length": 4_096, "max_req_input_len": 1_000, "max_total_num_tokens": 1_006},
            None,
            (999, "the KV cache of 1,006 tokens"),
        ),
        ({"max_req_input_len": 1_000}, None, (999, "the engine's limit of 1,000 for an input")),
    ],
)
def test_the_longest_prompt(info: dict[str, int], context_tokens: int | None, expected: tuple[int, str] | None) -> None:
    """The smaller of what the model and the engine take, and which of them it is."""
    assert engine.longest_prompt(info, context_tokens) == expected
