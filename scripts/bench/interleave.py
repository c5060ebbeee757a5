"""What others get while a long prompt is being prefilled, and what the long prompt pays.

`python -m scripts.bench.interleave [--repeats N] [--only "NAME;..."]`: on the CPU reference platform, one server after
the other (the stock engine, its own remedies, DynChunk with several DYNCHUNK_INTERLEAVE), each asked the same: a stream
is decoding, a prompt of 48,000 tokens comes, and a few seconds later a request of 500 tokens with 16 to generate.
Medians of the repeats; the arms differ by seconds, the machine's noise by tenths.
"""

from __future__ import annotations

import statistics
import threading
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import typer

from scripts.provenance import provenance
from scripts.reference import Server, prompt, serving

LONG_TOKENS, SHORT_TOKENS, SHORT_NEW = 48_000, 500, 16
STREAM_NEW = 30_000  # more than it gets before it is aborted, or the gap would be that of an ended stream
BUDGET = "16M"
SHORTEST_FIRST = ("--schedule-policy", "shortest-prefill-first")


@dataclass(frozen=True)
class Arm:
    """One way to serve."""

    name: str
    mode: str
    interleave: int = 0
    flags: tuple[str, ...] = ()


ARMS = (
    Arm("stock", "off"),
    Arm("stock, --prefill-decode-interval 1", "off", flags=("--prefill-decode-interval", "1")),
    Arm(
        "stock, --schedule-policy shortest-prefill-first", "off", flags=("--schedule-policy", "shortest-prefill-first")
    ),
    Arm(
        "stock, both",
        "off",
        flags=("--prefill-decode-interval", "1", "--schedule-policy", "shortest-prefill-first"),
    ),
    Arm("DynChunk, interleave 0", "on", 0),
    Arm("DynChunk, interleave 1", "on", 1),
    Arm("DynChunk, interleave 2", "on", 2),
    Arm("DynChunk, interleave 4", "on", 4),
    Arm("DynChunk, interleave 8", "on", 8),
    Arm("DynChunk, interleave 4, --prefill-decode-interval 1", "on", 4, ("--prefill-decode-interval", "1")),
)


@dataclass
class Seen:
    """Seconds of one repeat."""

    long_s: float
    short_first_s: float
    short_last_s: float
    longest_gap_s: float


def measure(server: Server, seed: int) -> Seen:
    """One repeat: the stream, the long prompt, the short request."""
    server.flush()
    stream_times: list[float] = []
    stream = threading.Thread(
        target=lambda: stream_times.extend(server.stream(prompt(200, seed), STREAM_NEW, f"stream{seed}"))
    )
    stream.start()
    time.sleep(1.5)
    spans: dict[str, tuple[float, float]] = {}

    def long() -> None:
        start = time.monotonic()
        server.stream(prompt(LONG_TOKENS, seed + 1), 1, f"long{seed}")
        spans["long"] = (start, time.monotonic())

    long_prompt = threading.Thread(target=long)
    long_prompt.start()
    time.sleep(4)
    start = time.monotonic()
    tokens = server.stream(prompt(SHORT_TOKENS, seed + 2), SHORT_NEW, f"short{seed}")
    long_prompt.join()
    server.abort(f"stream{seed}")
    stream.join()
    if len(stream_times) >= STREAM_NEW:
        raise RuntimeError("the decoding stream ended before the long prompt did; raise STREAM_NEW")
    began, ended = spans["long"]
    during = [t for t in stream_times if began <= t <= ended]
    gaps = [b - a for a, b in pairwise([began, *during, ended])]
    return Seen(ended - began, tokens[0] - start, tokens[-1] - start, max(gaps))


def main(
    repeats: Annotated[int, typer.Option(help="Repeats of each arm.")] = 3,
    only: Annotated[str, typer.Option(help="Names of arms, by semicolons; all by default.")] = "",
) -> None:
    """Print one row an arm."""
    wanted = set(filter(None, only.split(";")))
    print(provenance())
    print("CPU reference platform, not a GPU. Seconds, medians.\n")
    print("| arm | long prompt | short: first token | short: last token | longest gap of a decoding stream |")
    print("| --- | --: | --: | --: | --: |")
    for arm in ARMS:
        if wanted and arm.name not in wanted:
            continue
        with serving(
            Path(".cache", "bench-interleave"),
            *arm.flags,
            DYNCHUNK_MODE=arm.mode,
            DYNCHUNK_BUDGET=BUDGET,
            DYNCHUNK_INTERLEAVE=str(arm.interleave),
        ) as server:
            seen = [measure(server, 1000 * i) for i in range(repeats + 1)][1:]
        row = [
            statistics.median(getattr(s, name) for s in seen)
            for name in ("long_s", "short_first_s", "short_last_s", "longest_gap_s")
        ]
        print(f"| {arm.name} | " + " | ".join(f"{value:.1f}" for value in row) + " |", flush=True)


if __name__ == "__main__":
    typer.run(main)
