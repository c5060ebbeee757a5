"""`./dynchunk plan`: what it counts, what it says, and what it refuses."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from dynchunk.policy import latency
from tests.conftest import ROOT
from tests.launcher.conftest import dynchunk, within

# ROCm/ATOM pull request 2007 and its guide: Kimi-K2.5-MXFP4, pipeline of 4, prompts of 131,072 tokens, one at a time.
KIMI = ("--model", "a=3.25e-07,b=6.03e-03,c=26.1,gamma=5.39e-04")
PROMPT = ("--prompt", "131072")
AMPLE = ("--budget", "1e15")


def run(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return within("plan", *words, **environ)


def planned(*words: str, **environ: str) -> dict[str, Any]:
    done = run("--json", *words, **environ)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_a_cached_prefix_is_counted_in_whole_pages() -> None:
    """As a cache holds it: the chunks behind an odd number would not be those that run."""
    odd, whole = (planned("--prompt", "200k", "--cached", cached) for cached in ("1000", "960"))
    assert odd["chunks"] == whole["chunks"]
    assert odd["cached_tokens"] == 960
    assert "--cached 1,000 is counted as 960: whole pages of 64" in odd["notes"]


def test_the_shape_of_the_data() -> None:
    """Chunks, bands and totals as documented; bands are the chunks, and null stands for what is not known."""
    data = planned("--prompt", "200k")
    assert {"chunks", "bands", "total_ms", "makespan_ms", "floor_exceeds_budget_from"} <= data.keys()
    assert data["total_ms"] is data["makespan_ms"] is data["floor_exceeds_budget_from"] is None
    assert all(set(one) == {"prefix", "tokens", "transient_bytes", "ms"} for one in data["chunks"])
    assert all(one["transient_bytes"] is one["ms"] is None for one in data["chunks"])
    prefix = 0
    for one in data["chunks"]:
        assert one["prefix"] == prefix
        prefix += one["tokens"]
    assert prefix == 200_000
    assert sum(band["chunks"] for band in data["bands"]) == len(data["chunks"])
    assert sum(band["chunks"] * band["tokens"] for band in data["bands"]) == 200_000


def test_the_ladder_of_a_known_budget() -> None:
    """In pages of 256, the sizes that 2.0e8 gives at known prefixes."""
    data = planned("--budget", "2e8", "--page", "256", "--prompt", "1M")
    sizes = {one["prefix"]: one["tokens"] for one in data["chunks"]}
    assert sizes[0] == sizes[96_256] == 2048
    assert sizes[98_304] == 1792
    assert data["floor_exceeds_budget_from"] == 781_251
    assert data["chunks"][-1]["tokens"] < 256


@pytest.mark.parametrize(("size", "measured_ms"), [(16_384, 11_459), (8192, 10_121)])
def test_against_published_measurements(size: int, measured_ms: float) -> None:
    """Fixed chunks on four stages are within 6 % of what was measured."""
    data = planned(*KIMI, *PROMPT, *AMPLE, "--pp", "4", "--max", str(size))
    assert {one["tokens"] for one in data["chunks"]} == {size}
    assert data["makespan_ms"] == pytest.approx(measured_ms, rel=0.06)
    assert data["total_ms"] == pytest.approx(sum(one["ms"] for one in data["chunks"]))


def test_times_are_given_in_every_mode() -> None:
    """A model gives times whatever chunks are sized for, and `pipeline` is through first."""
    shared = (*KIMI, *PROMPT, *AMPLE, "--pp", "4", "--max", "32768")
    spans = {mode: planned(*shared, "--latency", mode)["makespan_ms"] for mode in ("off", "equal", "pipeline", "300ms")}
    assert all(spans.values())
    assert min(spans, key=spans.__getitem__) == "pipeline"


def test_equal_takes_equal_time() -> None:
    """The published ladder: 13 chunks of 572 ms, the last one shorter."""
    data = planned(*KIMI, *PROMPT, *AMPLE, "--max", "32768", "--min", "4096", "--latency", "equal")
    assert [one["tokens"] for one in data["chunks"]][:6] == [32_768, 16_192, 12_416, 10_368, 9088, 8192]
    assert len(data["chunks"]) == 13
    assert all(one["ms"] == pytest.approx(572, rel=0.01) for one in data["chunks"][:-1])


def test_the_worked_example() -> None:
    """First 2,048, then what takes as long: 896. Beyond 67,788 nothing can, and chunks are fixed again."""
    model = ("--model", "a=2.5e-5,b=0.015,c=3,gamma=0.002")
    words = ("--base", "2048", "--align", "64", "--min", "64", "--latency", "equal", "--prompt", "80000")
    data = planned(*model, *words, "--budget", "1e12")
    assert [one["tokens"] for one in data["chunks"][:2]] == [2048, 896]
    assert all(one["tokens"] == 2048 for one in data["chunks"] if 67_788 < one["prefix"] < 77_000)


def test_a_promised_time_is_kept() -> None:
    """No chunk above the floor takes longer than the time that was asked for."""
    data = planned(*KIMI, *PROMPT, *AMPLE, "--max", "32768", "--latency", "200ms")
    assert all(one["ms"] <= 200 for one in data["chunks"] if one["tokens"] > 256)
    assert max(one["ms"] for one in data["chunks"]) > 190


def test_memory_and_latency_both_count() -> None:
    """The smaller of both runs: memory is used up in some chunks, the time in others, and neither is exceeded."""
    chunks = planned(*KIMI, "--max", "16384", "--prompt", "200k", "--latency", "214ms")["chunks"]
    products, times = [one["tokens"] * one["prefix"] for one in chunks], [one["ms"] for one in chunks]
    assert 1.97e8 < max(products) <= 2e8
    assert 210 < max(times) <= 214
    assert any(one["tokens"] * one["prefix"] < 1.8e8 and one["ms"] > 212 for one in chunks[1:])


def test_the_environment_of_serve_counts() -> None:
    """What is not a flag comes from the variables that serve reads; a flag wins."""
    environ = {
        "DYNCHUNK_BUDGET": "1e8",
        "CHUNKED_PREFILL_SIZE": "4096",
        "CONTEXT_LENGTH": "100000",
        "PP_SIZE": "2",
        "DYNCHUNK_RULE": "sequence",
        "MODEL_PATH": "",
    }
    data = planned(**environ)
    assert data["prompt_tokens"] == 100_000
    assert data["budget"] == 100_000_000
    assert data["stages"] == 2
    assert data["chunks"][0]["tokens"] == 4096
    assert all(one["tokens"] * (one["prefix"] + one["tokens"]) <= 1e8 for one in data["chunks"])
    assert planned("--budget", "5e7", **environ)["budget"] == 50_000_000


def test_a_larger_chunk_than_the_environment_says() -> None:
    """--max above CHUNKED_PREFILL_SIZE plans with both raised."""
    assert planned("--max", "8192", *AMPLE, "--prompt", "20k")["chunks"][0]["tokens"] == 8192


def test_a_saved_model_counts(tmp_path: Path) -> None:
    """DYNCHUNK_MODEL_FILE gives the times where a model has been learned; nothing where it has not."""
    kept = tmp_path / "model.json"
    model = latency.from_ms(a=1e-6, b=0.01, c=5, gamma=0)
    whose = {"engine": "0.5.23", "model": "/models/a", "device": "NVIDIA GB10"}
    kept.write_text(json.dumps({"belongs_to": whose, "ticks": vars(model)}))
    assert planned("--prompt", "10k", DYNCHUNK_MODEL_FILE=str(kept))["chunks"][0]["ms"] == pytest.approx(29.674304)
    learned_on = "engine '0.5.23', model '/models/a', device 'NVIDIA GB10'"
    for environ in ({}, {"MODEL_PATH": "/models/a"}):
        found = planned("--prompt", "10k", DYNCHUNK_MODEL_FILE=str(kept), **environ)
        assert found["total_ms"]
        assert found["notes"] == [f"times are those of DYNCHUNK_MODEL_FILE={kept}, learned on {learned_on}"]
    found = planned("--prompt", "10k", DYNCHUNK_MODEL_FILE=str(kept), MODEL_PATH="/models/b")
    assert found["total_ms"] is None
    assert "is left out: its times are of model '/models/a', and MODEL_PATH is /models/b" in found["notes"][0]
    assert planned("--prompt", "10k", *KIMI, DYNCHUNK_MODEL_FILE=str(kept))["notes"] == []
    for useless in (
        "{}",
        "null",
        '{"ticks": {"a": 1e999, "b": 0, "c": 0, "gamma": 0}}',
        json.dumps({"belongs_to": {}, "ticks": {"a": 10**300}}),
        json.dumps({"belongs_to": None, "ticks": vars(model)}),
    ):
        kept.write_text(useless)
        assert planned("--prompt", "10k", DYNCHUNK_MODEL_FILE=str(kept))["total_ms"] is None


def test_a_mode_without_its_model() -> None:
    """In the environment it is left out and said; as a flag it is an error."""
    done = run("--prompt", "10k", DYNCHUNK_LATENCY="equal")
    assert done.returncode == 0
    assert "note: DYNCHUNK_LATENCY=equal is left out" in done.stdout
    done = run("--latency", "equal")
    assert done.returncode == 2
    assert "--model a=..,b=..,c=..,gamma=.." in done.stderr


def test_memory_by_path() -> None:
    """The dense path of V4.1 before tiling: 16,384 rows at 487,936 tokens do not fit into 50 GB."""
    words = ["--path", "v41-dense", *AMPLE, "--min", "16384", "--max", "16384"]
    words += ["--cached", "471552", "--prompt", "487936"]
    assert planned(*words)["chunks"][0]["transient_bytes"] == 6 * 16_384 * 487_936
    shown = run(*words, "--headroom", "46.57").stdout
    assert "logits 29.78 GiB, mask 7.45 GiB" in shown
    assert "will not fit into 46.57 GiB" in shown
    assert "fits into 80.00 GiB" in run(*words, "--headroom", "80").stdout


def test_memory_measured(tmp_path: Path) -> None:
    """Measured bytes count instead of the path's, given or from a report."""
    words = ("--prompt", "2048", "--path", "v4")
    assert planned(*words, "--bytes", "12.5")["chunks"][0]["transient_bytes"] == 12.5 * 2048 * 2048
    report = tmp_path / "run.json"
    fit = {"kind": "line", "bytes_per_pair": 10.0, "base_bytes": 1000}
    report.write_text(json.dumps({"coefficient": fit}))
    assert planned(*words, "--report", str(report))["chunks"][0]["transient_bytes"] == 10 * 2048 * 2048 + 1000
    found = planned("--prompt", "2048", DYNCHUNK_REPORT=str(report))
    assert found["chunks"][0]["transient_bytes"] == 10 * 2048 * 2048 + 1000
    assert found["reserved_bytes"]["without_a_remedy"] >= found["peak_transient_bytes"]
    assert planned(*words, DYNCHUNK_REPORT=str(report))["chunks"][0]["transient_bytes"] == 2048 * 2048


LINE = '"kind": "line", "base_bytes": 0'


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "there is no such file"),
        ("", "it is no JSON; name a run.json"),
        ("[" * 100_000, "it is no JSON"),
        ("null", "it is no report"),
        ("{}", "it is of an older version or of a stock engine; run memguard again"),
        ('{"coefficient": null}', "run memguard again"),
        ('{"coefficient": {"kind": "steps"}}', "follows no line (steps)"),
        (f'{{"coefficient": {{{LINE}}}}}', "None: not a number"),
        (f'{{"coefficient": {{{LINE}, "bytes_per_pair": 1e999}}}}', "inf: not a number"),
        (f'{{"coefficient": {{{LINE}, "bytes_per_pair": -10}}}}', "-10: not a number"),
        ('{"coefficient": {"kind": "line", "base_bytes": -100000000000, "bytes_per_pair": 1}}', "not a number"),
    ],
)
def test_a_report_of_no_use(tmp_path: Path, content: str | None, said: str) -> None:
    """As a flag it is refused; DYNCHUNK_REPORT, whose path may be the container's, is left out and said."""
    report = tmp_path / "run.json"
    if content is not None:
        report.write_text(content)
    done = run("--report", str(report))
    assert done.returncode == 2
    assert said in done.stderr
    done = run("--prompt", "2048", DYNCHUNK_REPORT=str(report))
    assert done.returncode == 0, done.stderr
    assert said in done.stdout
    assert "memory: not known" in done.stdout


def test_a_report_that_is_a_folder(tmp_path: Path) -> None:
    """Its run.json is named, where it has one."""
    assert "it is a folder; name the run.json" in run("--report", str(tmp_path)).stderr
    (tmp_path / "run.json").write_text("{}")
    assert f"name its run.json: {tmp_path / 'run.json'}" in run("--report", str(tmp_path)).stderr


def test_the_reserve_beside_what_is_live() -> None:
    """V4.1's tiles at 262,144 keys: 256 MiB of scores, 538 MiB beside them; without a remedy the scores' part grows."""
    words = ("--prompt", "262144", "--path", "v41", *AMPLE)
    data = planned(*words, "--min", "2048", "--max", "2048")
    live, found = data["peak_transient_bytes"], data["reserved_bytes"]
    assert live / 2**20 == pytest.approx(640 + 0.3 * 2048 * 262_144 / 2**20, abs=0.1)
    for kind in ("gpu_memory_is_host_memory", "gpu_with_memory_of_its_own"):
        assert 0 <= (found[kind] - live) / 2**20 <= 4  # segments are whole steps, and a small one stands beside
    assert 1.8 < (found["without_a_remedy"] - live) / 2**30 < 2.0  # 2.1 GiB of scores, of which 256 MiB are live
    shown = run(*words, DYNCHUNK_EMPTY_CACHE="low", DYNCHUNK_PRIME_CACHE="off").stdout
    assert "where GPU memory is host memory (released when memory is low)" in shown
    assert planned("--prompt", "2048")["reserved_bytes"] == {}


def test_the_reserve_of_a_long_context() -> None:
    """8,192 rows on 991,808 keys of V4 hold 2.5 GiB, most of it beside the tiles; no less is reserved."""
    words = ("--prompt", "1M", "--path", "v4", "--max", "8192", *AMPLE, "--cached", "991808")
    data = planned(*words)
    assert data["peak_transient_bytes"] / 2**30 == pytest.approx(2.54, abs=0.01)
    assert min(data["reserved_bytes"].values()) >= data["peak_transient_bytes"]


def test_ranks_that_share_the_rows() -> None:
    """Under context parallelism a rank holds its share; what was measured is left alone. Both are said."""
    words = ("--prompt", "512000", "--path", "v41-dev")
    shared = {"EXTRA_ARGS": "--enable-prefill-cp --attn-cp-size 4"}
    alone, one = planned(*words), planned(*words, **shared)
    assert one["chunks"][0]["transient_bytes"] * 4 == alone["chunks"][0]["transient_bytes"]
    assert "the rows of a chunk are divided by 4" in one["notes"][0]
    measured = ("--prompt", "512000", "--bytes", "12")
    assert planned(*measured, **shared)["chunks"] == planned(*measured)["chunks"]
    fitting = planned(*words, "--max-budget-for", "2", **shared)
    assert fitting["peak_transient_bytes"] <= 2 * 2**30 * 0.85
    assert fitting["max_budget"] > 3 * planned(*words, "--max-budget-for", "2.1")["max_budget"]


def test_ranks_that_share_the_chunk() -> None:
    """Under data-parallel attention a rank's chunk is its share, and --max is a rank's."""
    shared = {"EXTRA_ARGS": "--enable-dp-attention --dp-size 4", "CHUNKED_PREFILL_SIZE": "4096"}
    data = planned("--prompt", "20k", **shared)
    assert data["chunks"][0]["tokens"] == 1024
    assert "4,096 on 4 data-parallel ranks is 1,024" in data["notes"][0]
    assert planned("--prompt", "20k", "--max", "2048", **shared)["chunks"][0]["tokens"] == 2048
    done = run("--prompt", "20k", **(shared | {"CHUNKED_PREFILL_SIZE": "3"}))
    assert "CHUNKED_PREFILL_SIZE=3 leaves no token to a data-parallel rank" in done.stderr


def test_the_model_of_the_environment(tmp_path: Path) -> None:
    """Its own longest context, its path and its page are what serve and doctor go by as well."""
    v4 = {"model_type": "deepseek_v4", "architectures": ["DeepseekV4"], "compress_ratios": [4]}
    (tmp_path / "config.json").write_text(json.dumps(v4 | {"max_position_embeddings": 100_000}))
    data = planned(MODEL_PATH=str(tmp_path))
    assert data["prompt_tokens"] == 100_000
    assert {one["tokens"] % 256 for one in data["chunks"][:-1]} == {0}
    assert data["peak_transient_bytes"] == planned("--path", "v4", MODEL_PATH=str(tmp_path))["peak_transient_bytes"]
    assert "--path v4, by the model's config.json" in data["notes"][0]
    assert planned("--prompt", "200k", MODEL_PATH=str(tmp_path))["prompt_tokens"] == 200_000
    done = run(MODEL_PATH=str(tmp_path), CONTEXT_LENGTH="200000")
    assert "above the 100,000 that the model's config.json says" in done.stdout


def test_the_budget_that_fits() -> None:
    """The plan with it stays within 85 % of the headroom, and one with a hundredth more does not."""
    words = ("--path", "v41-dev", "--prompt", "500k")
    data = planned(*words, "--max-budget-for", "2.7")
    usable = 2.7 * 2**30 * 0.85
    assert data["max_budget"] == data["budget"]
    assert 1.5e8 < data["max_budget"] < 2e8
    assert data["peak_transient_bytes"] <= usable
    assert f"DYNCHUNK_BUDGET={data['max_budget'] // 10**6}M\n" in run(*words, "--max-budget-for", "2.7").stdout
    more = str(int(data["max_budget"] * 1.02))
    assert planned(*words, "--budget", more)["peak_transient_bytes"] > usable


def test_a_large_budget_is_printed_to_the_million() -> None:
    """It is there to be copied: rounded up, it would be above what fits."""
    words = ("--bytes", "0.01", "--prompt", "10M", "--max", "1000000", "--max-budget-for", "59")
    found = planned(*words)["max_budget"]
    assert found > 10**12
    assert found % 10**7
    assert run(*words).stdout.startswith(f"budget: {found:,} token^2 fit; DYNCHUNK_BUDGET={found // 10**6}M\n")


def test_no_budget_fits() -> None:
    """Where the smallest chunks are too large already, it says which and what to do."""
    done = run("--path", "v41-dev", "--max-budget-for", "0.01")
    assert done.returncode == 2
    assert "chunks of 256" in done.stderr
    assert "DYNCHUNK_CHUNK_MIN" in done.stderr
    # 1.77 GiB are below 2, and above the 85 % of it.
    done = run("--path", "v41-dev", "--prompt", "512000", "--max-budget-for", "2")
    assert "hold 1.77 GiB; 1.7 GiB of what is free are to be used, 15 % are left" in done.stderr


def test_the_price_of_a_fixed_chunk() -> None:
    """The fixed chunk with the same peak is found, and needs longer."""
    data = planned(*KIMI, "--path", "v41-dev", "--prompt", "400k")
    other = data["fixed_with_same_peak"]
    assert other["tokens"] == 448
    assert other["chunks"] == -(-400_000 // 448)
    assert other["total_ms"] > data["total_ms"]


def test_measured_rates() -> None:
    """389 tokens/s at 256 and 594 at 1,024: a chunk of 256 has 0.65 of the rate, sizes between lie on a line."""
    data = planned("--rates", "256=389,1024=594", "--max", "1024", "--prompt", "600k")
    each = {one["tokens"]: one["ms"] for one in data["chunks"]}
    assert each[1024] == pytest.approx(1024 / 594 * 1000)
    assert each[256] == pytest.approx(256 / 389 * 1000)
    assert each[640] == pytest.approx((each[256] + each[1024]) / 2)
    assert (256 / each[256]) / (1024 / each[1024]) == pytest.approx(0.65, abs=0.01)
    alone = planned("--rates", "1024=500", "--max", "1024", "--prompt", "2048")
    assert alone["total_ms"] == pytest.approx(2048 / 500 * 1000)


def test_several_prompts() -> None:
    """Each has its plan."""
    done = run("--json", "--prompt", "10k", "--prompt", "20k")
    assert [one["prompt_tokens"] for one in json.loads(done.stdout)] == [10_000, 20_000]
    shown = run("--prompt", "10k", "--prompt", "20k").stdout
    assert len(re.findall(r"^a prompt of", shown, re.MULTILINE)) == 2


def test_for_people() -> None:
    """A table that can be read at any length, and a sentence for each conclusion."""
    shown = dynchunk("plan", "--prompt", "1M", "--path", "v41-dev", "--pp", "4", *KIMI).stdout
    table = shown.partition("\nmemory:")[0].splitlines()
    assert len(table) <= 30
    assert "prefix" in shown
    for sentence in (
        "memory: at most 3.46 GiB",
        "until the last one leaves the last of 4 stages",
        "floor: from prefix 781,251 on",
        "times as long",
    ):
        assert sentence in shown


def test_the_drawing(tmp_path: Path) -> None:
    """A PNG is written, of what is known."""
    file = tmp_path / "plan.png"
    done = dynchunk("plan", "--prompt", "300k", "--path", "v4", *KIMI, "--plot", str(file))
    assert done.returncode == 0, done.stderr
    assert file.read_bytes().startswith(b"\x89PNG")
    assert f"drawn: {file}" in done.stdout
    done = run("--plot", str(tmp_path / "no" / "plan.png"))
    assert done.returncode == 2
    assert "--plot" in done.stderr
    assert f"write --plot {tmp_path / 'x.png'}" in run("--plot", str(tmp_path / "x")).stderr
    assert f"write --plot {tmp_path / 'x.png'}" in run("--plot", str(tmp_path / "x.pdf")).stderr
    assert f"a folder; name a file in it: {tmp_path / 'plan.png'}" in run("--plot", str(tmp_path)).stderr
    assert [one.name for one in tmp_path.iterdir()] == ["plan.png"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--budget", "lots"), "DYNCHUNK_BUDGET='lots': not a number"),
        (("--prompt", "0"), "--prompt '0': not from 1"),
        (("--prompt", "100M", "--bytes", "999999"), "--prompt '100M': not from 1 to 10,000,000"),
        (
            ("--prompt", "10M", "--page", "1", "--min", "1", "--max", "1"),
            "a prompt of 10,000,000 tokens comes to more than the 200,000 chunks",
        ),
        (("--latency", "fast"), "not off, equal, pipeline or a time"),
        (("--page", "4352", "--max", "2048"), "a page of 4,352 tokens is larger than the largest chunk"),
        (("--model", "b=1"), "a is missing"),
        (("--model", "a=1,d=1"), "'d' is no coefficient"),
        (("--model", "a=one"), "not NAME=NUMBER"),
        (("--model", "a=0"), "a above 0"),
        (("--model", "a=-1"), "a=-1.0: not a number from 0 to 1,000,000"),
        (("--model", "a=1,b=nan"), "b=nan: not a number"),
        (("--model", "a=1e300,b=1e300"), "a=1e+300: not a number"),
        (("--model", "a=1,a=2"), "a is given twice"),
        (("--rates", "256=0"), "not a rate"),
        (("--rates", "256=1e400"), "not a rate"),
        (("--rates", "256=1,2.56e2=2", "--prompt", "300"), "a chunk of 256 is given twice"),
        (("--rates", "256=1,256=2"), "256 is given twice"),
        (("--path", "warp"), "no such path; accepted: v41-dense"),
        (("--bytes", "-1"), "not bytes for a row and key"),
        (("--bytes", "inf"), "not bytes for a row and key"),
        (("--headroom", "inf"), "--headroom inf: not a number from 0 to 1,000,000 GiB"),
        (("--headroom", "nan"), "--headroom nan: not a number"),
        (("--headroom", "-1"), "--headroom -1.0: not a number"),
        (("--max-budget-for", "inf", "--path", "v4"), "--max-budget-for inf: not a number"),
        (("--max-budget-for", "1e300", "--path", "v4"), "--max-budget-for 1e+300: not a number"),
        (("--cached", "5000", "--prompt", "4000"), "leaves nothing to compute"),
        (("--max-budget-for", "2"), "needs --path, --bytes or --report"),
    ],
)
def test_what_is_refused(words: tuple[str, ...], message: str) -> None:
    """Exit code 2, and a message that names the flag, the value and what is accepted."""
    done = run(*words)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stdout == ""


def test_a_context_beyond_what_is_planned() -> None:
    """Named for what it is: nobody gave --prompt."""
    done = run(CONTEXT_LENGTH="1e9")
    assert done.returncode == 2
    assert done.stderr.startswith("dynchunk plan: CONTEXT_LENGTH=1,000,000,000 is more than the 10,000,000 tokens")
    assert "'" not in done.stderr
    assert planned("--prompt", "10k", CONTEXT_LENGTH="1e9")["prompt_tokens"] == 10_000


def test_a_long_prompt_in_many_chunks() -> None:
    """The allocator's model is left out where it would not end, and the plan says so."""
    words = ("--prompt", "10M", "--bytes", "999999")
    data = planned(*words)
    assert len(data["chunks"]) > 30_000
    assert data["reserved_bytes"] == {}
    assert "what the allocator keeps reserved for 37,685 chunks is left out" in data["notes"][-1]
    assert "for 37,685 chunks is left out" in run(*words, "--headroom", "1").stdout


def test_a_profile_of_several_hosts() -> None:
    """A plan needs no head: DIST_INIT_ADDR is each host's to add."""
    done = run("--prompt", "10k", env_file=str(ROOT / "docker-images" / "gb10-tp4" / "env"))
    assert (done.returncode, done.stderr) == (0, "")


def test_a_file_that_is_not_there() -> None:
    """--env-file is taken as everywhere."""
    done = run("--prompt", "10k", env_file="/none/such")
    assert done.returncode == 2
    assert "there is no such file" in done.stderr
    assert "it is a folder" in run("--prompt", "10k", env_file="/").stderr


def test_all_problems_at_once() -> None:
    """Several mistakes are said in one message."""
    stderr = run("--budget", "x", "--prompt", "y", "--path", "z").stderr
    for flag in ("DYNCHUNK_BUDGET", "--prompt", "--path"):
        assert flag in stderr


def test_off_is_planned_as_well() -> None:
    """Who has DynChunk turned off can see what it would do."""
    assert planned("--prompt", "10k", DYNCHUNK_MODE="off")["chunks"][0]["tokens"] == 2048
