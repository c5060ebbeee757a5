"""Traffic for engine tests, and what must be true of every batch it made."""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
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


def assert_log_agrees(server: Server) -> None:
    """The engine's own log has the same new tokens, batch by batch, as the trace (decoding rows aside)."""

    def agree() -> bool:
        logged = [int(new) for new, _ in PREFILL_LINE.findall(server.log.read_text())]
        traced = [
            sum(new for _, _, new in batch["reqs"] if not (batch["mode"] == "mixed" and new == 1))
            for batch in server.batches()
        ]
        # What the engine ran before the hook was in place is in the log only.
        return bool(traced) and logged[-len(traced) :] == traced

    wait_until(agree, what="log and trace do not agree")


def assert_ranks_agree(server: Server, others: int = 1) -> None:
    """Every other rank of this host ran the same batches; a rank writes its last line after the answer is out."""
    for path in ranks_traces(server, others):
        wait_until(
            lambda path=path: [b["reqs"] for b in server.batches(path)] == [b["reqs"] for b in server.batches()],
            what=f"{path.name}: this rank ran other batches",
        )


def ranks_traces(server: Server, others: int = 1) -> list[Path]:
    """The traces of the other ranks."""
    found: list[Path] = []

    def there() -> bool:
        found[:] = sorted(server.trace.parent.glob(f"{server.trace.name}.*"))
        return len(found) == others

    wait_until(there, what=f"there are not {others} traces of other ranks")
    return found


def assert_nothing_is_left(server: Server) -> None:
    """No request runs or waits, and the cache can be emptied, which the engine refuses while anything is held.

    Asked of the scheduler itself: the gauges in /metrics are up to half a minute old in an idle engine.
    """
    server.flush()
    names = ("num_running_reqs", "num_waiting_reqs", "num_used_tokens")
    wait_until(lambda: not any(load(server, name) for name in names), what="something is still held")


def load(server: Server, name: str) -> int:
    """One of the engine's numbers of now, over its replicas."""
    loads = server.client.get(f"{server.url}/v1/loads").raise_for_status().json()["loads"]
    return int(sum(one[name] for one in loads))


@contextmanager
def budget(server: Server, token_pairs: int, back_to: int) -> Iterator[None]:
    """Change the running server's budget for a while, as an operator does."""
    assert change_budget(server, token_pairs)
    wait_for_budget(server, token_pairs)
    try:
        yield
    finally:
        assert change_budget(server, back_to)
        wait_for_budget(server, back_to)


def wait_for_budget(server: Server, token_pairs: int) -> None:
    """A new budget rides the stream of requests: every rank adopts it where it processes it."""
    wait_until(lambda: server.state()["budget_in_force"] == token_pairs, what="the new budget is not in force")


def change_budget(server: Server, token_pairs: float) -> bool:
    """POST a new budget -> whether the server took it."""
    wanted = {"server_args": {"dynchunk_budget": token_pairs}}
    answer = server.client.post(f"{server.url}/set_internal_state", json=wanted).raise_for_status().json()
    return all(answer)


def wait_until(
    condition: Callable[[], object], timeout_s: float = 120, what: str = "it did not happen in time"
) -> None:
    """Raises AssertionError with `what` where `condition()` does not come true in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)
