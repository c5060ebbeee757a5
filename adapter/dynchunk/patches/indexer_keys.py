"""DYNCHUNK_INDEXER=keys: score a chunk of DeepSeek-V4.1 in blocks of keys as well (DeepGEMM, 0.5.21 and later).

The engine cuts a chunk's scores by rows alone. On a very long prefix a limit then leaves tiles of few rows, and a GPU
that gives each multiprocessor some rows stands partly idle. Here the engine's own tiles are asked for one block of keys
after another, each with the same call: the queries, starts moved on, lengths cut to the block. What each block selects
is kept with its values, and the best of all blocks are the selection. The values selected are bit for bit those of one
selection over all keys; which of several equal values is taken is open there too. Every buffer has one size at any
prefix, so nothing grows, neither what is held nor what is reserved.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, NamedTuple

import torch

from dynchunk import gpu_checked, journal
from dynchunk.contract import Patch, apply_all
from dynchunk.patches import contracts, score_limits
from dynchunk.policy import score_budget
from dynchunk.settings import current

HOOK = "indexer_keys"
BLOCK = 8  # keys of a candidate block


def apply(module: ModuleType) -> None:
    """Replace this module's loops over tiles, if the operator has asked for it."""
    configured = current()
    if configured.indexer != "keys":
        journal.record(HOOK, journal.NOT_IN_USE, "DYNCHUNK_INDEXER=rows")
        return
    scoring = sys.modules[contracts.V41_SCORING]
    replacements: dict[str, Callable[..., Any]] = {
        "dense_prefill_topk": _dense_topk,
        "_publish_prefill_blocks": _publish_blocks,
        "_consume_prefill_blocks": _consume_blocks,
        "publish_prefill_table": _publish_table,
    }
    held = contracts.KEY_BLOCKS[module.__name__]
    patches = [
        Patch(c, functools.partial(replacements[c.target], scoring, module) if c.target in replacements else None)
        for c in held
    ]
    apply_all(module, patches, change=configured.mode == "on", hint=contracts.HINT)
    outcome = journal.APPLIED if configured.mode == "on" else journal.WOULD_APPLY
    journal.record(HOOK, outcome, "unverified on this device")


@functools.cache
def _say_whether_verified() -> None:
    """When the first prefill runs and the device is known."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    known = "verified" if gpu_checked.report_of(name) else "unverified"
    journal.record(HOOK, journal.APPLIED, f"{known} on this device ({name})")


class Tile(NamedTuple):
    """Some rows' scores against one block of keys. first: its first key. lens: how many of its keys each row sees."""

    rows: slice
    first: int
    lens: Any
    scores: Any


def _tiles(scoring: Any, data: Any, kv: Any) -> Iterator[Tile]:
    """The engine's tiles for one block of keys after another. A tile is gone when the next one is asked for."""
    _say_whether_verified()
    columns, longest = sum(data.lens_per_request), max(data.lens_per_request, default=0)
    size = _block_keys(scoring, int(data.q_fp4.shape[1]), longest)
    for first in range(0, longest, size):
        lens = (data.compress_lens - first).clamp(0, size)
        part = _replaced(
            data,
            # A row that sees nothing here starts and ends with the keys themselves.
            request_starts=(data.request_starts + first).clamp(max=columns),
            compress_lens=lens,
            # Always the whole block, so that every tile has one shape.
            lens_per_request=[size],
        )
        for rows, scores in scoring.score_tiles(part, kv, **_options(scoring.score_tiles)):
            yield Tile(rows, first, lens[rows], scores)
            if (storage := scores.untyped_storage()).resizable():
                storage.resize_(0)


def _block_keys(scoring: Any, heads: int, longest: int) -> int:
    """Keys of a block: as many as the limit allows for rows that give every multiprocessor some, and not far more."""
    rows = score_budget.rows_step(heads) * score_limits.processors()
    block = score_budget.key_block(scoring._DEEP_GEMM_SCORE_BUDGET_BYTES, rows)
    return min(block, max(score_budget.SMALLEST_KEY_BLOCK, score_budget.doubled(longest, 0)))


@functools.cache
def _options(score_tiles: Callable[..., Any]) -> dict[str, int]:
    """Up to 0.5.22 the caller says how a tile's width is aligned."""
    return {"width_align": BLOCK} if "width_align" in inspect.signature(score_tiles).parameters else {}


def _replaced(data: Any, **changes: Any) -> Any:
    return type(data)(**({name: getattr(data, name) for name in data.__struct_fields__} | changes))


class Best:
    """The `k` best values of each row so far and where they are; -1 where there are fewer."""

    def __init__(self, rows: int, k: int, device: Any) -> None:
        self.values = torch.full((rows, k), -torch.inf, dtype=torch.float32, device=device)
        self.ids = torch.full((rows, k), -1, dtype=torch.int32, device=device)

    def add(self, tile: Tile, values: Any, ids: Any) -> None:
        """Take in what was found for a tile's rows. ids: int32, counted over all keys; -1 where values are -inf."""
        if tile.first:
            values = torch.cat([self.values[tile.rows], values], dim=1)
            ids = torch.cat([self.ids[tile.rows], ids], dim=1)
            values, best = values.topk(self.values.shape[1], dim=1)
            ids = ids.gather(1, best)
        found = values.shape[1]
        self.values[tile.rows, :found] = values
        self.ids[tile.rows, :found] = ids


def _keys(scoring: Any, tile: Tile, k: int) -> tuple[Any, Any]:
    """The k best keys of a tile, by the engine's own kernel, which tells only where they are."""
    ids = torch.full((len(tile.lens), k), -1, dtype=torch.int32, device=tile.lens.device)
    no_offset = torch.zeros_like(tile.lens)
    if hasattr(scoring, "topk_ragged"):
        scoring.topk_ragged(tile.scores, tile.lens, out=ids, offsets=no_offset)
    else:
        from sglang.kernels.ops.attention.dsv4 import topk_transform_ragged_v2

        topk_transform_ragged_v2(tile.scores, tile.lens, out_offsets=no_offset, out_indices=ids)
    values = tile.scores.gather(1, ids.clamp_min(0).long()).float().masked_fill_(ids < 0, -torch.inf)
    # Rows with no more than k keys get all of them, those that a consumer must not take included.
    return values, (ids + tile.first).masked_fill_(values == -torch.inf, -1)


def _blocks(tile: Tile, seen: Any, k: int) -> tuple[Any, Any]:
    """The k best candidate blocks of a tile; the newest of each row before all others. seen: keys of each row."""
    best = tile.scores.unflatten(1, (-1, BLOCK)).amax(dim=2).float()
    newest = (seen[:, None] - 1).div(BLOCK, rounding_mode="floor") - tile.first // BLOCK
    number = torch.arange(best.shape[1], device=best.device)
    # What lies past a row's last key is garbage, and so is the maximum of the newest block.
    best.masked_fill_(number > newest, -torch.inf).masked_fill_(number == newest, torch.inf)
    top = best.topk(min(k, best.shape[1]), dim=1)
    ids = (top.indices + tile.first // BLOCK).int()
    return top.values, ids.masked_fill_(top.values == -torch.inf, -1)


def _columns(data: Any, ids: Any) -> Any:
    """Keys counted over the whole batch, as some functions hand them on."""
    return torch.where(ids >= 0, ids + data.request_starts[:, None], -1)


def _dense_topk(scoring: Any, _module: Any, _original: Any) -> Callable[..., Any]:
    def dense_prefill_topk(data: Any, kv: Any, *, topk: int = 0, out: Any = None) -> Any:
        kept = Best(data.num_rows, topk if out is None else out.shape[1], data.q_fp4.device)
        for tile in _tiles(scoring, data, kv):
            kept.add(tile, *_keys(scoring, tile, kept.ids.shape[1]))
        if out is None:  # 0.5.21
            return _columns(data, kept.ids)
        out.copy_(kept.ids)
        return None

    return dense_prefill_topk


def _publish(scoring: Any, data: Any, kv: Any, topk: int, topk_blocks: int) -> tuple[Any, Any]:
    """A source layer's own selection and the blocks it publishes, from one pass over its scores."""
    kept, blocks = (Best(data.num_rows, k, data.q_fp4.device) for k in (topk, topk_blocks))
    for tile in _tiles(scoring, data, kv):
        blocks.add(tile, *_blocks(tile, data.compress_lens[tile.rows], topk_blocks))
        kept.add(tile, *_keys(scoring, tile, topk))
    return kept.ids, blocks.ids


def _publish_blocks(scoring: Any, _module: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    def publish_prefill_blocks(*, data: Any, kv: Any, topk: int, topk_blocks: int, block_size: int) -> Any:
        if block_size != BLOCK:
            return original(data=data, kv=kv, topk=topk, topk_blocks=topk_blocks, block_size=block_size)
        ids, blocks = _publish(scoring, data, kv, topk, topk_blocks)
        width = min(topk_blocks, -(-max(data.lens_per_request, default=0) // BLOCK))
        return _columns(data, ids), blocks[:, :width]

    return publish_prefill_blocks


def _publish_table(scoring: Any, module: Any, _original: Any) -> Callable[..., Any]:
    def publish_prefill_table(
        *, data: Any, kv: Any, index_page_table: Any, index_page_size: int, topk_blocks: int, out_positions: Any
    ) -> Any:
        device = data.q_fp4.device
        _, valid_lens = module.candidate_row_lens(data.compress_lens, topk_blocks)
        ids, blocks = _publish(scoring, data, kv, out_positions.shape[1], topk_blocks)
        if hasattr(module, "_row_pair_ids"):
            out_positions.copy_(ids)
            request_ids = module._row_pair_ids(data.rows_per_request, device=device)
        else:  # 0.5.21
            out_positions.copy_(_columns(data, ids))
            rows = torch.tensor(data.rows_per_request, dtype=torch.int64, device=device)
            numbers = torch.arange(len(data.rows_per_request), dtype=torch.int32, device=device)
            request_ids = torch.repeat_interleave(numbers, rows, output_size=data.num_rows)
        return module._build_prefill_table(
            blocks=blocks,
            compress_lens=data.compress_lens,
            page_table=index_page_table,
            page_size=index_page_size,
            request_ids=request_ids,
            rows_per_request=data.rows_per_request,
            q_dtype=data.q_fp4.dtype,
            valid_lens=valid_lens,
        )

    return publish_prefill_table


def _consume_blocks(scoring: Any, _module: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    def consume_prefill_blocks(*, data: Any, kv: Any, topk: int, blocks: Any, block_size: int) -> Any:
        if block_size != BLOCK:
            return original(data=data, kv=kv, topk=topk, blocks=blocks, block_size=block_size)
        kept = Best(data.num_rows, topk, data.q_fp4.device)
        for tile in _tiles(scoring, data, kv):
            by_block = tile.scores.unflatten(1, (-1, BLOCK))
            count = by_block.shape[1]
            here = blocks[tile.rows].long() - tile.first // BLOCK
            # One block more, for those that lie elsewhere.
            here.masked_fill_((here < 0) | (here >= count), count)
            taken = torch.zeros(len(here), count + 1, dtype=torch.bool, device=here.device).scatter_(
                1, here, value=True
            )
            by_block.masked_fill_(~taken[:, :count, None], -torch.inf)
            kept.add(tile, *_keys(scoring, tile, topk))
        return _columns(data, kept.ids)

    return consume_prefill_blocks
