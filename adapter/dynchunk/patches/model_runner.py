"""sglang.srt.model_executor.model_runner: see every prefill forward of the target model.

The hook sits on the instance, not on the class: it is put there when weights, autotuning and graph capture are done,
and draft models run through objects of their own. Who looks on is in observers.py.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol

from dynchunk import in_force, settings
from dynchunk.contract import Patch, apply_all
from dynchunk.patches import contracts


def apply(module: ModuleType) -> None:
    """Only the check: observers.install puts the hook on the instance that serves."""
    mode = settings.current().mode
    apply_all(module, [Patch(contracts.FORWARD)], change=mode == "on", hint=contracts.HINT)


@dataclass(slots=True)
class Prefill:
    """A prefill forward. mode: `extend` or `mixed`. reqs: (request id, prefix, new tokens). launched_s: unix time."""

    mode: str
    reqs: list[tuple[str, int, int]]
    launched_s: float


class Observer(Protocol):
    """Something that looks on at forwards. It decides nothing, so a fault of it changes nothing but itself."""

    @property
    def name(self) -> str:
        """What the journal calls it."""

    def before(self, prefill: Prefill | None) -> None:
        """Called before each launch; None where it is no prefill."""

    def after(self, prefill: Prefill) -> None:
        """Called after the launch of a prefill."""


def hook(forward: Callable[..., Any], observers: list[Observer]) -> Callable[..., Any]:
    """`forward`, with observers. One that raises is taken out, and the journal says so."""

    def each(step: str, prefill: Prefill | None) -> None:
        for observer in list(observers):
            try:
                getattr(observer, step)(prefill)
            except Exception as error:
                observers.remove(observer)
                in_force.broke(observer.name, error)

    @functools.wraps(forward)
    def hooked(forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        # Read before the call: data-parallel padding rewrites the mode and appends dummy rows during it.
        prefill = _prefill(forward_batch)
        each("before", prefill)
        output = forward(forward_batch, *args, **kwargs)
        if prefill is not None:
            each("after", prefill)
        return output

    return hooked


def _prefill(forward_batch: Any) -> Prefill | None:
    mode = forward_batch.forward_mode
    reqs = _prefill_rows(forward_batch) if mode.is_context_parallel_extend() else None
    return Prefill(mode.name.lower(), reqs, time.time()) if reqs else None


def _prefill_rows(forward_batch: Any) -> list[tuple[str, int, int]] | None:
    """(request id, prefix, new tokens) of each row; None where this is not a prefill of requests.

    Left out: replays of a sliding window (they repeat rows of the forward before), and decodes that data-parallel
    attention has turned into extends of one token each (there a prompt's last single token is taken for one of them).
    """
    new_tokens = forward_batch.extend_seq_lens_cpu
    prefixes = forward_batch.extend_prefix_lens_cpu
    if not new_tokens or prefixes is None or getattr(forward_batch, "encoder_swa_replay", False):
        return None
    if max(new_tokens) <= 1 and getattr(forward_batch, "global_num_tokens_cpu", None) is not None:
        return None
    rids = forward_batch.rids or [""] * len(new_tokens)
    return [(r, int(p), int(n)) for r, p, n in zip(rids, prefixes, new_tokens, strict=True)]
