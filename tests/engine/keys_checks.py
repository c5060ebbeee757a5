"""Key-blocked selection against the engine's own functions, on the CPU; test_versions.py runs this per version.

Started with DYNCHUNK_INDEXER=keys and the boot folder on the path; `__wrapped__` is the engine's own loop over tiles of
rows. What must hold: the values selected are bit for bit the same; the same keys wherever the last value is no tie; -1
exactly where there are fewer than k; no key twice.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from dynchunk import journal
from dynchunk.patches import contracts, indexer_keys
from scripts.bench import indexer_world
from scripts.bench.indexer_world import BLOCK, KERNELS, V41, Given, World, watch_live
from scripts.engine_wheels import VERSIONS

VERSION = os.environ["ENGINE_VERSION"]
MIB = 1 << 20
scoring = importlib.import_module(V41 + "scoring")
full = importlib.import_module(V41 + "full_topk")
dense = importlib.import_module(V41 + "dense_blocks")
table = importlib.import_module(V41 + "sparse_table")
FLAT = VERSION == "0.5.21"  # it hands on columns of the whole batch, later versions keys of the request
LARGEST = 3_000_000  # scores in one drawn example


@st.composite
def worlds(draw: st.DrawFn) -> World:
    keys = draw(st.lists(st.one_of(st.integers(0, 40), st.integers(1, 9000)), min_size=1, max_size=4))
    keys[0] += not any(keys)  # with nothing to see the engine does not get here
    longest = max(keys)
    rows = [draw(st.integers(1, max(1, min(100, LARGEST // (len(keys) * longest * len(keys)))))) for _ in keys]
    world = World(rows, keys)
    kind = draw(st.sampled_from(["fp32", "bf16", "coarse", "equal"]))
    return with_scores(world, kind, draw(st.integers(0, 1000)))


def with_scores(world: World, kind: str, seed: int) -> World:
    scores = torch.randn(world.rows, world.columns, generator=torch.Generator().manual_seed(seed))
    scores = {"bf16": scores.bfloat16().float(), "coarse": scores.round(), "equal": scores * 0}.get(kind, scores)
    world.source = Given(scores)
    indexer_world.install(world)
    return world


def large(rows: int, keys: int, kind: str) -> World:
    world = World([rows], [keys])
    world.large = kind  # type: ignore[attr-defined]
    return world


LARGE = [large(1, 262_144, "fp32"), large(8, 262_144, "bf16"), large(2048, 1000, "fp32"), large(3, 65_537, "equal")]
CUTS = st.sampled_from([64, 256, 4096])  # keys of a block
K = st.sampled_from([512, 2048, 7])
# The same code in all versions but for what they hand on; the newest is searched for what nobody has thought of.
checked = settings(
    max_examples=50 if VERSIONS[-1] == VERSION else 20, deadline=None, suppress_health_check=list(HealthCheck)
)


@pytest.fixture(autouse=True, params=["fp32", "bf16"])
def logits(request: pytest.FixtureRequest) -> Iterator[None]:
    """0.5.23 scores in bf16 on some GPUs and selects with another kernel then."""
    kernels = importlib.import_module(KERNELS + "dsv4.index_logits")
    if request.param == "bf16" and not hasattr(kernels, "index_logits_dtype"):
        pytest.skip("scores are fp32 in this version")
    with pytest.MonkeyPatch.context() as patch:
        if hasattr(kernels, "index_logits_dtype"):
            dtype = torch.bfloat16 if request.param == "bf16" else torch.float32
            patch.setattr(kernels, "index_logits_dtype", lambda: dtype)
        patch.setattr(scoring, "_DEEP_GEMM_SCORE_BUDGET_BYTES", MIB // 2)
        yield


def ready(world: World, cut: int, patch: pytest.MonkeyPatch) -> World:
    if hasattr(world, "large"):
        with_scores(world, world.large, 5)
        cut = max(cut, 4096)
    patch.setattr(indexer_keys, "_block_keys", lambda *_: cut)
    indexer_world.install(world)
    if dtype_in_use() is torch.bfloat16:
        assert world.source is not None
        world.source.scores = world.source.scores.bfloat16().float()
    return world


def dtype_in_use() -> torch.dtype:
    kernels = importlib.import_module(KERNELS + "dsv4.index_logits")
    return kernels.index_logits_dtype() if hasattr(kernels, "index_logits_dtype") else torch.float32


def dense_topk(function: Any, world: World, k: int) -> torch.Tensor:
    """Columns of the whole batch."""
    if FLAT:
        return function(world.data(), (None, None), topk=k)
    out = torch.full((world.rows, k), -1, dtype=torch.int32)
    assert function(world.data(), (None, None), out=out) is None
    return torch.where(out >= 0, out + world.starts[:, None], -1)


def values_of(world: World, columns: torch.Tensor) -> torch.Tensor:
    """The scores of the selected columns in falling order, -inf where there is none."""
    assert isinstance(world.source, Given)
    found = world.source.scores.gather(1, columns.clamp(min=0).long()).masked_fill(columns < 0, -torch.inf)
    return found.sort(dim=1, descending=True).values


def hold(world: World, ours: torch.Tensor, stock: torch.Tensor, k: int, allowed: torch.Tensor | None = None) -> None:
    """The promises, for a selection of columns. allowed: bool [rows, columns], where not every key may be taken."""
    assert ours.shape == stock.shape
    local = torch.where(ours >= 0, ours - world.starts[:, None], -1)
    assert (local < world.lens[:, None]).all()
    assert torch.equal(values_of(world, ours), values_of(world, stock)), "the same values, bit for bit"
    see = torch.arange(world.columns)[None] - world.starts[:, None]
    visible = (see >= 0) & (see < world.lens[:, None])
    if allowed is not None:
        visible &= allowed
    many = visible.sum(dim=1).clamp(max=k)
    assert torch.equal((ours >= 0).sum(dim=1), many), "-1 exactly where there are fewer than k"
    mine, theirs = ours.sort(dim=1).values, stock.sort(dim=1).values
    assert not ((mine[:, 1:] == mine[:, :-1]) & (mine[:, 1:] >= 0)).any(), "no key twice"
    assert isinstance(world.source, Given)
    if world.columns > k:
        best = world.source.scores.masked_fill(~visible, -torch.inf).topk(k + 1, dim=1).values
        tied = (best[:, k - 1] == best[:, k]) & (best[:, k] > -torch.inf)
    else:
        tied = torch.zeros(world.rows, dtype=torch.bool)
    assert torch.equal(mine[~tied], theirs[~tied]), "the same keys where no tie decides"


def block_values(world: World, blocks: torch.Tensor) -> torch.Tensor:
    """The best score of each published block in falling order, the newest block of a row first."""
    assert isinstance(world.source, Given)
    at = world.starts[:, None, None] + blocks[:, :, None] * BLOCK + torch.arange(BLOCK)
    inside = (blocks[:, :, None] >= 0) & (at < (world.starts + world.lens)[:, None, None])
    assert (inside.any(dim=2) | (blocks < 0)).all(), "no block beyond what a row sees"
    at = at.clamp(0, world.columns - 1).long()
    part = world.source.scores.gather(1, at.flatten(1)).view(at.shape).masked_fill(~inside, -torch.inf)
    newest = (blocks >= 0) & (blocks == (world.lens[:, None] - 1).div(BLOCK, rounding_mode="floor"))
    return part.amax(dim=2).masked_fill(newest, torch.inf).sort(dim=1, descending=True).values


def hold_blocks(world: World, ours: torch.Tensor, stock: torch.Tensor) -> None:
    assert ours.shape == stock.shape
    values = block_values(world, ours)
    assert torch.equal(values, block_values(world, stock))
    assert torch.equal((ours >= 0).sum(dim=1), (stock >= 0).sum(dim=1))
    mine = ours.sort(dim=1).values
    assert not ((mine[:, 1:] == mine[:, :-1]) & (mine[:, 1:] >= 0)).any(), "no block twice"
    assert torch.equal((values == torch.inf).sum(dim=1), (world.lens > 0).long()), "the newest block is always kept"


def test_all_functions_are_replaced() -> None:
    """Every loop over tiles of a chunk runs by keys, and the journal says that no GPU has verified it."""
    entry = journal.snapshot()["hooks"]["indexer_keys"]
    assert entry["outcome"] == "applied"
    assert entry["detail"].startswith("unverified on this device")
    assert journal.snapshot()["hooks"]["score_tiles"]["outcome"] == "not in use"
    for module, held in contracts.KEY_BLOCKS.items():
        loaded = importlib.import_module(module)
        hooked = [c.target for c in held if hasattr(getattr(loaded, c.target, None), "__wrapped__")]
        assert hooked, module


@checked
@given(worlds(), CUTS, K)
@example(LARGE[0], 4096, 512)
@example(LARGE[1], 4096, 2048)
@example(LARGE[2], 256, 512)
@example(LARGE[3], 4096, 2048)
def test_full_selection(world: World, cut: int, k: int) -> None:
    """The layers that select among all keys."""
    with pytest.MonkeyPatch.context() as patch:
        ready(world, cut, patch)
        ours = dense_topk(full.dense_prefill_topk, world, k)
        stock = dense_topk(full.dense_prefill_topk.__wrapped__, world, k)
    hold(world, ours, stock, k)


@checked
@given(worlds(), CUTS, st.sampled_from([7, 512]), st.sampled_from([5, 40, 2048]))
@example(LARGE[1], 4096, 512, 2048)
@example(LARGE[3], 4096, 512, 2048)
def test_the_candidate_source(world: World, cut: int, k: int, topk_blocks: int) -> None:
    """The source layer's own selection, and its blocks of 8: in the sparse table (SM100) and as ids (others)."""
    options = {"topk": k, "topk_blocks": topk_blocks, "block_size": BLOCK}
    with pytest.MonkeyPatch.context() as patch:
        ready(world, cut, patch)
        ours = indexer_world.publish(world, k, topk_blocks)
        picked, blocks = dense._publish_prefill_blocks(data=world.data(), kv=(None, None), **options)
        patch.setattr(table, "publish_prefill_table", table.publish_prefill_table.__wrapped__)
        stock = indexer_world.publish(world, k, topk_blocks)
        stock_ids = dense._publish_prefill_blocks.__wrapped__(data=world.data(), kv=(None, None), **options)

    def columns(ids: torch.Tensor) -> torch.Tensor:
        return ids if FLAT else torch.where(ids >= 0, ids + world.starts[:, None], -1)

    hold(world, columns(ours[0]), columns(stock[0]), k)
    hold_blocks(world, ours[1]["blocks"], stock[1]["blocks"])
    for name, value in stock[1].items():
        if name != "blocks":
            mine = ours[1][name]
            assert torch.equal(value, mine) if isinstance(value, torch.Tensor) else value == mine, name
    hold(world, picked, stock_ids[0], k)
    hold_blocks(world, blocks, stock_ids[1])


@checked
@given(worlds(), CUTS, st.sampled_from([7, 512]), st.sampled_from([3, 40, 2048]))
@example(LARGE[1], 4096, 512, 2048)
def test_the_consumers(world: World, cut: int, k: int, topk_blocks: int) -> None:
    """Layers that select among the published blocks only."""
    with pytest.MonkeyPatch.context() as patch:
        ready(world, cut, patch)
        options = {"topk": k, "topk_blocks": topk_blocks, "block_size": BLOCK}
        _, blocks = dense._publish_prefill_blocks.__wrapped__(data=world.data(), kv=(None, None), **options)
        given_blocks = {"topk": k, "blocks": blocks, "block_size": BLOCK}
        ours = dense._consume_prefill_blocks(data=world.data(), kv=(None, None), **given_blocks)
        stock = dense._consume_prefill_blocks.__wrapped__(data=world.data(), kv=(None, None), **given_blocks)
    ids = torch.arange(world.columns)[None] - world.starts[:, None]
    most = int(blocks.max()) + 1 if blocks.numel() else 1
    kept = torch.zeros(world.rows, most + 1, dtype=torch.bool)
    kept.scatter_(1, blocks.long().masked_fill(blocks < 0, most), value=True)
    kept[:, most] = False
    block = ids.div(BLOCK, rounding_mode="floor").clamp(-1, most)
    allowed = kept.gather(1, block.masked_fill(block < 0, most))
    hold(world, ours, stock, k, allowed)


def test_other_block_sizes_are_left_to_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Candidate blocks of another size than the kernel's 8 take the engine's own loop."""
    world = with_scores(World([20], [500]), "fp32", 1)
    ready(world, 64, monkeypatch)
    options = {"topk": 9, "topk_blocks": 7, "block_size": 4}
    ours = dense._publish_prefill_blocks(data=world.data(), kv=(None, None), **options)
    stock = dense._publish_prefill_blocks.__wrapped__(data=world.data(), kv=(None, None), **options)
    assert torch.equal(ours[0], stock[0])
    assert torch.equal(ours[1], stock[1])


def test_memory_does_not_depend_on_the_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a selection holds is the same at 16,384 and at 262,144 keys, within 5 %."""
    peaks = []
    monkeypatch.setattr(scoring, "_DEEP_GEMM_SCORE_BUDGET_BYTES", 4 * MIB)
    monkeypatch.setattr(indexer_keys, "_block_keys", lambda *_: 16_384)
    for keys in (16_384, 65_536, 262_144):
        world = World([64], [keys])
        world.source = Given(torch.arange(keys).remainder(1009).float()[None].expand(world.rows, -1))
        indexer_world.install(world)
        world.data()  # what goes in is not what is held
        with watch_live() as held:
            dense_topk(full.dense_prefill_topk, world, 512)
        peaks.append(held.live_bytes)
    assert max(peaks) < 1.05 * min(peaks)
    assert max(peaks) < 2 * 4 * MIB
