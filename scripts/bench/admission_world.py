"""A world for the engine's real PrefillAdder: queues, cached prefixes, decoding rows, and what must hold in every pass.

The adder, its budgets and DynChunk's hooks are the real ones of whatever SGLang this Python finds; the cache, the
allocator and the requests are stand-ins with the attributes the adder reads. What a pass ran is judged here from the
requests alone, by arithmetic of its own.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from dynchunk import in_force
from dynchunk.patches import facts, schedule_policy
from dynchunk.policy.budget import PREFIX, SEQUENCE, Budget
from dynchunk.policy.turns import Turn, Turns
from dynchunk.sizer import BudgetSizer

MOST_PASSES_A_QUEUE = 200_000
# One of the requests that decode beside a mixed batch is through after so many passes.
PASSES_A_DECODING_REQUEST = 4


class StandInAllocator:
    """A KV pool that never runs out."""

    def __init__(self, page: int) -> None:
        self.page_size = page

    def available_size(self) -> int:
        return 10**9

    def create_prefill_budget(self, tree: Any, num_mixed_decode_tokens: int = 0) -> Any:
        from sglang.srt.mem_cache.prefill_budget import PrefillBudget

        return PrefillBudget(self, tree, num_mixed_decode_tokens=num_mixed_decode_tokens)

    def request_slot_reserve(self, **_: Any) -> int:
        return 0


class StandInTree:
    """A prefix cache that locks nothing. `loads`: tokens that a load from the host brings, by request id."""

    disable = False
    buffer_pipeline = None
    linker = None

    def __init__(self, *, disable: bool = False) -> None:
        self.disable = disable
        self.loads: dict[str, int] = {}

    def supports_mamba(self) -> bool:
        return False

    def supports_prefix_sharing(self) -> bool:
        return True

    def is_tree_cache(self) -> bool:
        return True

    def evictable_size(self) -> int:
        return 0

    def full_evictable_size(self) -> int:
        return 0

    def lock(self, node: Any) -> object:
        return object()

    def unlock(self, lock: Any) -> None:
        pass

    def inc_lock_ref(self, node: Any) -> Any:
        return SimpleNamespace(to_dec_params=lambda: None)

    def dec_lock_ref(self, node: Any, params: Any = None) -> None:
        pass

    def init_load_back(self, params: Any) -> tuple[Any, Any]:
        tokens = self.loads[params.req.rid]
        # Up to 0.5.21 the slots themselves come back, later their number.
        return (_Slots(tokens) if hasattr(params.req, "set_extend_range") else tokens), params.req.last_node

    def load_back_is_cache_owned(self) -> bool:
        return False

    def finish_storage_prefetch_admission(self, *_: Any, **__: Any) -> None:
        pass

    def discard_storage_prefetch_accounting(self, *_: Any, **__: Any) -> None:
        pass


class _Slots:
    """A list of KV slots of which only the length matters."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    def __len__(self) -> int:
        return self.tokens


def new_request(rid: str, total: int, prefix: int, host: int, *, new_names: bool, ignore_eos: bool) -> Any:
    """A request as the adder sees it. new_names: 0.5.22 and later count tokens where earlier ones list slots."""
    req: Any = SimpleNamespace(
        rid=rid,
        full_untruncated_fill_ids=range(total),
        origin_input_ids=range(total),
        output_ids=[],
        sampling_params=SimpleNamespace(max_new_tokens=8, ignore_eos=ignore_eos),
        host_hit_length=host,
        swa_host_hit_length=0,
        auxiliary_swa_host_hit_length=0,
        mamba_host_hit_length=0,
        storage_hit_length=0,
        storage_hit_start=0,
        host_hit_is_storage=False,
        host_loaded_length=0,
        last_node=object(),
        best_match_node=object(),
        kv=SimpleNamespace(holds_mamba=False, req_pool_idx=None, cache_protected_len=prefix),
        mamba_pool_idx=None,
        req_pool_idx=None,
        cache_protected_len=prefix,
        retracted_stain=False,
        lock=None,
        cache_request_handle=None,
        inflight_middle_chunks=0,
        needs_host_load_back=lambda: req.host_hit_length > 0,
        materialized_host_hit_len=lambda: req.host_loaded_length,
        fulfilled_storage_hit_len=lambda prefix_len: 0,
    )
    if new_names:
        return _CountingRequest(**vars(req), prefix_len=prefix, extend_end=prefix)
    req.prefix_indices = _Joinable(prefix)
    req.extend_range = SimpleNamespace(start=prefix, end=prefix, length=0)

    def set_extend_range(start: int, end: int) -> None:
        req.extend_range = SimpleNamespace(start=start, end=end, length=end - start)

    req.set_extend_range = set_extend_range
    return req


class _CountingRequest(SimpleNamespace):
    @property
    def extend_len(self) -> int:
        return int(self.extend_end - self.prefix_len)


class _Joinable(_Slots):
    """Slots that can be joined with more of them, as the engine does after a load (through torch.cat)."""


@dataclass
class Setting:
    """One engine and one budget. Tokens; rule as in policy/budget.py."""

    limits: Budget
    engine_page: int
    static: int
    align: int | None
    floor: int
    interleave: int = 0
    radix: bool = True


@dataclass
class World:
    """One engine with a queue. Raises AssertionError at the first broken promise; counts what it saw."""

    setting: Setting
    running: list[Any] = field(default_factory=list)
    seen: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        s = self.setting
        import sglang.srt.managers.schedule_policy as engine

        self.engine = engine
        self.new_names = not hasattr(_request_class(), "set_extend_range")
        _answer_for_the_engines_configuration(engine)
        in_force.limits = s.limits
        in_force.static_tokens = s.static
        in_force.degraded = False
        in_force.hidden = None
        in_force.floors = {"DYNCHUNK_CHUNK_MIN": s.limits.chunk_min, "page": s.engine_page, "engine": s.floor}
        in_force.truncation_align = lambda: s.align
        in_force._said.clear()  # noqa: SLF001
        self.tree = StandInTree(disable=not s.radix)
        self.sizer = BudgetSizer(None, lambda: in_force.cut()[0])
        self.turns = Turns(s.interleave)
        self.open: Any = None
        self.waiting: list[Any] = []

    def request(self, rid: str, total: int, prefix: int, host: int = 0, loaded: int | None = None) -> None:
        """Add a request to the queue. loaded: what loading its host prefix will bring, if not what was promised."""
        page = self.setting.engine_page
        prefix = min(prefix, total - 1) // page * page
        host = min(host, max(0, total - 1 - prefix)) // page * page
        req = new_request(rid, total, prefix, host, new_names=self.new_names, ignore_eos=not self.setting.radix)
        if host:
            self.tree.loads[rid] = host if loaded is None else min(loaded, total - 1 - prefix) // page * page
        self.waiting.append(req)

    def run(self) -> None:
        """Prefill everything."""
        passes = 0
        while self.waiting or self.open is not None:
            passes += 1
            assert passes < MOST_PASSES_A_QUEUE, "no end: livelock"
            if self.running and passes % PASSES_A_DECODING_REQUEST == 0:
                self.running.pop()
            turn = self.turns.next(long_open=self.open is not None, waiting=bool(self.waiting), decoding=False)
            if turn is Turn.WAITING and self._pass(hide=True):
                self.seen["passes for waiting"] += 1
                continue
            if not self._pass(hide=False):
                # The engine then decodes, and who is through leaves the chunk to others.
                assert self._spare() < in_force.cut()[0].align, "an empty pass with requests waiting"
                self.running.pop()
                self.seen["passes for want of room beside decoding"] += 1
        self.seen["passes"] += passes

    def _pass(self, *, hide: bool) -> bool:
        """One prefill pass, as the scheduler makes it. -> whether anything ran."""
        s = self.setting
        open_before = self.open
        chunk = s.static
        continuing = None if hide else self.open
        if continuing is not None:
            size = self.sizer.predict(facts.prefix_tokens(continuing))
            assert size is not None
            assert 0 < size <= s.static
            chunk = size
        in_force.hidden = self.open if hide else None
        batch = SimpleNamespace(reqs=self.running, batch_size=lambda: len(self.running))
        adder = self.engine.PrefillAdder(
            s.engine_page, self.tree, StandInAllocator(s.engine_page), batch, 1.0, 16_384, chunk, len(self.running)
        )
        still_open = None
        if continuing is not None:
            still_open = adder.add_chunked_req(continuing)
        offered = self.waiting
        if hide:  # as patches/turns.py chooses them
            offered = [r for r in offered if facts.total_tokens(r) - facts.prefix_tokens(r) <= s.static]
        for req in offered:
            if adder.budget_state() == self.engine.AddReqResult.OTHER:
                break
            result = adder.add_one_req(req, has_chunked_req=still_open is not None, truncation_align_size=s.align)
            if result != self.engine.AddReqResult.CONTINUE:
                break
        in_force.hidden = None
        ran = list(adder.can_run_list)
        self._judge(ran, hide=hide)
        self.waiting = [req for req in self.waiting if req not in ran]
        if adder.new_chunked_req is not None:
            assert still_open is None, "a second unfinished request: the engine would lose one"
            assert not hide, "a request was cut in a pass that cannot track it"
            still_open = adder.new_chunked_req
        self.open = open_before if hide else still_open
        unfinished = [req for req in ran if _end(req) < facts.total_tokens(req)]
        assert unfinished == ([still_open] if still_open in ran else []), "an unfinished request is not tracked"
        if not hide and still_open is not None:
            self.turns.chunk_ran()
        for req in ran:
            self._computed(req)
        return bool(ran)

    def _spare(self) -> int:
        """What the decoding rows of a mixed batch leave of the engine's chunk."""
        return self.setting.static - len(self.running)

    def _judge(self, ran: list[Any], *, hide: bool) -> None:
        """What must hold for any batch that runs."""
        s, limits = self.setting, self.setting.limits
        if not ran:
            return
        new = [facts.new_tokens(req) for req in ran]
        assert all(tokens > 0 for tokens in new), f"a chunk of {min(new)} tokens"
        rows = sum(new) + len(self.running)
        decoding = [req.seqlen for req in self.running]
        if limits.rule == PREFIX:
            longest = max([facts.prefix_tokens(req) for req in ran] + decoding)
        else:
            longest = max([facts.prefix_tokens(req) + n for req, n in zip(ran, new, strict=True)] + decoding)
        for req in ran:
            if _end(req) < facts.total_tokens(req):
                # Beside as many decoding rows the engine itself takes what is left of its chunk to the token.
                assert _end(req) % s.engine_page == 0 or self._spare() < s.engine_page, "cut inside a page"
        # An open request has to go on, with a page, even where decoding rows take all of the chunk.
        assert rows <= s.static or (ran == [self.open] and self._spare() <= 0), "more rows than the static chunk"
        if rows * longest <= limits.budget:
            return
        align = in_force.cut()[0].align
        # Alone, and no larger than the floor (which an odd prefix may lengthen to the next boundary).
        assert len(ran) == 1, f"{len(ran)} requests over the budget: {rows:,} x {longest:,} > {limits.budget:,}"
        assert not hide, "a pass for waiting requests over the budget"
        slack = align if facts.prefix_tokens(ran[0]) % align else 0
        floor = in_force.cut()[0].floor
        assert new[0] <= floor + slack, f"{new[0]:,} tokens on {longest:,} are over the budget and the floor {floor:,}"
        self.seen["floor passes over the budget"] += 1
        self.seen[f"floor set by {in_force.cut()[1]}"] += 1

    def _computed(self, req: Any) -> None:
        end = _end(req)
        req.host_hit_length = 0
        if self.new_names:
            req.prefix_len = end
        else:
            req.prefix_indices = _Joinable(end)


def _end(req: Any) -> int:
    return facts.prefix_tokens(req) + facts.new_tokens(req)


def _request_class() -> Any:
    from sglang.srt.managers.schedule_batch import Req

    return Req


def _answer_for_the_engines_configuration(engine: Any) -> None:
    """The adder asks the published server configuration; there is no server here."""
    engine.get_schedule = lambda: SimpleNamespace(
        schedule_policy="fcfs", schedule_low_priority_values_first=False, prefill_max_requests=None
    )
    if hasattr(engine, "get_exec"):
        engine.get_exec = lambda: SimpleNamespace(features=SimpleNamespace(enable_encoder_swa_bounded_replay=False))
    import torch

    if not hasattr(torch, "_dynchunk_cat"):
        original = torch.cat
        torch._dynchunk_cat = original  # noqa: SLF001

        def cat(parts: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(parts[0], _Slots):
                return _Joinable(sum(len(part) for part in parts))
            return original(parts, *args, **kwargs)

        torch.cat = cat


def random_setting(draw: random.Random) -> Setting:
    """Engines and budgets of all sorts, tiny and odd ones included."""
    engine_page = draw.choice([1, 16, 64, 256])
    page = engine_page * draw.choice([1, 1, 4]) if engine_page >= 16 else draw.choice([1, 64, 64, 256])
    static = page * draw.choice([1, 2, 8, 32]) * draw.choice([1, 4])
    align = draw.choice([None, None, None, 4096, engine_page * 2])
    if align is not None and static < align:
        static = -(-align // page) * page
    low = page * draw.randint(1, max(1, static // page // 4))
    # Mostly budgets that let a good part of a long prompt run above the floor; some that never do.
    budget = draw.choice([1, 10**6, static * 10_000, static * 50_000, static * 200_000, 2 * 10**8, 10**10])
    limits = Budget(budget, draw.choice([PREFIX, SEQUENCE]), page, low, static // page * page)
    floor = draw.choice([1, 1, 128 + engine_page, 2 * 4])
    return Setting(limits, engine_page, static, align, min(floor, static), draw.choice([0, 1, 4]), draw.random() < 0.8)


def random_world(draw: random.Random) -> World:
    """A world with one to six requests of 50 to 1,000,000 tokens, some of them cached, some decoding beside."""
    setting = random_setting(draw)
    mixed = draw.choice([0, 0, 0, 5, 300])
    running = [
        SimpleNamespace(
            seqlen=draw.randint(100, 300_000),
            sampling_params=SimpleNamespace(max_new_tokens=8, ignore_eos=False),
            output_ids=[],
            rid=f"d{i}",
            origin_input_ids=range(10),
        )
        for i in range(mixed)
    ]
    world = World(setting, running)
    # With tiny chunks a long prompt is many passes of the same kind; keep those queues short.
    longest = min(1_000_000, setting.limits.chunk_min * 400)
    for i in range(draw.randint(1, 6)):
        total = draw.choice([50, 900, 5_000, 60_000, 400_000, 1_000_000])
        total = min(draw.randint(total // 2 + 1, total), longest)
        prefix = draw.choice([0, 0, total // 2, total * 9 // 10, total - 1])
        host = draw.choice([0, 0, 0, total // 3]) if setting.radix else 0
        loaded = draw.choice([None, None, 0, host * 2]) if host else None
        world.request(f"r{i}", total, prefix if setting.radix else 0, host, loaded)
    return world


assert schedule_policy.LOAD  # the hooks under test are imported with the engine
