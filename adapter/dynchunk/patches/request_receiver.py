"""sglang.srt.managers.scheduler_components.request_receiver: let updates ride the stream of requests."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from dynchunk import in_force, journal, settings
from dynchunk.contract import Patch, apply_all
from dynchunk.patches import contracts


def apply(module: ModuleType) -> None:
    """Patch SchedulerRequestReceiver (its instances are frozen, its class is not)."""
    mode = settings.current().mode
    apply_all(module, [Patch(contracts.PULL_REQUESTS, _append_updates)], change=mode == "on", hint=contracts.HINT)
    journal.record("agreement", journal.APPLIED if mode == "on" else journal.WOULD_APPLY)


def _append_updates(original: Any) -> Any:
    def _pull_raw_reqs(self: Any) -> Any:
        received = original(self)
        # Only the rank where requests enter posts updates; on the others this may be None and must stay what it is.
        if received is not None and (updates := in_force.outbox.take()):
            received.extend(updates)
        return received

    return _pull_raw_reqs
