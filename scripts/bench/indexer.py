"""Memory and time of DeepSeek-V4.1's selection against the prefix: all keys at once, tiles of rows, blocks of keys.

`python -m scripts.bench.indexer [--rows 256] [--repeats 3] [--out FILE]`: the engine's own Python on the CPU, torch in
place of the kernels that need a GPU, all ways in one run. Time is the process's CPU time; a ratio is the median of
pairs. GPU kernels differ: what carries over is what is held, and that every call has one shape.
"""

from __future__ import annotations

import importlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from dynchunk.policy.score_budget import KEY_BLOCK, MIB
from scripts.engine_wheels import VERSIONS, unpacked
from scripts.provenance import provenance

ROOT = Path(__file__).resolve().parent.parent.parent
KEYS = (16_384, 65_536, 262_144, 1_048_576)
SCORED_KEYS = (16_384, 65_536, 262_144)
BLOCKS = (2048, 8192, KEY_BLOCK)
TOPK, TOPK_BLOCKS = 512, 2048
LAYERS = {
    "full": f"the best {TOPK} of all keys",
    "source": f"those, and the best {TOPK_BLOCKS:,} blocks of 8 keys",
    "consumer": f"the best {TOPK} keys of {TOPK_BLOCKS:,} blocks",
}


def main(
    rows: Annotated[int, typer.Option(help="Query rows of a chunk.")] = 256,
    scored_rows: Annotated[int, typer.Option(help="Query rows where the engine's own scoring is timed too.")] = 32,
    repeats: Annotated[int, typer.Option(help="Timed rounds.")] = 3,
    out: Annotated[Path | None, typer.Option(help="Write what is printed to this file too.")] = None,
    worker: Annotated[bool, typer.Option("--worker", hidden=True)] = False,
) -> None:
    """Print the tables."""
    if worker:
        measure(rows, scored_rows, repeats)
        return
    path = [ROOT / "adapter" / "boot", unpacked(VERSIONS[-1]), ROOT / "adapter", ROOT]
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("DYNCHUNK_", "SGLANG_"))}
    environ |= {"PYTHONPATH": os.pathsep.join(map(str, path)), "OMP_NUM_THREADS": "1", "DYNCHUNK_INDEXER": "keys"}
    given = ["--rows", str(rows), "--scored-rows", str(scored_rows), "--repeats", str(repeats), "--worker"]
    lines = [provenance()]
    print(lines[0], flush=True)
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "scripts.bench.indexer", *given],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if not line.startswith("Cannot detect"):
                lines.append(line.rstrip("\n"))
                print(lines[-1], flush=True)
    if process.returncode:
        raise typer.Exit(process.returncode)
    if out is not None:
        out.write_text("\n".join(lines) + "\n", encoding="utf-8")


# ---- in the engine's process

Call = Callable[[], Any]


def measure(rows: int, scored_rows: int, repeats: int) -> None:
    """Every table, in this process."""
    for layer, what in LAYERS.items():
        blocks = BLOCKS if layer == "full" else (KEY_BLOCK,)
        names = ["all at once", "rows", *(f"keys {b:,}" for b in blocks)]
        print(f"\n**{layer}**: {what}, for {rows} rows\n")
        _head("keys", [f"{name}: MiB live, process; time" for name in names])
        for keys in KEYS:
            ways = selections(layer, rows, keys, blocks)
            held = [f"{live:,.0f}, {process:,.0f}" for live, process in map(_held, ways)]
            _row(keys, [f"{mib}; {ratio}" for mib, ratio in zip(held, _ratios(ways, repeats), strict=True)])
    print(f"\n**with the engine's own scoring** (32 heads, bf16), for {scored_rows} rows\n")
    _head("keys", [f"{layer}: all at once, keys {KEY_BLOCK:,}" for layer in LAYERS])
    for keys in SCORED_KEYS:
        cells = []
        for layer in LAYERS:
            at_once, _, by_keys = selections(layer, scored_rows, keys, (KEY_BLOCK,), scored=True)
            cells.append(", ".join(_ratios([at_once, by_keys], repeats)))
        _row(keys, cells)
    print("\nRows in which a tie decides about the last key taken:")
    for kind in ("bf16", "fp32"):
        print(f"- {kind} scores: " + ", ".join(f"{_tied(kind, keys):.0%} at {keys:,} keys" for keys in SCORED_KEYS))


def _head(first: str, names: list[str]) -> None:
    print(f"| {first} | " + " | ".join(names) + " |\n| --: |" + " --: |" * len(names))


def _row(keys: int, cells: list[str]) -> None:
    print(f"| {keys:,} | " + " | ".join(cells) + " |", flush=True)


def selections(layer: str, rows: int, keys: int, blocks: tuple[int, ...], *, scored: bool = False) -> list[Call]:
    """One call for each way to select: all keys at once, tiles of rows, blocks of keys. All under one limit."""
    import torch

    from dynchunk.patches import indexer_keys
    from scripts.bench import indexer_world
    from scripts.bench.indexer_world import BLOCK, V41, Given, Scored, World

    scoring: Any = importlib.import_module(V41 + "scoring")
    full: Any = importlib.import_module(V41 + "full_topk")
    dense: Any = importlib.import_module(V41 + "dense_blocks")
    world = World([rows], [keys])
    generator = torch.Generator().manual_seed(1)
    if scored:
        q, k = (torch.randn(*shape, generator=generator).bfloat16() for shape in ((rows, 32, 128), (keys, 128)))
        world.source = Scored(q, k, torch.randn(rows, 32, generator=generator).bfloat16())
    else:
        # One row for all, so that the scores' source takes no memory.
        world.source = Given(torch.randn(1, keys, generator=generator).expand(rows, -1))
    indexer_world.install(world)
    out = torch.full((rows, TOPK), -1, dtype=torch.int32)
    source = {"topk": TOPK, "topk_blocks": TOPK_BLOCKS, "block_size": BLOCK}
    published = torch.stack([torch.randperm(-(-keys // BLOCK), generator=generator)[:TOPK_BLOCKS] for _ in range(rows)])
    consumer = {"topk": TOPK, "blocks": published.int(), "block_size": BLOCK}
    ours, more = {
        "full": (full.dense_prefill_topk, {"out": out}),
        "source": (dense._publish_prefill_blocks, source),  # noqa: SLF001
        "consumer": (dense._consume_prefill_blocks, consumer),  # noqa: SLF001
    }[layer]
    limit = rows * KEY_BLOCK * 4

    def way(function: Callable[..., Any], budget: int, block: int) -> Call:
        def run() -> Any:
            scoring._DEEP_GEMM_SCORE_BUDGET_BYTES = budget  # noqa: SLF001
            indexer_keys._block_keys = lambda *_: block  # noqa: SLF001
            return function(data=world.data(), kv=(None, None), **more)

        return run

    stock = ours.__wrapped__
    return [way(stock, 1 << 50, 0), way(stock, limit, 0), *(way(ours, limit, block) for block in blocks)]


def _held(call: Call) -> tuple[float, float]:
    from scripts.bench.indexer_world import watch_live, watch_process

    with watch_process() as process:
        call()
    with watch_live() as live:
        call()
    return live.live_bytes / MIB, process.process_bytes / MIB


def _ratios(ways: list[Call], repeats: int) -> list[str]:
    """Seconds of the first way, and what the others take of it."""
    taken = [[_cpu_s(way) for way in ways] for _ in range(repeats)]
    first = [f"{statistics.median(row[0] for row in taken):.2f} s"]
    return first + [f"{statistics.median(row[i] / row[0] for row in taken):.2f}x" for i in range(1, len(ways))]


def _cpu_s(call: Call) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start


def _tied(kind: str, keys: int, rows: int = 64) -> float:
    import torch
    from sglang.srt.layers.attention.dsv4.dsv41_sparse import DeepseekV41Indexer

    generator = torch.Generator().manual_seed(4)
    shapes = ((rows, 32, 128), (keys, 128), (rows, 32))
    q, k, weights = (torch.randn(*shape, generator=generator) for shape in shapes)
    if kind == "bf16":
        q, k, weights = q.bfloat16(), k.bfloat16(), weights.bfloat16()
    tied = 0
    for row in range(rows):
        scores = DeepseekV41Indexer.scores(None, q[row : row + 1], k, weights[row : row + 1])
        best = scores.topk(TOPK + 1, dim=1).values[0]
        tied += bool(best[TOPK - 1] == best[TOPK])
    return tied / rows


if __name__ == "__main__":
    typer.run(main)
