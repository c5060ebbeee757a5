"""The real indexer modules of one engine version on the CPU; test_versions.py runs this once for each version.

The boot folder is on the path, so every module is hooked as in a server; `__wrapped__` is the engine's own.
"""

from __future__ import annotations

import importlib
import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dynchunk import journal
from dynchunk.patches import kv_workspace, score_limits
from dynchunk.policy import score_budget
from dynchunk.policy.score_budget import MIB
from scripts.bench import indexer_world
from scripts.bench.indexer_world import KERNELS, V41, Given, World, watch_live

ATTENTION = "sglang.srt.layers.attention."
VERSION = os.environ["ENGINE_VERSION"]
V41_HERE = VERSION != "0.5.20"
needs_v41 = pytest.mark.skipif(not V41_HERE, reason="0.5.20 has no DeepSeek-V4.1")


def engine(name: str) -> Any:
    return importlib.import_module(name)


def outcome(hook: str) -> str:
    return str(journal.snapshot()["hooks"][hook]["outcome"])


# ---- limits: set, and what follows from them in the engine's own arithmetic


def test_every_limit_of_this_version_is_lowered() -> None:
    """Each limit that the table gives this version is in force when its module has been imported, and reads back."""
    for limit in score_limits.LIMITS:
        if VERSION in limit.versions:
            engine(limit.module)
            # QSA's is 128 MiB; the pool's follows from the environment.
            lower = "QSA" in limit.name or limit.unit == 4
            expected = {"already lower"} if lower else {"applied"}
            if limit.how == score_limits.DEVICE_TABLE:
                expected = {"not in use"}  # until a device is known
            assert outcome(limit.hook) in expected, limit.hook
    assert score_limits.verify() == []


def test_the_environment_was_set_before_it_was_read() -> None:
    """The ROCm pool's size is what the engine made of the variable, not only what was set afterwards."""
    pool = engine(KERNELS + "dsv4.fp4_indexer_hip")
    assert os.environ["SGLANG_DSV4_FP4_LOGITS_BUDGET_MB"] == "256"
    assert pool._LOGITS_BUDGET_ELEMS * 4 == 256 * MIB
    rows = pool.logits_rows_per_chunk(torch.empty(1, 4096))  # 4,096 pages of 64 keys
    assert rows * 262_144 * 4 <= 256 * MIB
    chunk = engine("sglang.srt.model_executor.forward_batch_deepseek_mha_mixin")
    [mixin] = [c for c in vars(chunk).values() if hasattr(c, "get_max_chunk_capacity")]
    assert mixin.get_max_chunk_capacity(SimpleNamespace()) == 32_768


@needs_v41
@pytest.mark.parametrize(("keys", "heads", "rows"), [(262_144, 32, 256), (131_072, 32, 512), (1 << 20, 64, 64)])
def test_deep_gemm_tiles(keys: int, heads: int, rows: int) -> None:
    """The engine's own tile arithmetic comes to what the policy says, at the limit in force."""
    tiles = engine(KERNELS + "dsv4.index_logits")
    limit = engine(V41 + "scoring")._DEEP_GEMM_SCORE_BUDGET_BYTES
    assert limit == 256 * MIB
    seen = tiles.flat_index_logits_rows_per_tile(2048, keys, heads=heads, budget_bytes=limit)
    assert seen == rows == score_budget.rows_per_tile(limit, keys, heads)


@needs_v41
def test_torch_path_is_the_same_at_any_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's torch selection writes the same bits with one part or many, and holds less."""
    scoring = engine(V41 + "scoring")
    select = indexer_world.torch_selection(VERSION, rows=96, keys=4096, heads=8, dim=32, topk=64)
    seen, peaks = [], []
    for limit in (1 << 30, 4 * MIB, MIB, 1):
        monkeypatch.setattr(scoring, "_TORCH_SCORE_BUDGET_BYTES", limit)
        with watch_live() as held:
            seen.append(select().clone())
        peaks.append(held.live_bytes)
    assert (seen[0] >= 0).all()
    assert all(torch.equal(seen[0], other) for other in seen[1:])
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[1] < 3.6 * 4 * MIB + 4096 * 32 * 2 + MIB


@needs_v41
def test_the_shared_budget_is_capped(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSeek-V4, k-pool and DSA get row parts of at most 256 MiB where the engine alone would take gigabytes."""
    utils = engine(ATTENTION + "mqa_logits_utils")
    device = SimpleNamespace(get_device_properties=lambda _: SimpleNamespace(total_memory=128 << 30))
    monkeypatch.setattr(utils, "get_device_module", lambda: device)
    monkeypatch.setattr(utils, "get_schedule", lambda: SimpleNamespace(mem_fraction_static=0.8))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _=None: (24 << 30, 128 << 30))
    own = utils.mqa_logits_static_budget_bytes.__wrapped__(device_index=0)
    assert own > 4 << 30
    assert utils.mqa_logits_static_budget_bytes(device_index=0) == 256 * MIB
    assert utils.mqa_logits_budget_bytes(device_index=0, allow_sync=True) == 256 * MIB
    metadata = engine(ATTENTION + "dsv4.metadata")
    assert metadata.mqa_logits_budget_bytes is utils.mqa_logits_budget_bytes
    budget = utils.mqa_logits_budget_bytes(device_index=0, allow_sync=False)
    plan = {"num_rows": 2048, "num_cols": 65_536, "sm120_row_cap": None}
    assert metadata.plan_indexer_row_chunks(budget_bytes=budget, **plan) == 1024
    pooled = engine(ATTENTION + "dsa.dsa_indexer_kpool")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    parts = pooled._mqa_logits_row_chunks(num_rows=2048, num_cols=262_144, device=torch.device("cuda", 0))
    assert {p.stop - p.start for p in parts} == {256}


def test_dsa_keeps_the_smaller_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reading that DSA takes only once is taken before its first prefill, and kept where it is the smaller."""
    module = engine(ATTENTION + "dsa.dsa_indexer")
    where = engine(ATTENTION + "mqa_logits_utils") if V41_HERE else module
    device = SimpleNamespace(
        get_device_properties=lambda _: SimpleNamespace(total_memory=128 << 30), mem_get_info=lambda _: (64 << 30, 0)
    )
    monkeypatch.setattr(where, "get_device_module", lambda: device)
    monkeypatch.setattr(where, "get_schedule", lambda: SimpleNamespace(mem_fraction_static=0.8))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _=None: (64 << 30, 128 << 30))
    monkeypatch.setattr(module.Indexer, "_mqa_logits_budget_bytes", {})
    shape = score_limits.Shape(131_072, 64, 108, 5)
    monkeypatch.setattr(score_limits, "_ask_engine", lambda: shape)
    monkeypatch.setattr(score_limits, "_shape", None)
    score_limits.settle()
    assert module.Indexer._mqa_logits_budget_bytes == {5: 256 * MIB}
    assert module.Indexer._get_mqa_logits_budget_bytes(module.Indexer, 5) == 256 * MIB
    assert score_limits.verify() == []


# ---- the candidate source's tiles


SHAPES = [
    ([256], [3000]),
    ([200, 56], [3000, 777]),
    ([64, 1, 32], [2048, 5, 40]),  # shorter than k
    ([16, 16], [16, 9]),  # rows that see nothing yet
    ([128], [4096]),
]


@needs_v41
@pytest.mark.parametrize(("rows", "keys"), SHAPES)
@pytest.mark.parametrize("tied", [False, True])
def test_freed_tiles_select_the_same(
    rows: list[int], keys: list[int], tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Selection and published blocks are bit for bit those of the engine's own loop, ties and empty rows included."""
    table, scoring = engine(V41 + "sparse_table"), engine(V41 + "scoring")
    assert outcome("score_tiles") == "applied"
    world = World(rows, keys)
    scores = torch.randn(world.rows, world.columns, generator=torch.Generator().manual_seed(1))
    world.source = Given(scores.round() if tied else scores)
    indexer_world.install(world)
    monkeypatch.setattr(scoring, "_DEEP_GEMM_SCORE_BUDGET_BYTES", MIB // 4)
    ours = indexer_world.publish(world, topk=64, topk_blocks=40)
    monkeypatch.setattr(table, "score_tiles", table.score_tiles.__wrapped__)
    stock = indexer_world.publish(world, topk=64, topk_blocks=40)
    assert torch.equal(ours[0], stock[0])
    assert set(ours[1]) == set(stock[1])
    for name, value in ours[1].items():
        assert torch.equal(value, stock[1][name]) if isinstance(value, torch.Tensor) else value == stock[1][name], name


@needs_v41
def test_tiles_are_freed_as_the_engine_runs_them() -> None:
    """Under inference mode, as in a forward, too."""
    world = World([40], [500])
    world.source = Given(torch.randn(40, 500, generator=torch.Generator().manual_seed(1)))
    indexer_world.install(world)
    with torch.inference_mode():
        inside = indexer_world.publish(world, topk=9, topk_blocks=7)
    outside = indexer_world.publish(world, topk=9, topk_blocks=7)
    assert torch.equal(inside[0], outside[0])


@needs_v41
def test_one_tile_is_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's own loop holds two tiles and a bit, the hooked one a tile and a bit."""
    table, scoring = engine(V41 + "sparse_table"), engine(V41 + "scoring")
    world = World([512], [16_384])
    world.source = Given(torch.zeros(1, world.columns).expand(world.rows, -1))
    indexer_world.install(world)
    limit = 8 * MIB
    monkeypatch.setattr(scoring, "_DEEP_GEMM_SCORE_BUDGET_BYTES", limit)
    with watch_live() as ours:
        indexer_world.publish(world, topk=64, topk_blocks=40)
    monkeypatch.setattr(table, "score_tiles", table.score_tiles.__wrapped__)
    with watch_live() as stock:
        indexer_world.publish(world, topk=64, topk_blocks=40)
    # 16 rows in a stand-in: scores, mask, ids; the blocks' maxima are an eighth.
    small = limit // 8 + 16 * 16_384 * 24
    assert limit < ours.live_bytes < limit + small
    assert stock.live_bytes > 2 * limit


# ---- the workspace for a prefix's keys


def workspace() -> tuple[Any, Any]:
    utils = engine(ATTENTION + "dsv4.sparse_prefill_utils")
    assert outcome("kv_workspace") == "applied"
    if hasattr(utils, "SparsePrefillKVBuffer"):
        return utils.SparsePrefillKVBuffer(torch.device("cpu")), utils.SparsePrefillKVBuffer
    return utils.SparsePrefillWorkspace(torch.device("cpu")), utils.SparsePrefillWorkspace


def test_the_workspace_grows_by_doubling(monkeypatch: pytest.MonkeyPatch) -> None:
    """32 chunks of a growing prompt: 6 buffers instead of 32, of which one is alive, each as long as asked for."""
    monkeypatch.setattr(kv_workspace, "longest_tokens", lambda: 0)
    buffer, _ = workspace()
    made = []
    with watch_live() as held:
        for tokens in range(2176, 2048 * 32 + 2176, 2048):
            view = buffer.get(tokens)
            assert view.shape == (tokens, 1, 512)
            assert view.is_contiguous()
            made.append(buffer._buffer.shape[0])
            del view
    assert sorted(set(made)) == [4096, 8192, 16_384, 32_768, 65_536, 131_072]
    assert held.live_bytes == 131_072 * 1024


def test_the_workspace_stops_at_the_context_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is made for tokens that no request can have; a batch that needs more gets what it needs."""
    monkeypatch.setattr(kv_workspace, "longest_tokens", lambda: 50_000)
    buffer, _ = workspace()
    buffer.get(40_000)
    assert buffer._buffer.shape[0] == 50_000
    assert buffer.get(70_000).shape[0] == 70_000
    with pytest.raises(AssertionError):
        buffer.get(0)


def test_another_type_makes_another_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the engine: a request for another element type is served from a buffer of that type."""
    monkeypatch.setattr(kv_workspace, "longest_tokens", lambda: 0)
    buffer, _ = workspace()
    assert buffer.get(100).dtype is torch.bfloat16
    assert buffer.get(50, torch.float8_e4m3fn).dtype is torch.float8_e4m3fn
    assert buffer._buffer.shape[0] == 64


@pytest.mark.skipif(VERSION != "0.5.23", reason="earlier versions fill the head anew for every layer")
def test_a_filled_head_is_forgotten_with_its_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """What 0.5.23 keeps between layers is kept while the buffer is, and not claimed of a new one."""
    monkeypatch.setattr(kv_workspace, "longest_tokens", lambda: 0)
    buffer, _ = workspace()
    rows, filled = buffer.get_with_head(1000, ("a",))
    rows.fill_(7)
    assert not filled
    again, filled = buffer.get_with_head(1020, ("a",))
    assert filled
    assert (again[:1000] == 7).all()
    _, filled = buffer.get_with_head(2000, ("a",))
    assert not filled


# ---- scoring in plain torch


@pytest.mark.parametrize("name", ["fp8_paged_mqa_logits_torch", "fp8_paged_mqa_logits_torch_sm120"])
@pytest.mark.parametrize(("rows", "pages", "ragged"), [(1, 3, False), (7, 16, True), (40, 33, True), (64, 8, False)])
def test_parts_of_rows_give_the_same_bits(
    name: str, rows: int, pages: int, ragged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scored in parts under a limit that takes a few rows, the result is bit for bit that of the engine's function."""
    indexer = engine(ATTENTION + "dsv4.indexer")
    assert outcome("torch_fallback") == "applied"
    function = getattr(indexer, name)
    inputs = indexer_world.fallback_inputs(rows, pages, 64, ragged=ragged)
    stock = function.__wrapped__(*inputs)
    for step in (1, 3, 1000):
        monkeypatch.setattr("dynchunk.patches.torch_fallback.torch_rows", lambda *_, step=step: step)
        ours = function(*inputs)
        assert ours.dtype == stock.dtype
        assert torch.equal(ours, stock)


@pytest.mark.parametrize("name", ["fp8_paged_mqa_logits_torch", "fp8_paged_mqa_logits_torch_sm120"])
@pytest.mark.parametrize("heads", [32, 64])
def test_torch_scoring_stays_within_the_limit(name: str, heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it holds beside its result is within the limit; the engine's own holds many times as much."""
    indexer = engine(ATTENTION + "dsv4.indexer")
    function = getattr(indexer, name)
    inputs = indexer_world.fallback_inputs(96, 64, heads, ragged=False)
    limit = 32 * MIB
    monkeypatch.setattr(
        "dynchunk.patches.torch_fallback.torch_rows", lambda _limit, *rest: score_budget.torch_rows(limit, *rest)
    )
    with watch_live() as ours:
        result = function(*inputs)
    del result
    with watch_live() as stock:
        result = function.__wrapped__(*inputs)
    beside = ours.live_bytes - result.nbytes
    assert 0.5 * limit < beside < limit + MIB
    assert stock.live_bytes > 5 * limit
