"""Passes for others beside the real PrefillAdder; test_versions.py runs this once for each engine version."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dynchunk import in_force
from dynchunk.latency_sizing import LatencySizing
from dynchunk.patches import facts, turns
from dynchunk.policy import calibration, latency
from dynchunk.policy.budget import PREFIX, Budget
from dynchunk.policy.turns import Turn, Turns
from scripts.bench.admission_world import Setting, StandInAllocator, World, new_request

PAGE, STATIC, PROMPT = 64, 2048, 400_000
LIMITS = Budget(200_000_000, PREFIX, PAGE, 256, STATIC)


class CountingPool(StandInAllocator):
    """A KV pool with so many tokens left."""

    def __init__(self, left: int) -> None:
        super().__init__(PAGE)
        self.left = left

    def available_size(self) -> int:
        return self.left

    def take(self, tokens: int) -> None:
        pages = -(-tokens // PAGE) * PAGE
        assert pages <= self.left, f"the pool has {self.left:,} tokens for {tokens:,}: the engine would end"
        self.left -= pages


def world(running: list[Any]) -> World:
    in_force.latency = LatencySizing()
    in_force.counts.clear()
    return World(Setting(LIMITS, PAGE, STATIC, None, 1, 2, True), running)


def stream(number: int, context: int, left: int) -> Any:
    """A decoding request with `left` tokens to go."""
    return SimpleNamespace(
        seqlen=context,
        sampling_params=SimpleNamespace(max_new_tokens=left, ignore_eos=False),
        output_ids=[],
        rid=f"s{number}",
        origin_input_ids=range(10),
        lora_id=None,
    )


def scheduler_of(here: World, **given: Any) -> Any:
    """What patches/turns.py reads of a scheduler."""
    usual = {"is_mixed_chunk": False, "prefill_decode_interval": 0, "enable_lora": False, "waiting_queue": []}
    return SimpleNamespace(**(usual | given), page_size=PAGE, chunked_prefill_size=STATIC, tree_cache=here.tree)


@pytest.mark.parametrize("room", [2, 4_000, 40_000])
@pytest.mark.parametrize("streams", [4, 16, 64])
def test_decoding_leaves_the_open_prompt_its_cache(streams: int, room: int) -> None:
    """A prompt that the engine admitted at the moment it fitted ends, however much the streams beside it decode."""
    running = [stream(n, 2_000, 1_000) for n in range(streams)]
    here = world(running)
    prompt = new_request("long", PROMPT, 0, 0, new_names=here.new_names, ignore_eos=False)
    ratio = 0.1  # how much of what streams may still decode the engine counts on
    pool = CountingPool(PROMPT + 8 + PAGE + round(streams * 1_000 * ratio) + room)
    batch = SimpleNamespace(reqs=running, batch_size=lambda: len(running), is_empty=lambda: not running)
    batch.is_prefill_only = False
    batch.new_tokens_required_next_decode = lambda: PAGE * sum(req.seqlen % PAGE == 0 for req in running)
    in_force.turns = Turns(2)
    scheduler = scheduler_of(here, chunked_req=None, token_to_kv_pool_allocator=pool)
    decoded = 0

    def adder(chunk: int) -> Any:
        return here.engine.PrefillAdder(PAGE, here.tree, pool, batch, ratio, 65_536, chunk, 0)

    first = adder(STATIC)
    first.add_one_req(prompt, has_chunked_req=False, truncation_align_size=None)
    scheduler.chunked_req = first.new_chunked_req
    assert scheduler.chunked_req is prompt, "not admitted"
    while scheduler.chunked_req is not None:
        pool.take(facts.new_tokens(prompt))
        here._computed(prompt)
        in_force.turns.chunk_ran()
        while turns._whose(scheduler, batch) is Turn.DECODE:
            decoded += 1
            pool.take(batch.new_tokens_required_next_decode())
            for req in running:
                req.seqlen += 1
        size = here.sizer.predict(facts.prefix_tokens(prompt))
        scheduler.chunked_req = adder(size).add_chunked_req(prompt)
    pool.take(facts.new_tokens(prompt))
    assert not in_force.degraded
    assert decoded > 0 or room == 2
    if room < streams * 100:
        assert in_force.counts["decoding_held_back"] > 0


def offered(here: World, queue: list[Any], **given: Any) -> list[str]:
    """Whom a pass for waiting requests is offered to, after each was really admitted."""
    prompt = new_request("long", PROMPT, 100_032, 0, new_names=here.new_names, ignore_eos=False)
    prompt.lora_id = "C"
    scheduler = scheduler_of(here, chunked_req=prompt, **given)
    batch = SimpleNamespace(reqs=here.running, batch_size=lambda: len(here.running))
    found = turns._candidates(scheduler, queue, batch, LIMITS)
    mixed = len(here.running) if given.get("is_mixed_chunk") else 0
    in_force.hidden = prompt
    adder = here.engine.PrefillAdder(PAGE, here.tree, StandInAllocator(PAGE), batch, 1.0, 65_536, STATIC, mixed)
    for req in found:
        adder.add_one_req(req, has_chunked_req=False, truncation_align_size=None)
    in_force.hidden = None
    assert adder.can_run_list == found, "one who is offered is refused, and stands in front of the others"
    return [req.rid for req in found]


def queue_of(here: World, **tokens: int) -> list[Any]:
    made = []
    for rid, total in tokens.items():
        req = new_request(rid, total, 0, 0, new_names=here.new_names, ignore_eos=False)
        req.lora_id = rid.upper()
        made.append(req)
    return made


def test_who_cannot_be_admitted_is_not_offered() -> None:
    """Beside a long context in a mixed batch, or under a time limit: the short one behind gets the pass."""
    here = world([stream(n, 300_000, 8) for n in range(4)])
    assert offered(here, queue_of(here, a=1_500, b=100), is_mixed_chunk=True) == ["b"]
    here = world([])
    in_force.latency = LatencySizing(latency.parse_mode("30ms"), stages=1)
    in_force.latency.adopt(calibration.Update(latency.from_ms(3.25e-7, 6.03e-3, 26.1, 5.39e-4), False, ""))
    assert offered(here, queue_of(here, a=1_500, b=100)) == ["b"]


def test_no_further_adapter_joins_a_hidden_prompt() -> None:
    """The engine counts a batch's LoRA adapters without the open request's: nobody brings one of their own."""
    decoding = stream(0, 500, 8)
    decoding.lora_id = "A"
    here = world([decoding])
    assert offered(here, queue_of(here, b=100, a=100, c=100), enable_lora=True) == ["a", "c"]
    assert offered(here, queue_of(here, b=100, a=100, c=100)) == ["b", "a", "c"]
