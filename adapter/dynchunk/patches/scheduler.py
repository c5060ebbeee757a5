"""sglang.srt.managers.scheduler: give every scheduler a budget sizer, and show in /server_info what is in force."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from dynchunk import effective, in_force, journal, settings
from dynchunk.contract import Patch, apply_all
from dynchunk.patches import contracts, facts, model_runner, score_limits
from dynchunk.settings import SettingsError
from dynchunk.sizer import BudgetSizer


def apply(module: ModuleType) -> None:
    """Patch Scheduler; in the process that people start, this is also where the journal is written."""
    mode = settings.current().mode
    patches = [
        Patch(contracts.INIT_SIZER, _init_sizer),
        Patch(contracts.ASK_SIZER),
        Patch(contracts.INTERNAL_STATE, _add_to_state),
        Patch(contracts.ON_IDLE, _release_when_idle),
    ]
    apply_all(module, patches, change=mode == "on")
    journal.record("scheduler", journal.APPLIED if mode == "on" else journal.WOULD_APPLY)
    journal.write_in_main_process()


def _init_sizer(original: Any) -> Any:
    def maybe_init_dynamic_chunk_sizer(self: Any) -> None:
        original(self)
        _install(self)

    return maybe_init_dynamic_chunk_sizer


def _install(scheduler: Any) -> None:
    """Put the sizer and the model runner's hook in place, or end this process with the reason."""
    try:
        resolved = _resolve(scheduler)
    except SettingsError as error:
        journal.refuse(error)
        raise SystemExit(1) from error
    in_force.limits = resolved.limits
    scheduler.dynamic_chunk_sizer = BudgetSizer(
        resolved.limits,
        scheduler.dynamic_chunk_sizer,
        lambda: getattr(scheduler, "truncation_align_size", None),
    )
    journal.record("sizer", journal.APPLIED)
    in_force.release = model_runner.install(scheduler)
    score_limits.record_the_rest()
    rank = facts.rank_name(scheduler)
    limits = resolved.limits
    journal.set_effective(
        rank,
        {
            "budget": limits.budget,
            "rule": limits.rule,
            "page": limits.page,
            "chunk_min": limits.chunk_min,
            "chunk_max": limits.chunk_max,
            "static": resolved.static_tokens,
            "summary": resolved.describe(),
        },
    )
    journal.write()
    if facts.is_entry_rank(scheduler):
        for sentence in resolved.notes + [f"warning: {w}" for w in resolved.warnings]:
            journal.say(sentence)


def _resolve(scheduler: Any) -> effective.Effective:
    static_tokens = scheduler.chunked_prefill_size
    if static_tokens is None:
        multimodal = getattr(scheduler.model_config, "is_multimodal", False)
        raise SettingsError(
            [
                "the engine runs this multimodal model without chunked prefill, so no prefill can be bounded; use "
                "SGLang's own implementation of the model (not --model-impl transformers)"
                if multimodal
                else "chunked prefill is off, so no prefill can be bounded; start with --chunked-prefill-size 2048"
            ]
        )
    return effective.resolve(
        settings.current(),
        engine_page=scheduler.page_size,
        static_tokens=static_tokens,
        context_tokens=scheduler.model_config.context_len,
    )


def _add_to_state(original: Any) -> Any:
    def get_internal_state(self: Any, recv_req: Any) -> Any:
        output = original(self, recv_req)
        output.internal_state["dynchunk"] = journal.snapshot() | in_force.counters()
        return output

    return get_internal_state


def _release_when_idle(original: Any) -> Any:
    def on_idle(self: Any) -> None:
        if in_force.release is not None:
            in_force.release.before_launch()
        original(self)

    return on_idle
