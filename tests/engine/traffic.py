"""Traffic for engine tests, and what must be true of every batch it made."""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.reference import Server, prompt

LOGPROB_TOLERANCE = 2e-3  # fp32 sums in another order; the distance between the two best tokens is far larger
PREFILL_LINE = re.compile(r"Prefill batch.*?#new-token: (\d+), #cached-token: (\d+)")


@dataclass(frozen=True)
class Ask:
    """One request: its prompt is a shared prefix and a part of its own."""

    rid: str
    tokens: tuple[int, ...]
    new_tokens: int = 8
    # With it the engine reserves all of an answer's cache beforehand, and never has to retract.
    ignore_eos: bool = True

    @classmethod
    def of(cls, rid: str, tokens: int, seed: int, prefix: Sequence[int] = (), new_tokens: int = 8) -> Ask:
        return cls(rid, (*prefix, *prompt(tokens, seed)), new_tokens)


def answer(server: Server, ask: Ask) -> dict[str, Any]:
    """Ask and return the engine's answer with log probabilities."""
    return server.generate(
        list(ask.tokens),
        rid=ask.rid,
        max_new_tokens=ask.new_tokens,
        ignore_eos=ask.ignore_eos,
        return_logprob=True,
    )


def answer_all(server: Server, asks: Sequence[Ask]) -> dict[str, dict[str, Any]]:
    """Ask all at once."""
    with ThreadPoolExecutor(len(asks)) as pool:
        return dict(zip([a.rid for a in asks], pool.map(lambda a: answer(server, a), asks), strict=True))


def assert_same(ours: dict[str, Any], stock: dict[str, Any]) -> None:
    """Greedy tokens are equal and log probabilities within the tolerance."""
    assert ours["output_ids"] == stock["output_ids"]
    for mine, theirs in zip(
        ours["meta_info"]["output_token_logprobs"], stock["meta_info"]["output_token_logprobs"], strict=True
    ):
        assert abs(mine[0] - theirs[0]) < LOGPROB_TOLERANCE


def assert_every_batch_keeps_the_budget(
    batches: Iterable[dict[str, Any]], budget: int, floor: int, rule: str = "prefix"
) -> int:
    """Rows x longest <= budget, or a single request (decoding rows aside) at its floor. -> how many were that."""
    at_floor = 0
    for batch in batches:
        reqs = batch["reqs"]
        rows = sum(new for _, _, new in reqs)
        longest = max(prefix + (new if rule == "sequence" else 0) for _, prefix, new in reqs)
        assert all(new > 0 for _, _, new in reqs)
        if rows * longest <= budget:
            continue
        prefilling = [(prefix, new) for _, prefix, new in reqs if not (batch["mode"] == "mixed" and new == 1)]
        assert len(prefilling) == 1, f"{rows} rows x {longest} is over the budget: {reqs}"
        assert prefilling[0][1] <= floor, f"{prefilling[0]} is over the budget and above the floor of {floor}"
        at_floor += 1
    return at_floor


def assert_chunks_follow_each_other(batches: Iterable[dict[str, Any]], answers: dict[str, dict[str, Any]]) -> None:
    """Each request's chunks start where the one before ended, from what the engine says was cached to the whole prompt.

    Independent of the trace's own prefixes: the start is in the answer, the lengths add up.
    """
    chunks = defaultdict(list)
    for batch in batches:
        for rid, prefix, new in batch["reqs"]:
            if rid in answers and not (batch["mode"] == "mixed" and new == 1):
                chunks[rid].append((prefix, new))
    for rid, made in answers.items():
        meta = made["meta_info"]
        at = meta["cached_tokens"]
        for prefix, new in chunks[rid]:
            assert prefix == at, f"{rid}: a chunk starts at {prefix}, the one before ended at {at}"
            at = prefix + new
        assert at == meta["prompt_tokens"], f"{rid}: {at} of {meta['prompt_tokens']} tokens were computed"


def assert_log_agrees(log: Path, batches: Sequence[dict[str, Any]]) -> None:
    """The engine's own log has the same new tokens, batch by batch, as the trace (decoding rows aside)."""
    logged = [int(new) for new, _ in PREFILL_LINE.findall(log.read_text())]
    traced = [
        sum(new for _, _, new in batch["reqs"] if not (batch["mode"] == "mixed" and new == 1)) for batch in batches
    ]
    # What the engine ran before the hook was in place is in the log only.
    assert logged[-len(traced) :] == traced


def wait_until(condition: Callable[[], object], timeout_s: float = 60) -> None:
    """Raises AssertionError where `condition()` does not come true in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)
