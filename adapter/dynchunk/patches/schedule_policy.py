"""sglang.srt.managers.schedule_policy: hold every prefill batch to the budget as it is put together.

The engine asks a sizer only for the chunks after the first. `PrefillAdder` is where everything else is decided: the
first chunk of a request that lands on a cached prefix, and who joins a batch. Its methods are wrapped (rather than a
subclass handed in through `get_prefill_adder_class`, which exists from 0.5.22 on only), and the means is always the
same: `rem_chunk_tokens`, the adder's own limit, is lowered for one candidate, so that all of the engine's accounting
stays its own.

What must hold, or requests are lost in silence: the engine can track one unfinished request. After a cut nothing else
may be admitted, so the limit stays at zero then; while a cut request is open nothing may be cut; a request that has to
wait is answered OTHER (NO_TOKEN would shut admission); and an empty batch always takes the floor.
"""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import Any

from dynchunk import in_force, journal, settings
from dynchunk.contract import Patch, apply_all
from dynchunk.patches import contracts, facts
from dynchunk.policy import admission
from dynchunk.policy.admission import Ask, Cut, Load
from dynchunk.policy.budget import Budget, end_aligned
from dynchunk.prefill_log import bound_of

LOAD = "_dynchunk_load"
WHY = "_dynchunk_why"  # (the most that time allowed, whether the floor runs) of the candidate at hand
DECODED_PER_REQUEST = 4096  # the engine's CLIP_MAX_NEW_TOKENS: what it reserves for an answer at most


def apply(module: ModuleType) -> None:
    """Patch PrefillAdder."""
    global _engine
    mode = settings.current().mode
    _engine = module
    patches = [
        Patch(contracts.ADDER_INIT, _count_decoding_rows),
        Patch(contracts.ADD_CHUNKED, _continue_within_budget),
        Patch(contracts.ADD_ONE, _admit_within_budget),
        Patch(contracts.ADD_ONE_IGNORE_EOS),
        Patch(contracts.SELECT),
    ]
    apply_all(module, patches, change=mode == "on", hint=contracts.HINT)
    journal.record("admission", journal.APPLIED if mode == "on" else journal.WOULD_APPLY)


_engine: Any = None


def _applies(adder: Any) -> Budget | None:
    """The limits, or None for batches that must not be cut: chunking off (multimodal included) and diffusion models."""
    if adder.rem_chunk_tokens is None or adder.dllm_config is not None:
        return None
    return in_force.active()


def _count_decoding_rows(original: Any) -> Any:
    def adder_init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        # Position 7 in every version: the decoding requests that will run along in a mixed batch.
        mixed_rows = args[7] if len(args) > 7 else kwargs.get("num_mixed_decode_tokens", 0)
        load = Load(mixed_rows)
        setattr(self, LOAD, load)
        try:
            if mixed_rows:
                load.longest = facts.longest_decoding(self.running_batch.reqs)
            if in_force.hidden is not None:
                _reserve(self, in_force.hidden)
            if _applies(self) is not None:
                # The decoding rows were taken off a chunk that the budget had made small: never mind, up to a page, as
                # long as all rows fit into what the engine's buffers are made for.
                least = min(self.page_size, in_force.static_tokens - mixed_rows)
                self.rem_chunk_tokens = max(self.rem_chunk_tokens, least)
        except Exception as error:
            in_force.degrade(repr(error))
            if in_force.hidden is not None:
                self.rem_chunk_tokens = 0  # nothing joins where the hidden request's cache is not kept for it

    return adder_init


def _reserve(adder: Any, req: Any) -> None:
    """Keep the cache that the hidden request still needs from those who are admitted meanwhile."""
    left = max(req.sampling_params.max_new_tokens - len(req.output_ids), 0)
    rest = facts.total_tokens(req) - facts.prefix_tokens(req)
    tokens = adder.ceil_paged_tokens(rest) + min(left, DECODED_PER_REQUEST) + adder.page_size
    budget = getattr(adder, "memory_budget", None)
    if budget is not None:
        budget.total_offset += tokens
        budget.current_offset += tokens
        budget.swa_offset += adder.rem_chunk_tokens or 0
    else:  # 0.5.20
        adder.rem_total_token_offset += tokens
        adder.cur_rem_token_offset += tokens
        adder.rem_swa_token_offset += adder.rem_chunk_tokens or 0


def _continue_within_budget(original: Any) -> Any:
    def add_chunked_req(self: Any, req: Any) -> Any:
        limits = _applies(self)
        if limits is not None:
            try:
                _lower_for_chunk(self, req, limits)
            except Exception as error:
                in_force.degrade(repr(error))
        admitted = len(self.can_run_list)
        result = original(self, req)
        if limits is not None and len(self.can_run_list) > admitted:
            try:
                _count(getattr(self, LOAD), limits, req)
            except Exception as error:
                in_force.degrade(repr(error))
            _follow(self, req, limits)
        return result

    return add_chunked_req


def _lower_for_chunk(adder: Any, req: Any, limits: Budget) -> None:
    load: Load = getattr(adder, LOAD)
    if adder.rem_chunk_tokens <= 0:
        # The engine would go on with less than nothing. This request has to go on, or nothing would.
        adder.rem_chunk_tokens = adder.page_size
        in_force.counts["floor: mixed chunk"] += 1
        in_force.say_once(
            "mixed chunk",
            f"{load.rows:,} decoding requests take all of a chunk; one page of {adder.page_size:,} tokens runs",
        )
    prefix = facts.prefix_tokens(req)
    remaining = facts.total_tokens(req) - prefix
    cut, cause = in_force.cut()
    granted = admission.continue_chunk(limits, load, prefix, remaining, cut)
    tokens = min(granted.tokens, adder.rem_chunk_tokens)
    timely = in_force.latency.cap(limits, cut, req.rid, prefix, remaining, first=False)
    setattr(adder, WHY, (timely, granted.at_floor))
    if timely is not None:
        tokens = min(tokens, max(timely, admission.aligned_floor(cut, prefix)))
    if tokens < remaining:
        # The engine takes what is left of its chunk to the token, decoding rows taken off it and all.
        aligned = end_aligned(tokens, prefix, cut.align)
        if aligned < cut.floor:
            aligned = max(aligned, end_aligned(tokens, prefix, adder.page_size))
        tokens = aligned if aligned > 0 else tokens
    if tokens < min(remaining, adder.rem_chunk_tokens):
        # Never restored: what is left of the chunk must not be offered to others while this request is open.
        adder.rem_chunk_tokens = tokens
        in_force.counts["chunks_lowered"] += 1
    if granted.at_floor:
        _note_floor(req, cause, prefix, granted.tokens, load)


def _admit_within_budget(original: Any) -> Any:
    def add_one_req(self: Any, req: Any, has_chunked_req: bool, truncation_align_size: int | None) -> Any:
        limits = _applies(self)
        whole_only = in_force.hidden is not None
        if limits is None and not whole_only:
            return original(self, req, has_chunked_req, truncation_align_size)
        must_be_whole = has_chunked_req or whole_only
        lowered = _room_or_wait(self, req, limits, must_be_whole=must_be_whole)
        if lowered is None:
            in_force.counts["deferred"] += 1
            return _engine.AddReqResult.OTHER
        room, self.rem_chunk_tokens = self.rem_chunk_tokens, lowered
        admitted = len(self.can_run_list)
        try:
            result = original(self, req, has_chunked_req, truncation_align_size)
        finally:
            used = lowered - self.rem_chunk_tokens
            self.rem_chunk_tokens = 0 if self.new_chunked_req is req else room - used
        if len(self.can_run_list) == admitted:
            return result
        if limits is not None:
            try:
                _take_in(self, req, limits, used, may_cut=not must_be_whole and admitted == 0)
            except Exception as error:
                in_force.degrade(repr(error))
        # The engine's verdict was on the lowered limit.
        return self.budget_state()

    return add_one_req


def _take_in(adder: Any, req: Any, limits: Budget, used: int, *, may_cut: bool) -> None:
    """Count an admitted request, as it was really admitted: loading its prefix from the host may have changed it.

    used: what the engine took off its chunk for it. A load that brought more than was promised makes the prefix longer
    than the decision knew, one that failed leaves more to compute; where that breaks the budget, a request that is cut
    anyway is cut shorter, and one that is alone (may_cut) is cut after all.
    """
    load: Load = getattr(adder, LOAD)
    prefix, new = facts.prefix_tokens(req), facts.new_tokens(req)
    # Where the engine fills chunks to the token, it takes no whole pages off.
    taken = new if getattr(adder, "exact_chunk_fill", False) else adder.ceil_paged_tokens(new)
    replayed = max(0, used - taken)
    before = Load(load.rows + replayed, load.longest)
    if req.host_hit_length and (may_cut or adder.new_chunked_req is req):
        cut, _ = in_force.cut()
        fits = admission.rows_that_fit(limits, before, prefix, new)
        shorter = new if fits >= new else max(fits // cut.align * cut.align, cut.floor)
        if shorter < new:
            facts.shorten(req, shorter)
            adder.new_chunked_req, adder.rem_chunk_tokens = req, 0
            in_force.counts["shortened_after_load"] += 1
    _count(load, limits, req, replayed)
    _follow(adder, req, limits)


def _count(load: Load, limits: Budget, req: Any, replayed: int = 0) -> None:
    prefix, new = facts.prefix_tokens(req), facts.new_tokens(req)
    load.ticks = in_force.latency.ticks(prefix, new, load.ticks)
    load.add(limits, prefix, new, replayed)
    in_force.latency.admitted(req.rid, prefix + new)


def _follow(adder: Any, req: Any, limits: Budget) -> None:
    """Tell who follows the long prefill of a chunk that was admitted. Decides nothing."""
    prefills = in_force.prefills
    if prefills is None:
        return
    try:
        prefix, new, total = facts.prefix_tokens(req), facts.new_tokens(req), facts.total_tokens(req)
        cap, at_floor = getattr(adder, WHY, (None, False))
        bound = bound_of(limits, cap, new=new, remaining=total - prefix, at_floor=at_floor)
        prefills.chunk(req.rid, prefix, new, total, bound)
    except Exception as error:
        in_force.prefills = None
        journal.record("prefill log", journal.REFUSED, f"broken, and off from now on: {error!r}")


def _room_or_wait(adder: Any, req: Any, limits: Budget | None, *, must_be_whole: bool) -> int | None:
    """What to lower the adder's chunk to for this request; None if it has to wait."""
    if adder.new_chunked_req is not None or adder.rem_chunk_tokens <= 0:
        return None
    try:
        return _room_for(adder, req, limits, must_be_whole=must_be_whole)
    except Exception as error:
        in_force.degrade(repr(error))
        # Without our rule the engine decides, except that in a pass for others nothing may be cut.
        return None if in_force.hidden is not None else int(adder.rem_chunk_tokens)


def _room_for(adder: Any, req: Any, limits: Budget | None, *, must_be_whole: bool) -> int | None:
    """What to lower the adder's chunk to for this request; None if it has to wait."""
    room = int(adder.rem_chunk_tokens)
    prefix = facts.prefix_tokens(req)
    if not must_be_whole:
        # Nothing may be cut otherwise, and should loading from the host fail, there is more to compute than it seemed.
        prefix += req.host_hit_length
    remaining = facts.total_tokens(req) - prefix
    replay = facts.replay_tokens(adder, req, prefix)
    charge = int(adder.ceil_paged_tokens(remaining) + replay)
    if limits is None:  # our own rule has failed while a pass belonged to waiting requests: only whole ones, as ever
        return room if charge <= room else None
    load: Load = getattr(adder, LOAD)
    so_far = Load(load.rows + replay, load.longest)
    alone = not adder.can_run_list and not must_be_whole
    if req.host_hit_length and not alone:
        # Loading lengthens the prefix, by more than was promised even, and what must stay whole cannot be cut then.
        so_far.longest = max(so_far.longest, facts.total_tokens(req))
        # A load that fails leaves more to compute, of which the engine takes whole pages.
        if admission.rows_that_fit(limits, so_far, prefix, charge) < charge:
            return None
    cut, cause = in_force.cut()
    ask = Ask(prefix, remaining, charge, room, may_cut=not must_be_whole, alone=alone)
    timely = _timely(limits, cut, req, ask, load)
    granted = admission.admit(timely, so_far, ask, cut)
    if granted is None:
        return None
    setattr(adder, WHY, (None if timely is limits else timely.chunk_max, granted.at_floor))
    if granted.at_floor:
        _note_floor(req, cause, prefix, granted.tokens, load)
    if granted.tokens >= remaining:
        if not alone:
            return min(room, charge)
        # Alone it must get what the engine can cut at the least: a prefix that does not come from the host after all
        # leaves more to compute.
        return min(room, max(charge, cut.floor + replay) if req.host_hit_length else charge)
    # Beside many decoding rows it may be less than a step; whole pages then, as long as there is one.
    tokens = granted.tokens // adder.page_size * adder.page_size or granted.tokens
    if tokens + replay < room:
        in_force.counts["first_chunks_lowered"] += 1
    return int(min(room, tokens + replay))


def _timely(limits: Budget, cut: Cut, req: Any, ask: Ask, load: Load) -> Budget:
    """The limits, with the largest chunk lowered to what time allows this request now."""
    if ask.alone:
        timely = in_force.latency.cap(limits, cut, req.rid, ask.prefix, ask.remaining, first=True)
        timely = None if timely is None else max(timely, cut.floor)
    else:
        timely = in_force.latency.room_in_company(load.ticks, ask.prefix)
    return limits if timely is None else replace(limits, chunk_max=min(limits.chunk_max, timely))


def _note_floor(req: Any, cause: str, prefix: int, tokens: int, load: Load) -> None:
    """Count a chunk at its floor, and say it once a request, if it exceeds the budget."""
    limits = in_force.active()
    if limits is None:
        return
    after = Load(load.rows, load.longest)
    after.add(limits, prefix, tokens)
    if after.within(limits):
        return
    in_force.counts[f"floor_over_budget: {cause}"] += 1
    in_force.say_once(
        f"floor {req.rid}",
        f"request {req.rid}: from a prefix of {prefix:,} tokens on its chunks are at the floor of {tokens:,} tokens "
        f"({cause}), which exceeds the budget of {limits.budget:,}",
    )
