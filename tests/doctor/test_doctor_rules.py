"""The doctor's rules: figures from reports of users, and where each line is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynchunk.policy.budget import Budget
from launcher import flags
from scripts.doctor import allocator_rules, chunk_rules, killers, memory_rules
from scripts.doctor.verdict import GIB, Level

LIMITS = Budget(200_000_000, "prefix", 64, 256, 2048)
EXPANDABLE = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


def test_the_sliding_window_pool_of_a_known_hang() -> None:
    """131,072 tokens x 0.1 in pages of 256 leave 13,056; 6,400 is the largest chunk, and 8,192 is refused with it."""
    assert chunk_rules.swa_pool_tokens(131_072, 0.1, 256) == 13_056
    assert chunk_rules.largest_chunk(13_056, 256) == 6_400
    refused = chunk_rules.swa_pool(8_192, 131_072, 0.1, 256)
    assert refused.level is Level.FAIL
    assert "6,400" in refused.reason
    assert "CHUNKED_PREFILL_SIZE=6400" in refused.cure
    assert chunk_rules.swa_pool(6_400, 131_072, 0.1, 256).level is Level.OK


def test_the_ratio_that_makes_room() -> None:
    """2 x 8192 x 1.05 / 32768 = 0.525; never below 0.1 nor above 0.9."""
    assert chunk_rules.ratio_wanted(8_192, 32_768) == pytest.approx(0.525)
    assert "0.525" in chunk_rules.swa_pool(8_192, 32_768, 0.1, 256).cure
    assert chunk_rules.ratio_wanted(64, 10**6) == 0.1
    assert chunk_rules.ratio_wanted(10**6, 10**6) == 0.9


@given(st.integers(1, 256), st.integers(64, 16_384), st.integers(2, 200))
def test_the_advised_ratio_is_enough(page: int, chunk: int, chunks_in_cache: int) -> None:
    """A cache of some chunks with the advised ratio passes the check that gave the advice, below the 0.9."""
    chunk = -(-chunk // page) * page
    total = chunk * chunks_in_cache
    wanted = chunk_rules.ratio_wanted(chunk, total)
    # The margin of 5 % of two chunks pays for the pages that are rounded away.
    if wanted < chunk_rules.RATIO_MOST and chunk * 0.1 >= 3 * page:
        assert chunk_rules.swa_pool(chunk, total, wanted, page).level is Level.OK


def test_a_chunk_of_many_windows() -> None:
    """65,536 on a window of 128 is 512 times what the window needs; 64 times is where it becomes worth a word."""
    assert "512" in chunk_rules.window_lock(65_536, 128).reason
    assert chunk_rules.window_lock(65_536, 128).level is Level.WARN
    assert chunk_rules.window_lock(8_192, 128).level is Level.OK


def test_data_parallel_attention_divides_the_chunk() -> None:
    """4096 on four ranks is 1024 on each, and that is said, with the knob that was set for more."""
    check = chunk_rules.dp_attention(4_096, 4, chunk_max=2_048)
    assert "1,024 tokens per rank" in check.reason
    assert "DYNCHUNK_CHUNK_MAX=2,048" in check.reason
    assert "CHUNKED_PREFILL_SIZE=16384" in check.cure
    assert chunk_rules.dp_attention(2, 4, chunk_max=None).level is Level.FAIL


@pytest.mark.parametrize(("requests", "stages", "level"), [(3, 4, Level.FAIL), (4, 4, Level.OK), (9, 4, Level.OK)])
def test_requests_for_every_stage(requests: int, stages: int, level: Level) -> None:
    """max_running_requests // pp_size below one leaves a stage without a request."""
    assert chunk_rules.requests_per_stage(requests, stages).level is level


def test_page_and_chunk() -> None:
    """The engine asserts whole pages when it has loaded; here it is a second."""
    assert chunk_rules.page_and_chunk(2_000, 64).cure == "CHUNKED_PREFILL_SIZE=1984"
    assert chunk_rules.page_and_chunk(100, 256).cure == "CHUNKED_PREFILL_SIZE=256 or more"
    assert chunk_rules.page_and_chunk(2_048, 64).level is Level.OK
    assert chunk_rules.page_and_chunk(0, 64).level is Level.FAIL


def test_truncation_alignment() -> None:
    """Multiples of 4096 need a chunk of that, and keep 2e8 up to 48,828 tokens only."""
    assert chunk_rules.truncation_alignment(2_048, 200_000_000, 4_096, 500_000).level is Level.FAIL
    warned = chunk_rules.truncation_alignment(4_096, 200_000_000, 4_096, 500_000)
    assert (warned.level, "48,828" in warned.reason) == (Level.WARN, True)
    assert chunk_rules.truncation_alignment(4_096, 200_000_000, 4_096, 48_828).level is Level.OK


def test_context_parallel_rows() -> None:
    """Below two rows for each rank the engine leaves context parallelism for that forward."""
    assert chunk_rules.context_parallel(256, 4).level is Level.OK
    assert chunk_rules.context_parallel(64, 64).level is Level.WARN


@pytest.mark.parametrize(
    ("words", "tp_size", "warned"),
    [
        ([], 4, True),
        ([], 1, False),
        (["--disable-custom-all-reduce"], 4, False),
        (["--disable-cuda-graph"], 4, False),
        (["--cuda-graph-backend-decode=disabled"], 4, False),
    ],
)
def test_the_triple_that_ends_a_start(words: list[str], tp_size: int, warned: bool) -> None:
    """Expandable segments, graphs and custom all-reduce over several ranks: any two of them are no matter."""

    def levels(environ: dict[str, str]) -> set[Level]:
        checks = allocator_rules.checks(environ, words, ["9.0"], tp_size=tp_size, allowed=True)
        return {check.level for check in checks}

    assert levels(EXPANDABLE) == ({Level.WARN} if warned else {Level.OK})
    assert levels({}) == {Level.OK}


def test_expandable_segments_by_gpu() -> None:
    """Refused everywhere unless allowed; where NaN was seen (capability 12.1) the permission does not help."""

    def level(capability: str, *, allowed: bool) -> Level:
        return allocator_rules.checks(EXPANDABLE, [], [capability], tp_size=1, allowed=allowed)[0].level

    assert level("9.0", allowed=False) is Level.FAIL
    assert level("9.0", allowed=True) is Level.OK
    assert level("12.1", allowed=True) is Level.FAIL


def test_a_threshold_without_a_fraction() -> None:
    """garbage_collection_threshold alone does nothing, which is a warning."""
    environ = {"PYTORCH_CUDA_ALLOC_CONF": "garbage_collection_threshold:0.8"}
    [check] = allocator_rules.checks(environ, [], [], tp_size=1, allowed=False)
    assert check.level is Level.WARN


def test_flags_are_read_as_argparse_would() -> None:
    """Both spellings, other names and unique beginnings; the last one counts; what is no number is none."""
    words = ["--dp-size", "2", "--dp-size=4", "--enable-dp-att", "--swa-full-tokens-ratio", "x"]
    assert flags.count(words, "--dp-size", "--data-parallel-size") == 4
    assert flags.count(["--data-parallel-size", "8"], "--dp-size", "--data-parallel-size") == 8
    assert flags.given(words, "--enable-dp-attention")
    assert not flags.given(words, "--enable-mixed-chunk")
    assert flags.number(words, "--swa-full-tokens-ratio") is None
    assert flags.value(words, "--page-size") is None
    for text in ("inf", "nan", "1e999", ""):
        assert flags.number([f"--swa-full-tokens-ratio={text}"], "--swa-full-tokens-ratio") is None
    for text in ("-4", "0", "4.0", "4e0", "x", "9" * 5000):
        assert flags.count([f"--dp-size={text}"], "--dp-size") is None


def test_headroom() -> None:
    """What is left after all needs is held against memguard's line, and every figure is in the sentence."""
    needs = [("static", 80 * GIB), ("for a chunk", int(2.7 * GIB))]
    tight = memory_rules.headroom(84 * GIB, needs, 3 * GIB // 2, what="MemAvailable")
    assert tight.level is Level.FAIL
    for figure in ("84.00 GiB", "80.00 GiB", "2.70 GiB", "1.30 GiB", "1.50 GiB"):
        assert figure in tight.reason
    assert memory_rules.headroom(85 * GIB, needs, 3 * GIB // 2, what="MemAvailable").level is Level.OK


def test_swap() -> None:
    """None is fine; thrashing fails; swap on a unified host is worth a word even unused."""
    some = {"SwapTotal": 8 * GIB, "SwapFree": 8 * GIB}
    assert memory_rules.swap({}, 0, unified=True).level is Level.OK
    assert memory_rules.swap(some, 0, unified=False).level is Level.OK
    assert memory_rules.swap(some, 0, unified=True).level is Level.WARN
    assert memory_rules.swap(some, 20, unified=False).level is Level.WARN
    assert memory_rules.swap(some, 3_000, unified=False).level is Level.FAIL


def test_pressure() -> None:
    """`full` pressure only; a kernel without it is no verdict."""
    levels = [memory_rules.pressure(value).level for value in (None, 0.0, 12.0, 60.0)]
    assert levels == [Level.NOT_CHECKED, Level.OK, Level.WARN, Level.FAIL]


def test_page_cache_counts_where_memory_is_shared() -> None:
    """27 GB of stale files on a machine of 121 GiB; shared memory is no file cache."""
    meminfo = {"MemTotal": 121 * GIB, "Cached": 40 * GIB, "Buffers": 0, "Shmem": 13 * GIB}
    warned = memory_rules.page_cache(meminfo, unified=True, weights_bytes=90 * GIB)
    assert (warned.level, "27.00 GiB" in warned.reason, "90.00 GiB" in warned.reason) == (Level.WARN, True, True)
    assert memory_rules.page_cache(meminfo, unified=False, weights_bytes=None).level is Level.OK


def test_a_memory_limit_protects_nothing_on_unified_memory() -> None:
    """Said where GPU memory is the host's and where that is not known; on a discrete GPU it is what it says."""
    assert memory_rules.memory_limit(4 * GIB, unified=True).level is Level.WARN
    assert "on unified memory" in memory_rules.memory_limit(4 * GIB, unified=None).reason
    assert memory_rules.memory_limit(4 * GIB, unified=False).level is Level.OK
    assert memory_rules.memory_limit(None, unified=True).level is Level.OK


def test_earlyoom_lines() -> None:
    """Percent and KiB, together or attached, the higher counts; 10 % is its own default."""
    total = 120 * GIB
    assert killers.earlyoom_bytes([], total) == 12 * GIB
    assert killers.earlyoom_bytes(["-m", "5", "-s", "100"], total) == 6 * GIB
    assert killers.earlyoom_bytes(["-M2097152,1048576"], total) == 2 * GIB
    assert killers.earlyoom_bytes(["-m", "1,1", "-M", "2097152"], total) == 2 * GIB


def test_killers_before_the_guard() -> None:
    """One that acts above memguard's line is warned about with both figures; one below it is not."""

    def check(*arguments: str) -> Level:
        [found] = killers.lines_of({"earlyoom": arguments}, {}, 120 * GIB, 3 * GIB // 2)
        return found.level

    assert check("-M", "2097152") is Level.WARN
    assert check("-M", "1048576") is Level.OK
    [none] = killers.lines_of({}, {}, 120 * GIB, GIB)
    assert none.level is Level.OK


def test_nohang_and_oomd_from_their_files() -> None:
    """The thresholds in force, comments and defaults included."""
    config = "# soft_threshold_min_mem = 9 %\nsoft_threshold_min_mem = 8 %\n"
    assert killers.nohang_bytes(config, 100 * GIB) == 8 * GIB
    assert killers.nohang_bytes("soft_threshold_min_mem = 512 M", 100 * GIB) == GIB // 2
    assert killers.nohang_bytes("", 100 * GIB) == 5 * GIB
    [oomd] = killers.lines_of({"systemd-oomd": []}, {"systemd-oomd": "[OOM]\nSwapUsedLimit=70%\n"}, GIB, GIB)
    assert "SwapUsedLimit=70%" in oomd.reason
    assert "DefaultMemoryPressureLimit=60%" in oomd.reason
