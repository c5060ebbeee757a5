"""Time to the first token on two pipeline stages: static chunks, the engine's own sizer, DynChunk's latency modes.

`python -m scripts.bench.pipeline_ttft OUT_FOLDER [--rounds N] [--repeats N]`: the real engine with `--pp-size 2` on the
CPU reference platform, whose stages are paced: each takes what a planted model says (paced/sitecustomize.py says why).
DynChunk is not told the model, it learns it, in a server of its own first, and keeps it in a file. One server after the
other, round after round, so that a slow minute of the machine does not fall on one arm. Prompts of 8k, 16k and 32k
tokens one at a time, then four of 8k at once. Prints a table; chunks.png shows each chunk's time at 32k.
"""

from __future__ import annotations

import shutil
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import matplotlib as mpl
import typer

from scripts.provenance import provenance
from scripts.reference import Server, prompt, serving

LENGTHS = (8_000, 16_000, 32_000)
CROWD, CROWD_TOKENS = 4, 8_000
LARGEST = 2048
CACHE = Path(".cache", "bench-pipeline")
PACED = Path(__file__).resolve().parent / "paced"
# a, b, c, gamma: the best static size depends on the length, and what the engine does between two forwards (10 ms here,
# which no forward shows) is little beside them, as it is on a GPU.
PLANTED_MS = (4e-6, 0.12, 20.0, 5e-5)
# The memory rule is out of the way: this is about time.
ENVIRON = {
    "OMP_NUM_THREADS": "1",
    "BENCH_PACE_MS": ",".join(map(str, PLANTED_MS)),
    "DYNCHUNK_BUDGET": "1e12",
    "DYNCHUNK_CHUNK_MIN": "128",
}


@dataclass(frozen=True)
class Arm:
    """One way to size chunks. latency: None is the stock engine."""

    name: str
    chunk: int = LARGEST
    latency: str | None = None
    flags: tuple[str, ...] = ()


ARMS = (
    *(Arm(f"static {chunk}", chunk) for chunk in (256, 512, 1024, 2048)),
    Arm("engine's own sizer", flags=("--enable-dynamic-chunking",)),
    Arm("equal", latency="equal"),
    Arm("pipeline", latency="pipeline"),
)


@contextmanager
def _server(arm: Arm, model_file: Path) -> Iterator[Server]:
    ours = {"DYNCHUNK_MODE": "off"}
    if arm.latency is not None:
        ours = {"DYNCHUNK_LATENCY": arm.latency, "DYNCHUNK_MODEL_FILE": str(model_file.absolute())}
    flags = ("--pp-size", "2", "--chunked-prefill-size", str(arm.chunk), *arm.flags)
    folder = CACHE / arm.name.replace(" ", "-")
    with serving(folder, *flags, engine_path=(PACED,), **(ENVIRON | ours)) as server:
        server.tokens(prompt(4_000, 77))  # kernels and allocator warm up
        yield server


def learn(model_file: Path) -> str:
    """Serve long prompts until a model stands. -> what it is."""
    model_file.unlink(missing_ok=True)
    with _server(Arm("learning", latency="equal"), model_file) as server:
        for number in range(24):
            server.flush()
            server.tokens(prompt(32_000, 500 + number))
            state = server.state()["latency"]
            if state["state"] != "calibrating":
                break
        return f"{state['state']} after {number + 1} prompts of 32,000 tokens: {state['reason']}"


def measure(server: Server, repeats: int, seed: int) -> dict[str, list[float]]:
    """Seconds to the first token by length, and seconds for a crowd of prompts."""
    seconds = defaultdict(list)
    for repeat in range(repeats):
        for length in LENGTHS:
            _flush(server)
            start = time.monotonic()
            server.tokens(prompt(length, seed + repeat), rid=f"{length}-{seed + repeat}")
            seconds[f"{length:,}"].append(time.monotonic() - start)
    _flush(server)
    start = time.monotonic()
    with ThreadPoolExecutor(CROWD) as crowd:
        list(crowd.map(lambda n: server.tokens(prompt(CROWD_TOKENS, seed + 100 + n)), range(CROWD)))
    seconds["crowd"].append(time.monotonic() - start)
    return seconds


def _flush(server: Server) -> None:
    """The first stage answers while the second still empties its cache: a request that has passed both waits for it."""
    server.flush()
    server.tokens(prompt(64, 1))


def main(
    out: Annotated[Path, typer.Argument(help="Folder for the table and the plot.")],
    rounds: Annotated[int, typer.Option(help="Rounds over all arms.")] = 3,
    repeats: Annotated[int, typer.Option(help="Prompts of each length in a round.")] = 2,
) -> None:
    """Measure all arms and write pipeline_ttft.md and chunks.png."""
    shutil.rmtree(CACHE, ignore_errors=True)  # traces of an earlier run would be read as this one's
    CACHE.mkdir(parents=True)
    model_file = CACHE / "model.json"
    learned = learn(model_file)
    seconds: dict[str, dict[str, list[float]]] = {arm.name: defaultdict(list) for arm in ARMS}
    # The trace needs DynChunk: the static arm of the plot is a server of its own, with the budget out of the way.
    with _server(Arm("static, traced", latency="off"), model_file) as server:
        server.tokens(prompt(LENGTHS[-1], 1), rid="static")
        chunks = {"static 2048": _chunk_times(server, "static")}
    out.mkdir(parents=True, exist_ok=True)
    for number in range(rounds):
        for arm in ARMS:
            with _server(arm, model_file) as server:
                for what, values in measure(server, repeats, 1000 * (number + 1)).items():
                    seconds[arm.name][what] += values
                if arm.latency is not None:
                    chunks[arm.name] = _chunk_times(server, f"{LENGTHS[-1]}-{1000 * (number + 1)}")
        # After each round: what has been measured is kept.
        text = _table(seconds, chunks, learned)
        (out / "pipeline_ttft.md").write_text(text, encoding="utf-8")
        _plot(chunks, out / "chunks.png")
    print(text)


def _chunk_times(server: Server, rid: str) -> list[tuple[int, int, float]]:
    """(prefix, tokens, ms) of each chunk of one request on the first stage."""
    return [
        (prefix, tokens, batch["ms"])
        for batch in server.batches()
        for batch_rid, prefix, tokens in batch["reqs"]
        if batch_rid == rid
    ]


def _table(
    seconds: dict[str, dict[str, list[float]]], chunks: dict[str, list[tuple[int, int, float]]], learned: str
) -> str:
    columns = [f"{length:,}" for length in LENGTHS]
    best = {c: min(statistics.median(seconds[a.name][c]) for a in ARMS if a.name.startswith("static")) for c in columns}
    samples = len(next(iter(seconds.values()))[columns[0]])
    what = (
        "The real engine with two pipeline stages on the CPU reference platform, not a GPU; stages are paced by "
        f"a, b, c, gamma = {PLANTED_MS} ms, and compute no attention. Medians of {samples} in seconds to the first "
        f"token, and against the best static size at that length; the last column is {CROWD} prompts of "
        f"{CROWD_TOKENS:,} tokens at once, seconds until all are answered."
    )
    head = "| chunks | " + " | ".join(columns) + f" | {CROWD} x {CROWD_TOKENS:,} |"
    rule = "| --- |" + " --: |" * (len(columns) + 1)
    lines = [provenance(), "", what, "", f"Learning: {learned}", "", head, rule]
    for name, row in seconds.items():
        cells = [f"{statistics.median(row[c]):.2f} ({statistics.median(row[c]) / best[c]:.2f})" for c in columns]
        lines.append(f"| {name} | " + " | ".join([*cells, f"{statistics.median(row['crowd']):.2f}"]) + " |")
    lines += [
        "",
        f"Chunk times of one prompt of {LENGTHS[-1]:,} tokens on the first stage, the last chunk left out:",
        "",
    ]
    for name, times in chunks.items():
        ms = [took for _, _, took in times[:-1]]
        sizes = [tokens for _, tokens, _ in times[:-1]]
        spread = statistics.pstdev(ms) / statistics.mean(ms)
        lines.append(
            f"- {name}: {len(ms)} chunks of {min(sizes):,} to {max(sizes):,} tokens, "
            f"{min(ms):.0f} to {max(ms):.0f} ms, coefficient of variation {spread:.1%}"
        )
    return "\n".join(lines) + "\n"


def _plot(chunks: dict[str, list[tuple[int, int, float]]], path: Path) -> None:
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
    for name, times in chunks.items():
        axes.plot([p for p, _, _ in times], [ms for _, _, ms in times], marker=".", label=name)
    axes.set(xlabel="prefix, tokens", ylabel="ms for a chunk, first stage", title="CPU reference platform, 2 stages")
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    typer.run(main)
