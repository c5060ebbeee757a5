"""The engine's own sparse indexer on a CPU: stand-ins for kernels that need a GPU, and a watch on what a call holds.

For a process whose path names one engine version in front. The engine's Python runs as it is: its tiles, its limits,
its writes; what scores and selects is torch. A stand-in keeps its own transients small, so that what is measured is
what the engine holds.
"""

from __future__ import annotations

import gc
import importlib
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

V41 = "sglang.srt.layers.attention.dsv4.v41_indexer."
KERNELS = "sglang.kernels.ops.attention."
AT_ONCE = 1 << 17  # scores that a stand-in handles at once, 512 KiB in fp32
BLOCK = 8  # keys of a candidate block
GARBAGE = float("nan")  # what a kernel leaves past a row's length


# ---- what is scored


@dataclass
class Given:
    """Scores that are there already, one column for each flattened key: selection apart from arithmetic."""

    scores: torch.Tensor  # [rows, columns] fp32

    def score(self, rows: torch.Tensor, first: int, last: int) -> torch.Tensor:
        """Rows by number, columns `first` to `last`."""
        return self.scores[rows, first:last]


@dataclass
class Scored:
    """Scores by the engine's own `DeepseekV41Indexer.scores`: bf16 queries and keys, summed over the heads."""

    q: torch.Tensor  # [rows, heads, dim]
    k: torch.Tensor  # [columns, dim]
    weights: torch.Tensor  # [rows, heads]

    def score(self, rows: torch.Tensor, first: int, last: int) -> torch.Tensor:
        """As Given."""
        from sglang.srt.layers.attention.dsv4.dsv41_sparse import DeepseekV41Indexer

        return DeepseekV41Indexer.scores(None, self.q[rows], self.k[first:last], self.weights[rows])


class World:
    """A chunk of several requests, and the stand-ins that score it.

    rows_per_request, keys_per_request: query rows and visible keys of each request at its newest row. The rows of a
    request see one key less than the next row, as under a causal mask, but never less than 0.
    """

    def __init__(self, rows_per_request: list[int], keys_per_request: list[int], heads: int = 32) -> None:
        self.rows_per_request = rows_per_request
        self.keys_per_request = keys_per_request
        self.heads = heads
        starts = [sum(keys_per_request[:i]) for i in range(len(keys_per_request))]
        lens: list[int] = []
        first: list[int] = []
        for rows, keys, start in zip(rows_per_request, keys_per_request, starts, strict=True):
            lens += [max(0, keys - (rows - 1 - i)) for i in range(rows)]
            first += [start] * rows
        self.lens = torch.tensor(lens, dtype=torch.int32)
        self.starts = torch.tensor(first, dtype=torch.int32)
        self.columns = sum(keys_per_request)
        self.source: Given | Scored | None = None
        self._data: Any = None

    @property
    def rows(self) -> int:
        """Query rows of all requests."""
        return len(self.lens)

    def data(self) -> Any:
        """The engine's own operands, made once; the queries carry nothing but their row's number."""
        if self._data is not None:
            return self._data
        scoring = importlib.import_module(V41 + "scoring")
        numbers = torch.arange(self.rows, dtype=torch.int32)
        self._data = scoring.DeepGEMMPrefillData(
            k_slots=torch.arange(self.columns),
            request_starts=self.starts,
            lens_per_request=list(self.keys_per_request),
            rows_per_request=list(self.rows_per_request),
            compress_lens=self.lens,
            q_fp4=numbers[:, None, None].expand(self.rows, self.heads, 1).contiguous(),
            q_sf=torch.zeros(self.rows, self.heads, dtype=torch.int32),
            weights=torch.zeros(self.rows, self.heads),
        )
        return self._data

    def mqa_logits(self, q: Any, _kv: Any, _w: Any, starts: Any, ends: Any, *rest: Any, **named: Any) -> torch.Tensor:
        """deep_gemm.fp8_fp4_mqa_logits: a row's scores from its first column on, garbage past its length."""
        assert self.source is not None
        width = rest[1]
        numbers = q[0][:, 0, 0].long()
        # The kernel pads the row stride to 1,024 bytes.
        logits = torch.empty(len(numbers), -(-width // 256) * 256, dtype=named.get("logits_dtype") or torch.float32)
        for part in _parts(*logits.shape):
            for first in torch.unique(starts[part]).tolist():
                mine = torch.nonzero(starts[part] == first).flatten() + part.start
                longest = int((ends[mine] - first).max())
                shown = torch.full((len(mine), logits.shape[1]), GARBAGE)
                shown[:, :longest] = self.source.score(numbers[mine], first, first + longest)
                beyond = torch.arange(logits.shape[1])[None, :] >= (ends[mine] - first)[:, None]
                logits[mine] = shown.masked_fill_(beyond, GARBAGE).to(logits.dtype)
        return logits[:, :width]


def _parts(rows: int, width: int) -> Iterator[slice]:
    step = max(1, AT_ONCE // max(1, width))
    return (slice(low, low + step) for low in range(0, rows, step))


def best(scores: torch.Tensor, lens: torch.Tensor, k: int) -> torch.Tensor:
    """int32 [rows, k]: the columns of the k largest values within each row's length, -1 padded."""
    out = torch.full((scores.shape[0], k), -1, dtype=torch.int32)
    for part in _parts(*scores.shape):
        beyond = torch.arange(scores.shape[1])[None, :] >= lens[part, None]
        top = scores[part].float().masked_fill(beyond, -torch.inf).topk(min(k, scores.shape[1]), dim=-1)
        out[part, : top.indices.shape[1]] = top.indices.int().masked_fill_(top.values == -torch.inf, -1)
    return out


def _topk_ragged_v2(scores: Any, lens: Any, *, out_offsets: Any, out_indices: Any, row_starts: Any = None) -> None:
    assert row_starts is None
    ids = best(scores, lens, out_indices.shape[1])
    out_indices.copy_(torch.where(ids >= 0, ids + out_offsets[:, None], -1))


def _deep_select(scores: Any, k: int, *, end: Any, output_idx: Any, output_idx_offset: Any, **_named: Any) -> None:
    assert k == output_idx.shape[1]
    _topk_ragged_v2(scores, end, out_offsets=output_idx_offset, out_indices=output_idx)


def _amax8(scores: Any, lens: Any, topk: int = 0, *, max_seqlen: int = 0, out: Any) -> Any:
    del topk, max_seqlen
    for row, length in enumerate(lens.tolist()):
        whole = -(-length // BLOCK)
        if whole:
            out[row, : whole - 1] = scores[row, : (whole - 1) * BLOCK].view(-1, BLOCK).amax(1)
            out[row, whole - 1] = torch.inf
    return out


def _row_lens(lens: Any, topk_blocks: int, block_size: int = BLOCK) -> Any:
    blocks = (lens + block_size - 1) // block_size
    valid = block_size * (blocks.clamp(max=topk_blocks) - 1) + (lens - 1) % block_size + 1
    return blocks, torch.where(lens > 0, valid, 0)


def install(world: World) -> None:
    """Put the stand-ins where the engine's Python finds its kernels."""
    gemm = types.ModuleType("deep_gemm")
    gemm.fp8_fp4_mqa_logits = world.mqa_logits  # type: ignore[attr-defined]
    sys.modules["deep_gemm"] = gemm
    importlib.import_module(V41 + "scoring")
    stand_ins = {
        "topk_transform_ragged_v2": _topk_ragged_v2,
        "amax8_varlen": _amax8,
        "candidate_row_lens": _row_lens,
        # What is built from the blocks is the kernel's own; what goes into it is what counts here.
        "_build_prefill_table": lambda **fields: fields,
    }
    for module in (KERNELS + "dsv4", V41 + "sparse_table", V41 + "dense_blocks"):
        loaded = importlib.import_module(module)
        for name, stand_in in stand_ins.items():
            if hasattr(loaded, name):
                setattr(loaded, name, stand_in)
    with suppress(ImportError):  # before 0.5.23 scores were fp32
        setattr(importlib.import_module(KERNELS + "deep_select"), "topk", _deep_select)  # noqa: B010


def publish(world: World, topk: int, topk_blocks: int) -> tuple[torch.Tensor, Any]:
    """The engine's `publish_prefill_table`: what the source layer selects, and the blocks it publishes."""
    table = importlib.import_module(V41 + "sparse_table")
    positions = torch.full((world.rows, topk), -1, dtype=torch.int32)
    fields = table.publish_prefill_table(
        data=world.data(),
        kv=(None, None),
        index_page_table=None,
        index_page_size=64,
        topk_blocks=topk_blocks,
        out_positions=positions,
    )
    return positions, fields


def torch_selection(version: str, *, rows: int, keys: int, heads: int, dim: int, topk: int) -> Callable[[], Any]:
    """The engine's selection in plain torch (Hopper) of one request's rows: a call that returns what it wrote."""
    full = importlib.import_module(V41 + "full_topk")
    sparse = importlib.import_module("sglang.srt.layers.attention.dsv4.dsv41_sparse")
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(rows, heads, dim, generator=generator).bfloat16()
    k = torch.randn(keys, dim, generator=generator).bfloat16()
    weights = torch.randn(rows, heads, generator=generator).bfloat16()
    raw = torch.full((rows, topk), -1, dtype=torch.int32)
    slots = torch.full((rows, topk), -1, dtype=torch.int32)
    indexer = types.SimpleNamespace(
        index_topk=topk,
        queries=lambda *_: q,
        head_weights=lambda _: weights,
        scores=lambda *args: sparse.DeepseekV41Indexer.scores(None, *args),
    )
    inputs = types.SimpleNamespace(
        indexer=indexer,
        layer_id=0,
        compress_ratio=1,
        freqs_cis=torch.zeros(keys, 1),
        x=None,
        q_lora=None,
        positions=torch.arange(keys - rows, keys),
        req_rows=torch.zeros(rows, dtype=torch.int64),
        req_pool_indices=torch.zeros(1, dtype=torch.int64),
        k_slots=torch.arange(keys),
        seq_lens_cpu=[keys],
        rows_per_request=[rows],
        rows_per_request_device=None,
        out_raw_indices=raw,
        out_page_indices=slots,
        reset_outputs=lambda: raw.fill_(-1),
    )
    pool = types.SimpleNamespace(get_low_ratio_index_k_dequant=lambda _layer, chosen: k[chosen])
    layer = full.FullTopKIndexer(
        token_to_kv_pool=pool,
        req_to_token=torch.arange(keys)[None],
        use_deep_gemm_prefill=False,
        use_deep_gemm_decode=False,
    )
    # 0.5.21 hands the buffers over apart.
    out = types.SimpleNamespace(raw_indices=raw, page_indices=slots, reset=inputs.reset_outputs)
    more = (out,) if version == "0.5.21" else ()

    def select() -> torch.Tensor:
        layer.topk_prefill(inputs, *more)
        return raw

    return select


def fallback_inputs(rows: int, pages: int, heads: int, *, ragged: bool) -> tuple[Any, ...]:
    """What DeepSeek-V4's scoring in plain torch takes: fp8 queries, a paged cache with scales, a page table."""
    generator = torch.Generator().manual_seed(2)
    q = torch.randn(rows, 1, heads, 128, generator=generator).to(torch.float8_e4m3fn)
    values = torch.randn(pages + 1, 64 * 128, generator=generator).to(torch.float8_e4m3fn).view(torch.uint8)
    scales = torch.rand(pages + 1, 64, generator=generator).view(torch.uint8).view(pages + 1, -1)
    cache = torch.cat([values, scales], dim=1).view(pages + 1, 64, 1, 132)
    weight = torch.randn(rows, heads, generator=generator)
    longest = pages * 64
    lens = torch.randint(0, longest + 1, (rows,), generator=generator) if ragged else torch.full((rows,), longest)
    table = torch.stack([torch.randperm(pages + 1, generator=generator)[:pages] for _ in range(rows)])
    return q, cache, weight, lens.int(), table.int(), None, longest, False


# ---- what a call holds


class Live(TorchDispatchMode):  # type: ignore[misc]
    """The bytes of all tensors made since it began and still alive, and their peak. Views count once."""

    def __init__(self) -> None:
        super().__init__()
        self.peak_bytes = 0
        self._storages: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {id(t.untyped_storage()) for t in _tensors((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            if id(storage) not in known and id(storage) not in self._storages:
                self._storages[id(storage)] = weakref.ref(storage)
        self._storages = {key: ref for key, ref in self._storages.items() if ref() is not None}
        alive = (ref() for ref in self._storages.values())
        self.peak_bytes = max(self.peak_bytes, sum(storage.nbytes() for storage in alive if storage is not None))
        return result


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, (list, tuple)):
        for part in tree:
            yield from _tensors(part)
    elif isinstance(tree, dict):
        yield from _tensors(list(tree.values()))


@dataclass
class Held:
    """What one call held beyond what was there before it."""

    live_bytes: int = 0
    process_bytes: int = 0


@contextmanager
def watch_live() -> Iterator[Held]:
    """The peak of live tensors. Costs time for each operation, so time is taken elsewhere."""
    held = Held()
    gc.collect()
    with Live() as live:
        yield held
    held.live_bytes = live.peak_bytes


@contextmanager
def watch_process() -> Iterator[Held]:
    """The process's high-water mark, from where it stands."""
    held = Held()
    gc.collect()
    before = _status_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # resets VmHWM
    yield held
    held.process_bytes = max(0, _status_bytes("VmHWM") - before)


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}")
