"""What the sparse indexer holds at its sources, with and without each of DynChunk's hooks, on all engine versions.

`python -m scripts.bench.source_peaks [--limit-mib 256] [--out FILE]`: the engine's real modules on the CPU. What they
hold is the peak of live tensors and, in a run of its own, the process's high-water mark; `same bits` compares outputs.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from dynchunk.policy import allocator
from dynchunk.policy.score_budget import MIB
from scripts.engine_wheels import VERSIONS, unpacked
from scripts.provenance import provenance

ROOT = Path(__file__).resolve().parent.parent.parent
ATTENTION = "sglang.srt.layers.attention."
EXPLAINED = (
    "MiB held at the peak, outputs counted, inputs not. V4.1 in torch holds three times what its limit "
    "counts. The process can show less than the tensors where it uses memory again that it had."
)
HEADER = (
    "| engine | what is held | limit | engine alone: live, process | with DynChunk: live, process | same bits |\n"
    "| --- | --- | --: | --: | --: | --- |"
)


def main(
    limit_mib: Annotated[int, typer.Option(help="The limit, as in DYNCHUNK_INDEXER_SCORE_MIB.")] = 256,
    out: Annotated[Path | None, typer.Option(help="Write the table to this file too.")] = None,
    version: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Print the table."""
    if version:
        for row in rows_of(version, limit_mib * MIB):
            print(json.dumps(row), flush=True)
        return
    lines = [provenance(), "", EXPLAINED, "", HEADER]
    print("\n".join(lines), flush=True)
    for one in VERSIONS:
        for row in _in_its_own_process(one, limit_mib):
            lines.append(_line(one, row))
            print(lines[-1], flush=True)
    lines += ["", *_reserve()]
    print("\n".join(lines[-2:]))
    if out is not None:
        out.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _in_its_own_process(version: str, limit_mib: int) -> Iterator[dict[str, Any]]:
    """Hooked as a server is: the boot folder on the path, this version's wheel in front."""
    path = [ROOT / "adapter" / "boot", unpacked(version), ROOT / "adapter", ROOT]
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("DYNCHUNK_", "SGLANG_"))}
    environ |= {
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        "OMP_NUM_THREADS": "1",
        "DYNCHUNK_INDEXER_SCORE_MIB": str(limit_mib),
    }
    command = ["-m", "scripts.bench.source_peaks", "--limit-mib", str(limit_mib), "--version", version]
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", *command],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as worker:
        assert worker.stdout is not None
        for line in worker.stdout:
            if line.startswith("{"):
                yield json.loads(line)
        _, said = worker.communicate()
    if worker.returncode:
        raise RuntimeError(f"{version}: {said[-2000:]}")


def _line(version: str, row: dict[str, Any]) -> str:
    def held(side: str) -> str:
        return f"{row[side][0] / MIB:,.0f}, {row[side][1] / MIB:,.0f}"

    same = "yes" if row["same"] else "NO"
    return f"| {version} | {row['what']} | {row['limit'] / MIB:,.0f} | {held('alone')} | {held('ours')} | {same} |"


def _reserve() -> list[str]:
    """What the workspace leaves reserved, from the allocator's model; this cannot be measured without a GPU."""
    wanted = range(2176, 262_144 + 2177, 2048)
    alone = allocator.ramp([[tokens * 1024] for tokens in wanted])
    ours = allocator.ramp([[(1 << (tokens - 1).bit_length()) * 1024] for tokens in wanted])
    prefix = allocator.ramp([[tokens * 1152] for tokens in wanted])
    left = (
        ("the workspace of the engine alone", alone),
        ("the workspace doubled", ours),
        ("DSA's dequantised prefix, which has no hook", prefix),
    )
    shown = [f"{what} {ramp.reserved_bytes / MIB:,.0f} ({ramp.segments_made} allocations)" for what, ramp in left]
    head = "In a model of torch's allocator, 262,144 tokens in chunks of 2,048 leave reserved, in MiB: "
    return [head + "; ".join(shown) + "."]


# ---- in a process of one engine version


def rows_of(version: str, limit: int) -> Iterator[dict[str, Any]]:
    """One row for each source that this version has."""
    if version != "0.5.20":
        yield from _tiles(limit)
        yield _torch_path(version, limit)
    yield from _fallback(limit)
    yield _workspace()


def _row(what: str, limit: int, alone: Callable[[], Any], ours: Callable[[], Any]) -> dict[str, Any]:
    from scripts.bench.indexer_world import watch_live, watch_process

    row: dict[str, Any] = {"what": what, "limit": limit}
    results = []
    for side, call in (("alone", alone), ("ours", ours)):
        with watch_process() as process:
            result = call()
        del result
        with watch_live() as live:
            result = call()
        results.append(result)
        row[side] = (live.live_bytes, process.process_bytes)
        # The other side must not count this one's result as its own, nor miss it.
        results[-1] = _copy(result)
        del result
    return row | {"same": _same(*results)}


def _set(owner: Any, name: str, value: Any) -> None:
    setattr(owner, name, value)


def _copy(result: Any) -> Any:
    import torch

    return [r.clone() for r in result if isinstance(r, torch.Tensor)] if isinstance(result, tuple) else [result.clone()]


def _same(one: list[Any], other: list[Any]) -> bool:
    import torch

    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def _tiles(limit: int) -> Iterator[dict[str, Any]]:
    """Three tiles of the V4.1 layers that score every key. All rows are alike, so the scores' source takes nothing."""
    import torch

    from scripts.bench import indexer_world
    from scripts.bench.indexer_world import V41, Given, World

    scoring = importlib.import_module(V41 + "scoring")
    full = importlib.import_module(V41 + "full_topk")
    table = importlib.import_module(V41 + "sparse_table")
    keys = 65_536
    world = World([3 * limit // (4 * keys)], [keys])
    world.source = Given(torch.arange(keys).remainder(1009).float()[None].expand(world.rows, -1))
    indexer_world.install(world)
    own_budget, own_tiles = 2 << 30, table.score_tiles

    def under(budget: int, tiles: Any, call: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> Any:
            _set(scoring, "_DEEP_GEMM_SCORE_BUDGET_BYTES", budget)
            _set(table, "score_tiles", tiles)
            return call()

        return run

    def top() -> Any:
        out = torch.full((world.rows, 512), -1, dtype=torch.int32)
        options = {"topk": 512} if full.dense_prefill_topk.__code__.co_varnames[2] == "topk" else {"out": out}
        selected = full.dense_prefill_topk(world.data(), (None, None), **options)
        return out if selected is None else selected

    def source() -> Any:
        positions, fields = indexer_world.publish(world, topk=512, topk_blocks=2048)
        return positions, fields["blocks"]

    what = f"V4.1 full top-k, {world.rows:,} x {keys:,}"
    yield _row(what, limit, under(own_budget, own_tiles, top), under(limit, own_tiles, top))
    what = f"V4.1 candidate source, {world.rows:,} x {keys:,}"
    yield _row(what, limit, under(limit, own_tiles.__wrapped__, source), under(limit, own_tiles, source))


def _torch_path(version: str, limit: int) -> dict[str, Any]:
    from scripts.bench import indexer_world
    from scripts.bench.indexer_world import V41

    scoring = importlib.import_module(V41 + "scoring")
    rows, keys = 192, 65_536
    select = indexer_world.torch_selection(version, rows=rows, keys=keys, heads=32, dim=128, topk=512)

    def under(budget: int) -> Callable[[], Any]:
        def run() -> Any:
            _set(scoring, "_TORCH_SCORE_BUDGET_BYTES", budget)
            return select()

        return run

    return _row(f"V4.1 in torch (Hopper), {rows} x {keys:,}", limit, under(1 << 30), under(limit))


def _fallback(limit: int) -> Iterator[dict[str, Any]]:
    from scripts.bench.indexer_world import fallback_inputs

    indexer = importlib.import_module(ATTENTION + "dsv4.indexer")
    rows, pages = 96, 256
    inputs = fallback_inputs(rows, pages, 64, ragged=True)
    for name, where in (("fp8_paged_mqa_logits_torch", ""), ("fp8_paged_mqa_logits_torch_sm120", ", SM120")):
        ours = getattr(indexer, name)

        def call(function: Callable[..., Any] = ours) -> Any:
            return function(*inputs)

        def alone(function: Callable[..., Any] = ours.__wrapped__) -> Any:
            return function(*inputs)

        yield _row(f"V4 in torch{where}, {rows} x {pages * 64:,}", limit, alone, call)


def _workspace() -> dict[str, Any]:
    """A prompt of 65,536 tokens in chunks of 2,048; each layer fills what it was given."""
    import torch

    from dynchunk.patches import kv_workspace

    _set(kv_workspace, "longest_tokens", lambda: 65_536 + 2176 + kv_workspace.SLACK_TOKENS)
    utils = importlib.import_module(ATTENTION + "dsv4.sparse_prefill_utils")
    cls = getattr(utils, "SparsePrefillKVBuffer", None) or utils.SparsePrefillWorkspace
    method = "_reserve" if hasattr(cls, "_reserve") else "get"
    hooked = vars(cls)[method]

    def ramp(function: Callable[..., Any]) -> Callable[[], Any]:
        def run() -> Any:
            _set(cls, method, function)
            buffer = cls(torch.device("cpu"))
            for tokens in range(2176, 65_536 + 2177, 2048):
                view = buffer.get(tokens).fill_(1)
            return view.clone()

        return run

    return _row("V4 workspace, 65,536 keys", 0, ramp(hooked.__wrapped__), ramp(hooked))


if __name__ == "__main__":
    typer.run(main)
