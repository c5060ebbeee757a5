"""sglang.srt.managers.scheduler: the budget sizer, whose pass it is, updates, and what /server_info shows."""

from __future__ import annotations

import copy
import dataclasses
from fractions import Fraction
from types import ModuleType
from typing import Any

from dynchunk import __version__, agreement, effective, in_force, journal, latency_learning, settings
from dynchunk.agreement import DisagreementError, Update
from dynchunk.budget_advice import BudgetAdvice
from dynchunk.contract import ContractError, Patch, apply_all
from dynchunk.latency_learning import Learning
from dynchunk.latency_sizing import LatencySizing
from dynchunk.model_file import ModelFile
from dynchunk.patches import budget_at_start, contracts, facts, look_on, observers, score_limits, turns
from dynchunk.policy import calibration, latency
from dynchunk.policy.budget import own_rows
from dynchunk.settings import SettingsError
from dynchunk.sizer import BudgetSizer

# What an operator may change while the server runs: POST /set_internal_state {"server_args": {"dynchunk_budget": n}}
BUDGET_KEY = "dynchunk_budget"


def apply(module: ModuleType) -> None:
    """Patch Scheduler; in the process that people start, this is also where the journal is written."""
    mode = settings.current().mode
    version = journal.engine_version()
    if version in contracts.REFUSED_VERSIONS:
        raise ContractError(f"sglang {version} is not supported: {contracts.REFUSED_VERSIONS[version]}")
    patches = [
        Patch(contracts.INIT_SIZER, _init_sizer),
        Patch(contracts.PREFILL_PASS, turns.take_turns),
        Patch(contracts.NEXT_BATCH),
        # Of another module, whose class the scheduler imports.
        Patch(contracts.NEXT_DECODE),
        Patch(contracts.INTERNAL_STATE, _add_to_state),
        Patch(contracts.SET_INTERNAL_STATE, _change_budget),
        Patch(contracts.DISPATCHER, _adopt_updates),
        Patch(contracts.ON_IDLE, _work_when_idle),
    ]
    apply_all(module, patches, change=mode == "on", hint=contracts.HINT)
    journal.record("scheduler", journal.APPLIED if mode == "on" else journal.WOULD_APPLY)
    journal.note_untested(contracts.TESTED_VERSIONS)
    journal.write_in_main_process()
    if mode == "report":
        look_on.start()


def _init_sizer(original: Any) -> Any:
    def maybe_init_dynamic_chunk_sizer(self: Any) -> None:
        original(self)
        _install(self)

    return maybe_init_dynamic_chunk_sizer


def _install(scheduler: Any) -> None:
    """Put the sizer and the model runner's hook in place, or end this process with the reason."""
    rank = facts.rank_name(scheduler)
    try:
        score_limits.settle()
        resolved = _resolve(scheduler)
        everybody = _agree(rank, resolved, budget_at_start.report(scheduler))
        if settings.current().budget == "auto":
            derived = budget_at_start.derive(everybody, own_rows(resolved.limits, resolved.static_tokens))
            resolved = _resolve(scheduler, derived.budget)
            journal.record("budget", journal.APPLIED, f"auto: {derived.text}")
    except (SettingsError, DisagreementError, ContractError) as error:
        journal.set_effective(rank, {})
        journal.refuse(error)
        raise SystemExit(1) from error
    in_force.limits = resolved.limits
    in_force.static_tokens = resolved.static_tokens
    in_force.floors = facts.floors(scheduler, resolved.limits.chunk_min)
    in_force.truncation_align = lambda: getattr(scheduler, "truncation_align_size", None)
    in_force.turns = turns.configured(settings.current().interleave)
    scheduler.dynamic_chunk_sizer = BudgetSizer(scheduler.dynamic_chunk_sizer, lambda: in_force.cut()[0])
    journal.record("sizer", journal.APPLIED)
    _size_by_latency(scheduler, resolved)
    in_force.belongs_to = facts.cost_identity(scheduler)
    observers.install(scheduler)
    if facts.speaks_for_all(scheduler) and in_force.meter is not None:
        at_start = budget_at_start.headrooms(everybody)
        advice = BudgetAdvice(
            in_force.meter,
            at_start,
            adopt=settings.current().budget == "auto",
            may_raise=facts.stages() == 1,
            own_rows=own_rows(resolved.limits, resolved.static_tokens),
        )
        in_force.when_idle.append(advice.when_idle)
    _show(rank, resolved)
    journal.write()
    if facts.is_entry_rank(scheduler):
        for sentence in [
            effective.where_it_ends(resolved.limits),
            *resolved.notes,
            *(f"warning: {w}" for w in resolved.warnings),
            *_floor_notes(),
        ]:
            journal.say(sentence)


def _size_by_latency(scheduler: Any, resolved: effective.Effective) -> None:
    """Put DYNCHUNK_LATENCY in place; where chunks are timed, the learning too."""
    chosen = settings.current()
    in_force.latency = LatencySizing(
        latency.parse_mode(chosen.latency),
        Fraction(str(chosen.smooth)),
        chosen.latency_min or resolved.limits.chunk_min,
        facts.stages(),
    )
    in_force.latency.long_waiting = lambda: facts.long_waiting(scheduler)
    in_force.latency.start(resolved.limits, in_force.cut()[0])
    if in_force.latency.active and facts.speaks_for_all(scheduler):
        kept = None if chosen.model_file is None else ModelFile(chosen.model_file, facts.identity(scheduler))
        learning = Learning(in_force.latency, in_force.outbox, kept)
        in_force.listeners.append(learning.timed)
        in_force.when_broken.append(learning.broke)
        in_force.when_idle.append(learning.when_idle)


def _resolve(scheduler: Any, budget: int | None = None) -> effective.Effective:
    static_tokens = scheduler.chunked_prefill_size
    if static_tokens is None:
        multimodal = getattr(scheduler.model_config, "is_multimodal", False)
        raise SettingsError(
            [
                "the engine runs this multimodal model without chunked prefill, so no prefill can be bounded; use "
                "SGLang's own implementation of the model (not --model-impl transformers)"
                if multimodal
                else look_on.CHUNKING_OFF
            ]
        )
    return effective.resolve(
        settings.current(),
        engine_page=scheduler.page_size,
        static_tokens=static_tokens,
        context_tokens=scheduler.model_config.context_len,
        budget=budget,
    )


def _agree(rank: str, resolved: effective.Effective, report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Compare with all ranks of this engine what a chunk's size depends on. -> everybody's report."""
    store, number, world_size = facts.world()
    if world_size == 1:
        return {rank: report}
    chosen = settings.deciding(settings.current())
    derived = {"page in force": resolved.limits.page, "engine's chunk size": resolved.static_tokens}
    versions = {"DynChunk's version": __version__, "SGLang's version": journal.engine_version()}
    everybody = agreement.compare(store, number, world_size, chosen | derived | versions, rank_name=rank, report=report)
    journal.record("agreement", journal.APPLIED, f"{world_size} ranks run under the same settings")
    return everybody


def _show(rank: str, resolved: effective.Effective) -> None:
    values = dataclasses.asdict(resolved.limits)
    journal.set_effective(rank, values | {"static": resolved.static_tokens, "summary": resolved.describe()})


def _floor_notes() -> list[str]:
    """A sentence for each floor of the engine's own that is above the operator's."""
    wanted = in_force.floors["DYNCHUNK_CHUNK_MIN"]
    return [
        f"the smallest chunk is {tokens:,} tokens, not {wanted:,}: {cause}"
        for cause, tokens in in_force.floors.items()
        if tokens > wanted
    ]


def _add_to_state(original: Any) -> Any:
    def get_internal_state(self: Any, recv_req: Any) -> Any:
        output = original(self, recv_req)
        try:
            output.internal_state["dynchunk"] = journal.snapshot() | in_force.counters()
        except Exception as error:
            # An answer without figures is better than a server that ends.
            output.internal_state["dynchunk"] = journal.snapshot() | {"broken": repr(error)}
        return output

    return get_internal_state


def _change_budget(original: Any) -> Any:
    def set_internal_state(self: Any, recv_req: Any) -> Any:
        if BUDGET_KEY not in recv_req.server_args:
            return original(self, recv_req)
        from sglang.srt.managers.io_struct import SetInternalStateReqOutput

        # Never changed in place: later pipeline stages are sent this very object, after this stage has had it.
        rest = {name: value for name, value in recv_req.server_args.items() if name != BUDGET_KEY}
        wanted = recv_req.server_args[BUDGET_KEY]
        try:
            budget = settings.BUDGET_NUMBER.parse(str(wanted))
        except ValueError as error:
            limits = settings.BUDGET_NUMBER.limits
            journal.say(f"the budget stays as it is: {BUDGET_KEY}={wanted!r}: {error}; accepted: {limits}")
            return SetInternalStateReqOutput(updated=False)
        if rest:
            # The engine's own keys first: where it refuses them, nothing of the request is done.
            asked = copy.copy(recv_req)
            asked.server_args = rest
            output = original(self, asked)
            if not output.updated:
                return output
        if facts.is_entry_rank(self):
            in_force.outbox.post("budget", budget, True)
        return SetInternalStateReqOutput(updated=True)

    return set_internal_state


def _adopt_updates(original: Any) -> Any:
    def init_request_dispatcher(self: Any) -> None:
        original(self)
        # The dispatcher's own table; it refuses types it does not know, so every rank has this entry.
        self._request_dispatcher._mapping[Update] = adopt

    return init_request_dispatcher


def adopt(update: Update) -> None:
    """Adopt a change, on every rank where it processes the requests the change came with."""
    if update.kind == "budget" and in_force.limits is not None:
        budget, in_force.set_by_operator = update.values
        in_force.limits = dataclasses.replace(in_force.limits, budget=budget)
        journal.record("budget", journal.APPLIED, f"{budget:,} token^2 from update {update.version} on")
    elif update.kind == latency_learning.KIND:
        coefficients, calibrating, reason = update.values
        model = None if coefficients is None else latency.Model(*coefficients)
        in_force.latency.adopt(calibration.Update(model, calibrating, reason))
        journal.record("latency", journal.APPLIED if model or calibrating else journal.NOT_IN_USE, reason)
    elif update.kind == "degrade":
        in_force.degrade(str(update.values[0]))


def _work_when_idle(original: Any) -> Any:
    def on_idle(self: Any) -> None:
        for step in list(in_force.when_idle):
            try:
                step()
            except Exception as error:
                in_force.when_idle.remove(step)
                journal.record("idle", journal.REFUSED, f"{step.__qualname__} is off from now on: {error!r}")
        original(self)

    return on_idle
