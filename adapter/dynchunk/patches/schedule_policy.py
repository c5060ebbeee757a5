"""sglang.srt.managers.schedule_policy: what a batch may hold."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from dynchunk import in_force, journal, settings
from dynchunk.contract import Patch, apply_all
from dynchunk.patches import contracts


def apply(module: ModuleType) -> None:
    """Patch PrefillAdder."""
    mode = settings.current().mode
    apply_all(module, [Patch(contracts.ADDER_INIT, _keep_a_page)], change=mode == "on")
    journal.record("schedule_policy", journal.APPLIED if mode == "on" else journal.WOULD_APPLY)


def _keep_a_page(original: Any) -> Any:
    """With mixed chunks the constructor takes the decoding rows off the chunk; a small chunk would turn negative."""

    def adder_init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if in_force.limits is not None and self.rem_chunk_tokens is not None and self.rem_chunk_tokens < self.page_size:
            self.rem_chunk_tokens = self.page_size

    return adder_init
