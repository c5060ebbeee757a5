"""Random traffic for a while on the real engine, and nothing may be left of it.

`python -m scripts.verify.soak [--minutes 30]`: serves the CPU reference platform with DynChunk and sends it what a busy
day brings: prompts of 100 to 40,000 tokens, follow-ups on cached prefixes, short ones in between, streams, aborts in
the middle. In the end every batch of the trace must have kept the budget, every request must have been answered or
aborted by us, running and queued requests and the KV pool must be at zero by the engine's own metrics, and the engine's
own leak checks, which run whenever it is idle, must not have fired. Exit code 1 otherwise.
"""

from __future__ import annotations

import random
import shutil
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import httpx
import psutil
import typer

from scripts.provenance import provenance
from scripts.reference import Server, prompt, serving

BUDGET = 8_000_000
FLOOR = 256
CLIENTS = 6
FOLDER = Path(".cache", "soak")  # log and trace of the last soak
METRICS = ("sglang:num_running_reqs", "sglang:num_queue_reqs", "sglang:token_usage")


def main(
    minutes: Annotated[float, typer.Option(help="How long to send traffic.")] = 30.0,
    seed: Annotated[int, typer.Option(help="Where the random traffic starts.")] = 1,
    flag: Annotated[list[str] | None, typer.Option(help="A further flag of the engine; may be repeated.")] = None,
) -> None:
    """Soak the engine, then look for what is left."""
    print(provenance())
    print("CPU reference platform, not a GPU.")
    shutil.rmtree(FOLDER, ignore_errors=True)
    with serving(
        FOLDER,
        *("--chunked-prefill-size", "2048", "--enable-metrics", *(flag or [])),
        DYNCHUNK_BUDGET=str(BUDGET),
        SGLANG_ENABLE_RANK_CONSENSUS_CHECKER="1",
    ) as server:
        server.tokens(prompt(3_000, 1), max_new_tokens=4)
        server.flush()
        memory_before = _memory_mib(server)
        seen = traffic(server, minutes, seed)
        problems = _problems(server)
        print(f"{minutes:g} minutes of traffic: " + ", ".join(f"{name} {n}" for name, n in sorted(seen.items())))
        print(
            f"memory of the engine's processes: {memory_before:,.0f} MiB before, {_memory_mib(server):,.0f} MiB after"
        )
        print(f"DynChunk counted: {server.state()['counts']}")
        for problem in problems:
            print(f"PROBLEM: {problem}")
        print("nothing is left" if not problems else f"{len(problems)} problems")
        raise typer.Exit(1 if problems else 0)


def traffic(server: Server, minutes: float, seed: int) -> Counter[str]:
    """Send random requests from a few clients until the time is up. -> what was sent and what came back."""
    seen: Counter[str] = Counter()
    ends = time.monotonic() + minutes * 60
    clients = [threading.Thread(target=_client, args=(server, ends, f"{seed}/{n}", seen)) for n in range(CLIENTS)]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    return seen


def _client(server: Server, ends: float, seed: str, seen: Counter[str]) -> None:
    draw = random.Random(seed)  # noqa: S311 - reproducible, not secret
    shared = [prompt(draw.choice([2_000, 8_000, 20_000]), draw.randrange(10**6)) for _ in range(3)]
    number = 0
    while time.monotonic() < ends:
        number += 1
        rid = f"soak-{seed}-{number}"
        tokens = draw.choice([100, 500, 500, 1_500, 4_000, 12_000, 40_000])
        prefix = draw.choice([[], [], *shared])
        ids = [*prefix, *prompt(draw.randint(tokens // 2, tokens), draw.randrange(10**9))]
        new = draw.choice([1, 4, 16, 64])
        give_up = draw.random() < 0.15
        if give_up:
            threading.Timer(draw.uniform(0.1, 4), server.abort, (rid,)).start()
        try:
            if draw.random() < 0.3:
                kind = "streamed" if server.stream(ids, new, rid) else "streamed, empty"
            else:
                answer = server.generate(ids, rid=rid, max_new_tokens=new, ignore_eos=draw.random() < 0.5)
                kind = _kind(answer, new, give_up=give_up)
        except httpx.HTTPError as error:
            kind = f"failed: {type(error).__name__}"
        seen[kind] += 1
        time.sleep(draw.choice([0, 0, 0.2, 1.5]))


def _kind(answer: dict[str, Any], new: int, *, give_up: bool) -> str:
    ended = answer["meta_info"]["finish_reason"]["type"]
    if ended == "abort":
        return "aborted by us" if give_up else "failed: aborted by the engine"
    return "answered" if len(answer["output_ids"]) == new else "failed: cut short"


def _problems(server: Server) -> list[str]:
    problems = []
    server.flush()  # refuses while anything is running, queued or locked
    time.sleep(3)
    metrics = server.client.get(f"{server.url}/metrics").text.splitlines()
    problems += [
        f"left after the last request: {line}"
        for line in metrics
        if line.startswith(METRICS) and float(line.rsplit(" ", 1)[1]) != 0
    ]
    # From the traffic on: what the engine says while it starts is not about it.
    log = server.log.read_text(errors="replace").partition("Prefill batch")[2]
    problems += [
        f"the engine's log says {word!r}"
        for word in ("leak", "Traceback", "Found rank divergence", "SIGQUIT")
        if word in log
    ]
    batches = server.batches()
    over = 0
    for batch in batches:
        longest = max(prefix for _, prefix, _ in batch["reqs"])
        if batch["rows"] * longest > BUDGET and not (len(batch["reqs"]) == 1 and batch["rows"] <= FLOOR):
            over += 1
    print(f"{len(batches):,} prefill batches, {over} over the budget that were not one request at its floor")
    if over:
        problems.append(f"{over} batches broke the budget")
    if server.state()["degraded"]:
        problems.append("DynChunk fell back to the engine's own sizes")
    return problems


def _memory_mib(server: Server) -> float:
    processes = [psutil.Process(server.process.pid), *psutil.Process(server.process.pid).children(recursive=True)]
    return sum(process.memory_info().rss for process in processes) / 2**20


if __name__ == "__main__":
    typer.run(main)
