"""What DynChunk's decisions cost the scheduler: microseconds a predict, an admitted request, a pass.

`python -m scripts.bench.decision_cost [--repeats N] [--shortest-chunk-ms MS]`: stock and DynChunk in alternation in one
process, on the real PrefillAdder of the installed engine (stock is the same class with the hooks taken off). Medians of
the repeats; the difference is of pairs. No GPU, no server: only the arithmetic is timed.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import typer

from scripts.provenance import provenance

ROOT = Path(__file__).resolve().parent.parent.parent
HOOKED = ("__init__", "add_chunked_req", "add_one_req")
LOOPS = 200


def main(
    repeats: Annotated[int, typer.Option(help="Timed rounds.")] = 15,
    shortest_chunk_ms: Annotated[float, typer.Option(help="The shortest real chunk, to compare a pass with.")] = 20.0,
    in_this_process: Annotated[bool, typer.Option("--worker", hidden=True)] = False,
) -> None:
    """Print the tables."""
    if not in_this_process:
        # A process whose first import of the engine meets the start hook, as in a server.
        path = [str(ROOT / "adapter" / "boot"), str(ROOT / "adapter"), str(ROOT)]
        environ = {k: v for k, v in os.environ.items() if not k.startswith("DYNCHUNK_")}
        print(provenance())
        sys.stdout.flush()
        arguments = ["--repeats", str(repeats), "--shortest-chunk-ms", str(shortest_chunk_ms), "--worker"]
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-m", "scripts.bench.decision_cost", *arguments],
            env=environ | {"PYTHONPATH": os.pathsep.join(path)},
            stderr=subprocess.DEVNULL,
            check=False,
        )
        raise typer.Exit(done.returncode)
    measure(repeats, shortest_chunk_ms)


def measure(repeats: int, shortest_chunk_ms: float) -> None:
    """Time everything in this process."""
    import sglang.srt.managers.schedule_policy as engine

    from dynchunk.policy.budget import Budget
    from scripts.bench.admission_world import Setting, World

    limits = Budget(200_000_000, "prefix", page=64, chunk_min=256, chunk_max=2048)
    world = World(Setting(limits, engine_page=64, static=2048, align=None, floor=1))
    ours = engine.PrefillAdder
    stock = type("Stock", (ours,), {name: getattr(ours, name).__wrapped__ for name in HOOKED})

    predicts = [per_call_us(lambda: world.sizer.predict(200_000)) for _ in range(repeats)]
    print(f"predict: {statistics.median(predicts):.2f} us (the stock engine asks none)")

    print("\nMicroseconds.\n")
    print("| waiting, admitted | running | stock: a pass | DynChunk: a pass | added: a pass | added: a request |")
    print("| --: | --: | --: | --: | --: | --: |")
    worst = 0.0
    for waiting, running in ((1, 0), (8, 0), (32, 0), (128, 0), (32, 32), (32, 256), (128, 256)):
        pairs = [
            (
                per_call_us(one_pass(world, stock, waiting, running)),
                per_call_us(one_pass(world, ours, waiting, running)),
            )
            for _ in range(repeats)
        ]
        before, after = (statistics.median(side) for side in zip(*pairs, strict=True))
        added = statistics.median(b - a for a, b in pairs)
        worst = max(worst, added / waiting)
        print(f"| {waiting} | {running} | {before:.1f} | {after:.1f} | {added:.1f} | {added / waiting:.2f} |")
    print(f"\nat most {worst:.2f} us added for an admitted request")

    chunk = [per_call_us(continue_one(world, cls, running=0)) for cls in (stock, ours) for _ in range(repeats)]
    before, after = statistics.median(chunk[:repeats]), statistics.median(chunk[repeats:])
    share = (after - before + statistics.median(predicts)) / (shortest_chunk_ms * 1000)
    print(
        f"a pass that continues a long request: stock {before:.1f} us, DynChunk {after:.1f} us and the predict above; "
        f"together {share:.3%} of a chunk of {shortest_chunk_ms:g} ms"
    )


def per_call_us(call: Callable[[], Any]) -> float:
    """Microseconds of one call, over LOOPS of them."""
    start = time.perf_counter()
    for _ in range(LOOPS):
        call()
    return (time.perf_counter() - start) / LOOPS * 1e6


def one_pass(world: Any, cls: Any, waiting: int, running: int) -> Callable[[], None]:
    """A pass that admits `waiting` short requests beside `running` decoding ones."""
    from scripts.bench.admission_world import StandInAllocator, new_request

    requests = [new_request(f"r{i}", 16, 0, 0, new_names=world.new_names, ignore_eos=False) for i in range(waiting)]
    decoding = _decoding(running)
    batch = SimpleNamespace(reqs=decoding, batch_size=lambda: running)
    allocator = StandInAllocator(64)

    def run() -> None:
        adder = cls(64, world.tree, allocator, batch, 1.0, 16_384, 64 * 1024, 0)
        for request in requests:
            adder.add_one_req(request, has_chunked_req=False, truncation_align_size=None)

    return run


def continue_one(world: Any, cls: Any, running: int) -> Callable[[], None]:
    """A pass that runs one more chunk of a long request."""
    from scripts.bench.admission_world import StandInAllocator, new_request

    request = new_request("long", 500_000, 200_000 // 64 * 64, 0, new_names=world.new_names, ignore_eos=False)
    batch = SimpleNamespace(reqs=_decoding(running), batch_size=lambda: running)
    allocator = StandInAllocator(64)

    def run() -> None:
        cls(64, world.tree, allocator, batch, 1.0, 16_384, 960, 0).add_chunked_req(request)

    return run


def _decoding(count: int) -> list[Any]:
    sampling = SimpleNamespace(max_new_tokens=8, ignore_eos=False)
    return [SimpleNamespace(seqlen=10_000, sampling_params=sampling, output_ids=[], rid=f"d{i}") for i in range(count)]


if __name__ == "__main__":
    typer.run(main)
