"""Passes for the others while one long request is being prefilled; wraps the scheduler's prefill pass.

For the one pass that belongs to waiting requests, the open request is taken out of the scheduler's sight and put back
after it: then nothing counts a chunk that did not run (the engine's own parked state would count one). Nothing may be
cut in that pass, since only one unfinished request can be tracked; `patches/schedule_policy.py` sees to that, and to
the cache that the hidden request still needs.
"""

from __future__ import annotations

from typing import Any

from dynchunk import in_force, journal
from dynchunk.patches import facts
from dynchunk.policy import admission
from dynchunk.policy.admission import Load
from dynchunk.policy.budget import Budget
from dynchunk.policy.turns import Turn, Turns

# Long prompts that are asked whether they fit whole on a cached prefix; each costs a walk of the prefix tree.
LONG_CANDIDATES = 4


def configured(every: int) -> Turns:
    """Turns as configured; none where the engine's own order of passes must not be touched, with the reason noted."""
    reason = "DYNCHUNK_INTERLEAVE=0" if every == 0 else facts.own_order_of_passes()
    if reason is not None:
        journal.record("interleave", journal.NOT_IN_USE, reason)
        return Turns(every=0)
    journal.record("interleave", journal.APPLIED, f"after every {every} chunks")
    return Turns(every, slots=facts.pipeline_slots())


def take_turns(original: Any) -> Any:
    """Wrap `_get_new_batch_prefill_raw`, which returns (batch or None, running batch)."""

    def _get_new_batch_prefill_raw(self: Any, prefill_delayer_single_pass: Any, running_batch: Any) -> Any:
        open_req = self.chunked_req
        turn = _turn(self, running_batch)
        if turn is Turn.WAITING:
            batch, running_batch = _pass_for_waiting(self, original, prefill_delayer_single_pass, running_batch)
            if batch is not None:
                in_force.counts["passes_for_waiting"] += 1
                return batch, running_batch
            turn = _turn(self, running_batch)
        if turn is Turn.DECODE:
            # As with the engine's own --prefill-decode-interval: no prefill, so the pass goes to decoding.
            in_force.counts["passes_for_decoding"] += 1
            return None, running_batch
        result = original(self, prefill_delayer_single_pass, running_batch)
        if open_req is not None and result[0] is not None:
            in_force.turns.chunk_ran()
        return result

    return _get_new_batch_prefill_raw


def _turn(scheduler: Any, running_batch: Any) -> Turn:
    try:
        return _whose(scheduler, running_batch)
    except Exception as error:
        in_force.degrade(repr(error))
        return Turn.STOCK


def _whose(scheduler: Any, running_batch: Any) -> Turn:
    decoding = not (running_batch.is_empty() or running_batch.is_prefill_only or scheduler.is_mixed_chunk)
    turn = in_force.turns.next(
        long_open=scheduler.chunked_req is not None and in_force.active() is not None,
        waiting=bool(scheduler.waiting_queue),
        # With the engine's own interval set, decoding gets its passes there.
        decoding=decoding and not getattr(scheduler, "prefill_decode_interval", 0),
    )
    if turn is Turn.DECODE and not _leaves_room(scheduler, running_batch):
        in_force.counts["decoding_held_back"] += 1
        return Turn.STOCK
    return turn


def _leaves_room(scheduler: Any, running_batch: Any) -> bool:
    """Whether the rest of the open request still fits into the cache after one more step of decoding.

    The engine made sure of it once, when it admitted the prompt, and counted on nothing else running until its end: a
    chunk that finds no room ends the server.
    """
    open_req, page = scheduler.chunked_req, scheduler.page_size
    rest = facts.total_tokens(open_req) - facts.prefix_tokens(open_req)
    wanted = _whole_pages(rest, page) + page
    return bool(facts.cache_left_tokens(scheduler) - running_batch.new_tokens_required_next_decode() >= wanted)


def _pass_for_waiting(scheduler: Any, original: Any, delayer: Any, running_batch: Any) -> Any:
    """One prefill pass without the open request, over the waiting requests that may fit whole."""
    open_req, queue = scheduler.chunked_req, scheduler.waiting_queue
    limits = in_force.active()
    try:
        fitting = [] if limits is None else _candidates(scheduler, queue, running_batch, limits)
    except Exception as error:
        in_force.degrade(repr(error))
        fitting = []
    if not fitting:
        return None, running_batch
    offered = set(map(id, fitting))
    scheduler.chunked_req, scheduler.waiting_queue = None, fitting
    in_force.hidden = open_req
    try:
        return original(scheduler, delayer, running_batch)
    finally:
        in_force.hidden = None
        scheduler.chunked_req = open_req
        left = scheduler.waiting_queue
        still_waiting = set(map(id, left))
        known = set(map(id, queue))
        # The queue's own order, less who was admitted, and whoever came meanwhile (preempted, a grammar got ready).
        scheduler.waiting_queue = [req for req in queue if id(req) not in offered or id(req) in still_waiting] + [
            req for req in left if id(req) not in known
        ]


def _candidates(scheduler: Any, queue: list[Any], running_batch: Any, limits: Budget) -> list[Any]:
    """Waiting requests that may fit into one chunk whole, in the order of the queue.

    The engine stops at the first that does not, so whoever is sure to be refused must not stand in front of the others:
    a second long prompt, or one whose cached prefix leaves no room for the rest of it. A long prompt with all but a
    little of it in the prefix cache (the next turn of a chat) is a short one.
    """
    # In a mixed batch the decoding requests come first.
    decoding = running_batch.reqs if scheduler.is_mixed_chunk else []
    load = Load(len(decoding), facts.longest_decoding(decoding))
    chunk = scheduler.chunked_prefill_size - load.rows
    adapters = _adapters(scheduler, running_batch)
    found = []
    asked = 0
    for req in queue:
        if adapters is not None and req.lora_id not in adapters:
            continue
        tokens, prefix = len(req.origin_input_ids) + len(req.output_ids), 0
        if tokens > chunk:
            # With mamba, matching puts the request's state aside; only the engine's own loop cleans that up.
            if asked >= LONG_CANDIDATES or scheduler.tree_cache.supports_mamba():
                continue
            asked += 1
            req.init_next_round_input(scheduler.tree_cache)
            # What is on the host may not come, and then it would have to be cut.
            prefix = facts.prefix_tokens(req)
            tokens -= prefix
        whole = _whole_pages(tokens, scheduler.page_size)
        timely = in_force.latency.room_in_company(load.ticks, prefix)
        if timely is not None and timely < tokens:
            continue
        if whole <= chunk and admission.rows_that_fit(limits, load, prefix, tokens) == tokens:
            found.append(req)
    return found


def _whole_pages(tokens: int, page: int) -> int:
    return -(-tokens // page) * page


def _adapters(scheduler: Any, running_batch: Any) -> set[Any] | None:
    """The LoRA adapters that are in use; None without LoRA.

    The engine counts those of a batch against its limit and cannot see the open request's in this pass. Who brings none
    of their own are safe to offer.
    """
    if not scheduler.enable_lora:
        return None
    return {req.lora_id for req in [scheduler.chunked_req, *running_batch.reqs]}
