"""The whole of memguard against a fake engine: what it does, what it leaves behind, how it ends."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scripts.verify import place, records
from scripts.verify import publish as publishing
from scripts.verify.decide import GIB
from scripts.verify.errors import MemguardError, RecordError, ServerGoneError, WrongKeyError
from scripts.verify.guard import Guard
from scripts.verify.report import NO_CHUNKS
from scripts.verify.results import Outcome, Verdict
from tests.conftest import ROOT, clean_environ
from tests.verify.conftest import Ran
from tests.verify.engine_programs import AT_MOST_S, until
from tests.verify.fake_engine import FakeEngine

pytestmark = pytest.mark.slow

Start = Callable[..., FakeEngine]
Memguard = Callable[..., Ran]
KEY = "s3cret-key"


def aborted_rids(engine: FakeEngine) -> list[str]:
    return [body["rid"] for path, body in engine.calls if path == "/abort_request" and "check" not in body["rid"]]


def test_a_ramp_that_passes(start_engine: Start, memguard: Memguard) -> None:
    """Every size runs once, smallest first, with the cache emptied before each; exit code 0 and a complete report."""
    engine = start_engine(budget=4_000_000)
    ran = memguard(engine, 2_000, 4_000, 8_000)
    assert ran.code == 0
    assert ran.run.outcome is Outcome.PASSED
    assert [len(prompt) for prompt in engine.prompts] == [2_000, 4_000, 8_000]
    paths = [path for path, _ in engine.calls]
    assert paths == ["/abort_request", *["/flush_cache", "/generate"] * 3]
    for probe in ran.run.probes:
        assert probe.verdict is Verdict.PASSED
        assert sum(chunk.tokens for chunk in probe.chunks) == probe.size_tokens
        assert probe.cached_tokens == 0
    sizes = [chunk.tokens for chunk in ran.run.probes[-1].chunks]
    assert sizes[0] == 1_000
    assert sizes[-2] < 700
    assert "8,000" in ran.report
    assert "in 5 sizes" in ran.report or "in 6 sizes" in ran.report
    assert "all sizes passed" in ran.shown


def test_what_the_engine_has_measured_is_kept(start_engine: Start, memguard: Memguard) -> None:
    """The cost of a row and key, and what it is true of: DYNCHUNK_REPORT and plan read it from run.json."""
    engine = start_engine(budget=4_000_000)
    fit = {"kind": "line", "bytes_per_pair": 12.0, "base_bytes": 7, "in_words": "c = 12.00 B"}
    fit["belongs_to"] = {"engine": "0.5.23"}
    [state] = engine.server_info()["internal_states"]
    state["dynchunk"]["coefficient"] = fit
    engine.info["internal_states"] = [state]
    ran = memguard(engine, 2_000)
    assert json.loads((ran.folder / "run.json").read_text())["coefficient"] == fit
    assert "measured in the engine: c = 12.00 B." in ran.report


def test_prompts_share_nothing(start_engine: Start, memguard: Memguard) -> None:
    """No two prompts begin alike, within a run and from run to run, so that no cache can help."""
    engine = start_engine()
    ran = memguard(engine, 1_000, 2_000)
    memguard(engine, 1_000, append=ran.folder)
    first, second, third = engine.prompts
    assert first[0] != second[0]
    assert first[:50] != third[:50]
    assert min(map(min, engine.prompts)) >= 100
    assert max(map(max, engine.prompts)) <= 9_999


def test_the_guard_aborts_the_request_and_ends_the_ramp(start_engine: Start, memguard: Memguard) -> None:
    """Exit code 2, the request in flight aborted by its id, larger sizes not sent, and the report kept."""
    engine = start_engine(static_tokens=1_000)  # 400 B x 1,000 x L: 6 GiB at 16,000 tokens
    ran = memguard(engine, 4_000, 30_000, 60_000, guard_bytes=2 * GIB, trace=engine.trace)
    assert ran.code == 2
    assert [len(prompt) for prompt in engine.prompts] == [4_000, 30_000]
    passed, guarded, never = ran.run.probes
    assert set(aborted_rids(engine)) == {guarded.rid}
    assert (passed.verdict, guarded.verdict, never.verdict) == (Verdict.PASSED, Verdict.GUARDED, Verdict.NOT_RUN)
    done = sum(chunk.tokens for chunk in guarded.chunks)
    assert 15_000 <= done < 30_000
    abort = ran.run.abort
    assert abort is not None
    assert abort.size_tokens == 30_000
    assert abort.request_ended
    assert abort.recovered
    assert abort.server_healthy
    assert guarded.low_water_bytes is not None
    assert guarded.low_water_bytes < 2 * GIB
    assert "It tripped at 30,000 tokens" in ran.report
    assert "Memory recovered" in ran.report
    assert "recovered" in ran.shown


def test_headroom_sets_the_guard_below_the_baseline(start_engine: Start, memguard: Memguard) -> None:
    """With 3 GiB of headroom on 8 GiB the guard is at 5: a laptop rehearses a machine with 3 GiB to spare."""
    ran = memguard(start_engine(), 4_000, 30_000, headroom_bytes=3 * GIB)
    assert ran.code == 2
    assert ran.run.baseline_bytes == 8 * GIB
    assert ran.run.guard_bytes == 5 * GIB
    assert "baseline less 3.00 GiB" in ran.report


ENGINE_PID = 4242
TAKEN_FROM_THE_FIRST_PROMPT_ON = (0.0, *[2.0] * 1_000)


@pytest.fixture
def engine_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake engine has no process of its own; what it would hold is in its made-up /proc."""
    monkeypatch.setattr(place, "engine_process", lambda url: SimpleNamespace(pid=ENGINE_PID, what="the engine"))


@pytest.mark.usefixtures("engine_found")
def test_a_rehearsal_judges_the_engine_alone(start_engine: Start, memguard: Memguard) -> None:
    """Others take 2 GiB meanwhile: with 1.4 to spare a static chunk trips by what it takes itself, a budget does not.

    The report says which was judged and has both low waters; the readings have both figures.
    """
    how = {"headroom_bytes": round(1.4 * GIB), "own_memory": True, "signals": False}
    beside: dict[str, Any] = {"pid": ENGINE_PID, "neighbour": TAKEN_FROM_THE_FIRST_PROMPT_ON}
    engine = start_engine(leaks=True, stalls_at_tokens=6_000, **beside)
    # Its memory does not come back, and is not waited for.
    static = memguard(engine, 1_000, 8_000, label="static", around={"recovery_s": 0.4}, **how)
    both = memguard(start_engine(budget=2_000_000, **beside), 1_000, 8_000, label="budget", append=static.folder, **how)
    assert (static.code, both.code) == (2, 0)
    assert "1.40 GiB to spare), judged by what the engine's own processes take, report in" in both.shown
    tripped, passed = both.runs
    assert tripped.abort is not None
    assert tripped.abort.reason.startswith("MemAvailable (engine alone) ")
    assert tripped.abort.available_bytes > tripped.guard_bytes - GIB
    assert "not recovered: MemAvailable (engine alone) " in static.shown
    for run in (tripped, passed):
        assert run.own_memory
        assert run.probes[1].host_low_water_bytes < run.probes[1].low_water_bytes
    low, hosts = passed.low_water_bytes, passed.host_low_water_bytes
    assert low is not None
    assert hosts is not None
    assert hosts < passed.guard_bytes < low
    samples = records.load_samples(both.folder, passed)
    judged = [sample for sample in samples if sample.host_available_bytes is not None]
    assert samples[-len(judged) :] == judged
    assert min(sample.host_available_bytes or 0 for sample in judged) <= hosts
    assert "**It was judged by what the engine's own processes take**" in both.report
    assert "budget: host's low water" in both.report


@pytest.mark.usefixtures("engine_found")
def test_a_host_in_danger_ends_a_rehearsal_too(start_engine: Start, memguard: Memguard) -> None:
    """Below 1.5 GiB of the host's own MemAvailable the request is aborted, whoever has taken it."""
    engine = start_engine(pid=ENGINE_PID, neighbour=(0.0,) * 5 + (7.0,) * 1_000, stalls_at_tokens=3_000)
    how = {"headroom_bytes": 3 * GIB, "own_memory": True, "signals": False, "around": {"recovery_s": 0.4}}
    ran = memguard(engine, 1_000, 4_000, **how)
    assert ran.code == 2
    assert ran.run.abort is not None
    assert ran.run.abort.reason.startswith("MemAvailable ")
    assert "alone" not in ran.run.abort.reason
    assert ran.run.abort.available_bytes < 1.5 * GIB


def test_a_rehearsal_needs_the_engines_process(start_engine: Start, memguard: Memguard) -> None:
    """Where it is not to be seen nothing is measured, and the message says what to do."""
    engine = start_engine()
    with pytest.raises(
        MemguardError, match=r"and no SGLang server for port .* start the engine with --launch, or leave"
    ):
        memguard(engine, 1_000, headroom_bytes=GIB, own_memory=True)
    assert not engine.prompts


def test_the_same_ramp_passes_with_a_budget(start_engine: Start, memguard: Memguard) -> None:
    """Two runs share a report: the static one trips, the other passes, side by side in tables and in every plot."""
    static = memguard(start_engine(), 4_000, 20_000, headroom_bytes=5 * GIB, label="static")
    both = memguard(
        start_engine(budget=8_000_000),
        4_000,
        20_000,
        headroom_bytes=5 * GIB,
        label="budget",
        append=static.folder,
        plots=True,
    )
    assert (static.code, both.code) == (2, 0)
    assert [run.label for run in both.runs] == ["static", "budget"]
    assert "## Side by side" in both.report
    assert "static: verdict" in both.report
    plots = ["chunk-by-prefix.png", "chunks-over-time.png", "memory.png", "tokens-per-second.png"]
    assert sorted(path.name for path in both.folder.glob("*.png")) == plots
    for plot in plots:
        assert f"({plot})" in both.report
        assert (both.folder / plot).read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in both.folder.glob("*.json*")) == [
        "run-2.json",
        "run.json",
        "samples-2.jsonl",
        "samples.jsonl",
    ]


def test_chunks_from_the_servers_log(start_engine: Start, memguard: Memguard) -> None:
    """Without a trace the server's log tells the same chunk sizes."""
    engine = start_engine(writes_trace=False, writes_log=True, budget=4_000_000)
    ran = memguard(engine, 8_000, server_log=engine.log)
    chunks = ran.run.probes[0].chunks
    assert [chunk.tokens for chunk in chunks] == [chunk_tokens for _, chunk_tokens in schedule(engine, 8_000)]
    assert [chunk.prefix_tokens for chunk in chunks] == [prefix for prefix, _ in schedule(engine, 8_000)]
    assert "Chunk sizes are from the server's log" in ran.report


def schedule(engine: FakeEngine, prompt_tokens: int) -> list[tuple[int, int]]:
    prefix, chunks = 0, []
    while prefix < prompt_tokens:
        tokens = min(engine.chunk_tokens(prefix), prompt_tokens - prefix)
        chunks.append((prefix, tokens))
        prefix += tokens
    return chunks


def test_a_stale_trace_does_not_hide_the_log(start_engine: Start, memguard: Memguard, tmp_path: Path) -> None:
    """A trace that the server does not write is no reason to ignore the log beside it."""
    engine = start_engine(writes_trace=False, writes_log=True)
    (tmp_path / "old.jsonl").write_text('{"t":1,"ms":1,"reqs":[["memguard-2000-aa",0,99]]}\n')
    ran = memguard(engine, 2_000, trace=tmp_path / "old.jsonl", server_log=engine.log)
    assert [chunk.tokens for chunk in ran.run.probes[0].chunks] == [1_000, 1_000]


def test_without_trace_and_log_the_rest_is_measured(start_engine: Start, memguard: Memguard) -> None:
    """No trace: seconds, tokens/s and memory are there all the same, and the report says what is missing."""
    ran = memguard(start_engine(writes_trace=False), 2_000)
    assert ran.code == 0
    assert ran.run.probes[0].tokens_per_s
    assert NO_CHUNKS in ran.report
    assert "No trace: chunk sizes unknown." in ran.report


def test_a_trace_without_the_prompts_is_named(start_engine: Start, memguard: Memguard, tmp_path: Path) -> None:
    """A file that stays silent is the operator's to correct."""
    ran = memguard(start_engine(writes_trace=False), 1_000, trace=tmp_path / "elsewhere.jsonl")
    assert f"No line about the prompts came in {tmp_path / 'elsewhere.jsonl'}." in ran.report


def test_samples_reach_the_disk(start_engine: Start, memguard: Memguard) -> None:
    """Every reading is a line of samples.jsonl, from before the first prompt, in order."""
    ran = memguard(start_engine(), 4_000)
    lines = [json.loads(line) for line in (ran.folder / "samples.jsonl").read_text().splitlines()]
    assert len(lines) == ran.run.samples
    assert lines[0]["t"] < (ran.run.probes[0].start_s or 0)
    assert [line["t"] for line in lines] == sorted(line["t"] for line in lines)
    assert min(line["mem_available_bytes"] for line in lines) == ran.run.probes[0].low_water_bytes


def test_the_report_names_engine_settings_and_machine(start_engine: Start, memguard: Memguard) -> None:
    """Version, model, the flags that matter, DynChunk's state, kernel, CPUs, the exact command."""
    ran = memguard(start_engine(budget=4_000_000), 1_000)
    for text in (
        "SGLang 0.5.23",
        "fake-model",
        "`chunked_prefill_size` | `1000`",
        "`context_length` | `131072`",
        "budget 4,000,000 token^2",
        "- applied: `trace` (",
        "| kernel | Linux",
        f"| CPUs | {os.cpu_count()} |",
        "| command | `memguard` |",
    ):
        assert text in ran.report
    assert "reference platform" not in ran.report


def test_a_trace_that_breaks_off_is_not_taken_for_whole(start_engine: Start, memguard: Memguard) -> None:
    """The engine stops writing its trace in the middle: row, report and terminal say how much is missing."""
    engine = start_engine()
    write_lines = engine._write_lines
    engine._write_lines = lambda rid, at_s, prefix, tokens: prefix < 3_000 and write_lines(rid, at_s, prefix, tokens)
    ran = memguard(engine, 8_000, trace=engine.trace)
    assert ran.code == 0
    for text in (ran.report, ran.shown):
        assert "3 of 1,000 (3,000 of 8,000 tokens)" in text
    assert "The trace covers only 3,000 of 8,000 tokens" in ran.report


def test_a_proxy_of_the_environment_is_not_asked(
    start_engine: Start, memguard: Memguard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server is on this machine, or on the next: a proxy for the outside is none of its business."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert memguard(start_engine(), 1_000).code == 0


def test_a_stock_engine_is_called_one(start_engine: Start, memguard: Memguard) -> None:
    """Without DynChunk's state in /server_info the report says so, and the run is called stock."""
    ran = memguard(start_engine(), 1_000)
    assert ran.run.label == "stock"
    assert "stock engine, DynChunk not active" in ran.report


def test_figures_of_the_reference_platform_say_so(start_engine: Start, memguard: Memguard) -> None:
    """On the CPU reference platform the report's head says that nothing here is a GPU's."""
    ran = memguard(start_engine(info={"attention_backend": "dynchunk_reference"}), 1_000)
    head = ran.report.split("##")[0]
    assert "not of a GPU" in head
    assert "CPU reference platform" in head


def test_nobody_there(start_engine: Start, memguard: Memguard, tmp_path: Path) -> None:
    """No server: the address and the cure, exit code 1, and no folder is made."""
    engine = start_engine()
    engine.stop()
    with pytest.raises(ServerGoneError, match=f"no server answers at {engine.url}.*--url") as caught:
        memguard(engine, 1_000)
    assert caught.value.exit_code == 1
    assert not (tmp_path / "logs").exists()


def test_a_wrong_key(start_engine: Start, memguard: Memguard) -> None:
    """401: the cure names API_KEY and --api-key, and the key that was tried is not repeated."""
    with pytest.raises(WrongKeyError, match="API_KEY or with --api-key") as caught:
        memguard(start_engine(api_key=KEY), 1_000, api_key="wrong-key")
    assert "wrong-key" not in str(caught.value)


def test_a_key_that_may_not_abort(start_engine: Start, memguard: Memguard) -> None:
    """Where the guard could not abort, nothing is sent: this is found out before the first prompt."""
    engine = start_engine(api_key=KEY, abort_key="admin")
    with pytest.raises(WrongKeyError, match="/abort_request"):
        memguard(engine, 1_000, api_key=KEY)
    assert not engine.prompts


def test_the_key_is_nowhere(start_engine: Start, memguard: Memguard) -> None:
    """No file of the report and no line on the terminal holds the key, though the engine itself tells it."""
    ran = memguard(start_engine(api_key=KEY), 1_000, api_key=KEY)
    assert ran.code == 0
    assert KEY not in ran.shown
    for path in ran.folder.iterdir():
        assert KEY.encode() not in path.read_bytes()


def test_a_prompt_above_the_context(start_engine: Start, memguard: Memguard) -> None:
    """It is refused with both numbers and never sent; the other sizes run, and the exit code is 1."""
    engine = start_engine(context=4_096)
    ran = memguard(engine, 2_000, 4_096, 5_000)
    assert ran.code == 1
    assert [probe.verdict for probe in ran.run.probes] == [Verdict.PASSED, Verdict.REFUSED, Verdict.REFUSED]
    assert "above the context length of 4,096, which takes prompts of up to 4,095 tokens" in ran.report
    assert [len(prompt) for prompt in engine.prompts] == [2_000]


def test_a_context_that_only_the_model_list_tells(start_engine: Start, memguard: Memguard) -> None:
    """A server that was started without a context length says it at /v1/models."""
    ran = memguard(start_engine(context=None), 2_000, 5_000)
    assert ran.run.probes[1].verdict is Verdict.REFUSED


def test_a_cache_smaller_than_the_context_is_named(start_engine: Start, memguard: Memguard) -> None:
    """What binds is said: here the KV cache, not the context length."""
    info = {"max_req_input_len": 3_000, "max_total_num_tokens": 3_006}
    ran = memguard(start_engine(info=info), 2_000, 5_000)
    assert "above the KV cache of 3,006 tokens, which takes prompts of up to 2,999 tokens" in ran.report


def test_a_server_that_dies(start_engine: Start, memguard: Memguard) -> None:
    """The connection breaks in the middle of a prompt: exit code 1, and all sizes before it are in the report."""
    ran = memguard(start_engine(dies_at_tokens=3_000), 2_000, 8_000, 16_000)
    assert ran.code == 1
    assert [probe.verdict for probe in ran.run.probes] == [Verdict.PASSED, Verdict.FAILED, Verdict.NOT_RUN]
    assert "the connection to" in ran.report
    assert "broke" in ran.shown


def test_a_prompt_that_takes_too_long(start_engine: Start, memguard: Memguard) -> None:
    """After --timeout the request is aborted, larger sizes are not sent, exit code 1."""
    engine = start_engine(stalls_at_tokens=0)
    ran = memguard(engine, 1_000, 20_000, timeout_s=0.2)
    assert ran.code == 1
    assert [probe.verdict for probe in ran.run.probes] == [Verdict.TIMED_OUT, Verdict.NOT_RUN]
    assert ran.run.probes[0].rid in aborted_rids(engine)
    assert "--timeout gives it longer" in ran.report


def test_memory_that_does_not_come_back(start_engine: Start, memguard: Memguard) -> None:
    """After the abort the wait is bounded, and 'not recovered' is said with the numbers."""
    ran = memguard(start_engine(leaks=True), 30_000, around={"recovery_s": 0.4})
    assert ran.code == 2
    assert ran.run.abort is not None
    assert not ran.run.abort.recovered
    assert "Memory not recovered" in ran.report
    assert "not recovered" in ran.shown


def test_a_request_that_does_not_end(start_engine: Start, memguard: Memguard, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that ignores the abort is given up after a bounded wait; the report says that it did not end."""
    monkeypatch.setitem(Guard.__init__.__kwdefaults__, "repeat_s", 0.01)
    engine = start_engine(hears_aborts=False, stalls_at_tokens=20_000)
    ran = memguard(engine, 60_000, around={"abort_wait_s": 1.0})
    assert ran.code == 2
    assert "The request did not end" in ran.report
    assert len(aborted_rids(engine)) > 1


def test_less_memory_than_the_guard_from_the_start(start_engine: Start, memguard: Memguard) -> None:
    """Nothing is sent, and the report says why."""
    engine = start_engine(available_gib=1.0)
    ran = memguard(engine, 1_000)
    assert ran.code == 1
    assert not engine.prompts
    assert "nothing was sent" in ran.report


def test_a_size_that_would_cross_the_guard_is_not_tried(start_engine: Start, memguard: Memguard) -> None:
    """Two sizes show the slope; a third that leads below the guard ends the ramp before it is sent. Exit code 2."""
    engine = start_engine()
    ran = memguard(engine, 4_000, 8_000, 30_000, 60_000)
    assert ran.code == 2
    assert ran.run.outcome is Outcome.PROJECTED
    assert [len(prompt) for prompt in engine.prompts] == [4_000, 8_000]
    verdicts = [probe.verdict for probe in ran.run.probes]
    assert verdicts == [Verdict.PASSED, Verdict.PASSED, Verdict.PROJECTED, Verdict.NOT_RUN]
    assert not aborted_rids(engine)
    for text in (ran.shown, ran.report):
        assert "the sizes before lead to MemAvailable 0.00 GiB, the guard is at 2.00 GiB" in text


def test_a_projection_can_be_passed(start_engine: Start, memguard: Memguard) -> None:
    """Where the guard shall be seen tripping, the size is announced and tried."""
    engine = start_engine()
    ran = memguard(engine, 4_000, 8_000, 30_000, past_projection=True)
    assert ran.code == 2
    assert ran.run.outcome is Outcome.GUARD
    assert len(engine.prompts) == 3
    assert "30,000 tokens: the sizes before lead to MemAvailable 0.00 GiB" in ran.shown


def test_a_size_that_was_aborted_is_not_tried_again(start_engine: Start, memguard: Memguard) -> None:
    """With the very same chunk neither it nor a larger one; with a smaller chunk it is."""
    first = memguard(start_engine(), 2_000, 30_000)
    engine = start_engine()
    again = memguard(engine, 2_000, 30_000, 40_000, append=first.folder)
    assert again.code == 1
    assert [probe.verdict for probe in again.run.probes] == [Verdict.PASSED, Verdict.REFUSED, Verdict.REFUSED]
    assert "30,000 tokens were ended by the guard before with this very chunk" in again.report
    assert [len(prompt) for prompt in engine.prompts] == [2_000]
    other = start_engine(static_tokens=400)
    assert memguard(other, 2_000, 30_000, append=first.folder).code == 0
    assert [len(prompt) for prompt in other.prompts] == [2_000, 30_000]


def test_reports_are_never_overwritten(start_engine: Start, memguard: Memguard, tmp_path: Path) -> None:
    """A folder of the day that exists gets a sister with -2, then -3."""
    engine = start_engine()
    folders = [memguard(engine, 1_000).folder for _ in range(3)]
    base = folders[0].name
    assert [folder.name for folder in folders] == [base, f"{base}-2", f"{base}-3"]


def test_out_wants_an_empty_folder(start_engine: Start, memguard: Memguard, tmp_path: Path) -> None:
    """--out makes a new folder or takes an empty one; one with files in it is refused with the way to add to it."""
    out = tmp_path / "mine"
    assert memguard(start_engine(), 1_000, out=out).code == 0
    with pytest.raises(RecordError, match="--append"):
        memguard(start_engine(), 1_000, out=out)


def test_append_wants_a_report(start_engine: Start, memguard: Memguard, tmp_path: Path) -> None:
    """A folder without a run is refused."""
    with pytest.raises(RecordError, match=r"holds no run\.json"):
        memguard(start_engine(), 1_000, append=tmp_path)


def test_two_machines_do_not_share_a_report(start_engine: Start, memguard: Memguard) -> None:
    """A verdict holds for one machine: a run of another one is not put beside it."""
    ran = memguard(start_engine(), 1_000)
    values = json.loads((ran.folder / "run.json").read_text())
    values["machine"]["machine_id"] = "another"
    (ran.folder / "run.json").write_text(json.dumps(values))
    with pytest.raises(MemguardError, match="another machine"):
        memguard(start_engine(), 1_000, append=ran.folder)


def test_labels_stay_apart(start_engine: Start, memguard: Memguard) -> None:
    """Two runs of one name in one report are told apart."""
    ran = memguard(start_engine(), 1_000)
    again = memguard(start_engine(), 1_000, append=ran.folder)
    assert [run.label for run in again.runs] == ["stock", "stock-2"]


def test_an_edited_report_is_kept(start_engine: Start, memguard: Memguard) -> None:
    """What somebody wrote into REPORT.md survives the next run; an unedited one is simply drawn again."""
    ran = memguard(start_engine(), 1_000)
    memguard(start_engine(), 1_000, append=ran.folder)
    assert not list(ran.folder.glob("REPORT.edited*"))
    edited = ran.report + "my own words"
    (ran.folder / "REPORT.md").write_text(edited)
    last = memguard(start_engine(), 1_000, append=ran.folder)
    assert (ran.folder / "REPORT.edited-1.md").read_text() == edited
    assert "kept as REPORT.edited-1.md" in last.shown


def test_without_matplotlib(start_engine: Start, memguard: Memguard, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything but the plots is there, and report and terminal say how to draw them later."""
    engine = start_engine()
    monkeypatch.delattr("scripts.verify.figures")
    monkeypatch.setitem(sys.modules, "scripts.verify.figures", None)  # importing it fails now
    ran = publish_only(engine, memguard)
    for text in (ran.report, ran.shown):
        assert "matplotlib cannot be imported" in text
        assert "python -m pip install matplotlib" in text
        assert "python -m scripts.verify.plots FOLDER" in text
    assert ran.code == 0
    assert not list(ran.folder.glob("*.png"))


def publish_only(engine: FakeEngine, memguard: Memguard) -> Ran:
    return memguard(engine, 1_000, plots=None)


def test_plots_that_cannot_be_written_cost_only_the_plots(
    start_engine: Start, memguard: Memguard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that fills up with the plots leaves a report without them."""
    ran = memguard(start_engine(), 1_000)

    def full(*_: object) -> list[str]:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("scripts.verify.figures.draw", full)
    published = publishing.publish(ran.folder)
    assert published.plot_files == []
    assert "No space left on device" in ran.report


def test_a_fault_of_its_own_leaves_no_request_behind(
    start_engine: Start, memguard: Memguard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error in memguard itself aborts the request, keeps what was measured and shows where it happened."""
    engine = start_engine()

    def broken(*_: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr("scripts.verify.chunks.seconds_left", broken)
    ran = memguard(engine, 20_000)
    assert ran.code == 1
    assert set(aborted_rids(engine)) == {ran.run.probes[0].rid}
    assert "memguard itself failed: ZeroDivisionError: a bug." in ran.report
    assert "Traceback" in ran.shown


PROGRAM = """
import functools, sys
from pathlib import Path
from scripts.verify import memguard, options, session
from tests.verify.counted_host import CountedHost
session.Host = CountedHost
memguard.Surroundings = functools.partial(
    options.Surroundings, logs=Path(sys.argv.pop(1)), proc=Path(sys.argv.pop(1)), kmsg=Path("none"),
    sample_interval_s=0.01, baseline_s=0.08, tick_s=0.02, recovery_s=60, hold_ground=lambda: False,
)
memguard.main()
"""


def start_program(engine: FakeEngine, logs: Path, *arguments: str) -> subprocess.Popen[str]:
    """The program as a process of its own, with its exit code and its signals."""
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(logs), str(engine.folder), "--url", engine.url, *arguments],
        cwd=ROOT,
        env=clean_environ(PYTHONPATH=f"{ROOT}/adapter:{ROOT}", PYTHONDONTWRITEBYTECODE="1", COLUMNS="200"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_aborts_and_keeps_what_was_measured(start_engine: Start, tmp_path: Path, sent: signal.Signals) -> None:
    """Ctrl-C, and being told to end: the request in flight is aborted, the report is written, exit code 130."""
    engine = start_engine(stalls_at_tokens=5_000)
    process = start_program(engine, tmp_path / "logs", "--sizes", "1k,60k")
    assert until(lambda: len(engine.prompts) == 2)
    process.send_signal(sent)
    output, _ = process.communicate(timeout=AT_MOST_S)
    assert process.returncode == 130, output
    folder = next((tmp_path / "logs").iterdir())
    values = json.loads((folder / "run.json").read_text())
    assert [probe["verdict"] for probe in values["probes"]] == ["passed", "interrupted"]
    assert set(aborted_rids(engine)) == {values["probes"][1]["rid"]}
    assert "interrupted" in (folder / "REPORT.md").read_text()


def test_a_full_disk(start_engine: Start, tmp_path: Path) -> None:
    """The readings stop fitting in the middle of a prompt: it is aborted, the error names file and cure, exit code 1,
    and what was measured until then is in the report.
    """
    engine = start_engine(bytes_per_pair=1, stalls_at_tokens=5_000)
    process = start_program(engine, tmp_path / "logs", "--sizes", "1k,100k")
    assert until(lambda: len(engine.prompts) == 2)
    [readings] = (tmp_path / "logs").glob("*/samples.jsonl")
    limit_bytes = max(16_000, readings.stat().st_size + 500)  # for one file: the report fits, more readings do not
    # (Python writes no compiled modules: they would end at the limit, for every program after this.)
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes))
    output, _ = process.communicate(timeout=AT_MOST_S)
    assert process.returncode == 1, output
    assert "samples.jsonl: File too large; make room there or name another folder with --out" in output
    folder = next((tmp_path / "logs").iterdir())
    values = json.loads((folder / "run.json").read_text())
    assert [probe["verdict"] for probe in values["probes"]] == ["passed", "failed"]
    assert aborted_rids(engine)
    assert "File too large" in (folder / "REPORT.md").read_text()


def test_the_guards_exit_code_is_the_programs(start_engine: Start, tmp_path: Path) -> None:
    """The process ends with 2 when the guard tripped, whatever is found in the environment."""
    process = start_program(start_engine(), tmp_path / "logs", "--sizes", "30k", "--guard-gib", "2")
    output, _ = process.communicate(timeout=AT_MOST_S)
    assert process.returncode == 2, output
    assert "below the guard of 2.00 GiB" in output
    assert "the server is asked to abort memguard-30000-" in output
