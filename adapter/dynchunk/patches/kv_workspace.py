"""DeepSeek-V4's workspace for a prefix's keys: let it grow by doubling.

The engine makes it exactly as long as each chunk needs, so it is made anew for every chunk of a growing prompt, each
time a little larger than any block left behind: 0.5 GiB at 262,144 keys leave 16 GiB reserved. Doubled, it is made a
few times and leaves as much again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from dynchunk import journal
from dynchunk.contract import ContractError, Patch, apply_all
from dynchunk.patches import contracts
from dynchunk.policy.score_budget import doubled
from dynchunk.settings import current

HOOK = "kv_workspace"
# A request's keys are rounded up to pages and joined by those of the sliding window.
SLACK_TOKENS = 1024


def apply(module: ModuleType) -> None:
    """Wrap whichever of the two classes this version has."""
    mode = current().mode
    held = [c for c in contracts.INDEXER_CONTRACTS[contracts.SPARSE_PREFILL] if c.target.split(".")[0] in vars(module)]
    if not held:
        raise ContractError(f"{module.__name__}: expected {contracts.KV_BUFFER.target}, found nothing of that name")
    apply_all(module, [Patch(c, _doubling) for c in held], change=mode == "on", hint=contracts.HINT)
    journal.record(HOOK, journal.APPLIED if mode == "on" else journal.WOULD_APPLY, "grows by doubling")


def _doubling(original: Callable[..., Any]) -> Callable[..., Any]:
    def reserve(self: Any, num_tokens: int, *dtype: Any, **named: Any) -> Any:
        if num_tokens < 1 or _fits(self._buffer, num_tokens, dtype[0] if dtype else named.get("dtype")):
            return original(self, num_tokens, *dtype, **named)
        # What it held is overwritten before it is read again; without it there is one buffer alive, not two.
        self._buffer = None
        return original(self, doubled(num_tokens, longest_tokens()), *dtype, **named)[:num_tokens]

    return reserve


def _fits(held: Any, num_tokens: int, dtype: Any) -> bool:
    return held is not None and num_tokens <= held.shape[0] and dtype in (None, held.dtype)


@functools.cache
def longest_tokens() -> int:
    """What one request can need at most; 0 where the engine does not say. Asked when the scheduler is ready."""
    from sglang.srt.runtime_context import get_schedule, process_model_config

    try:
        chunk = get_schedule().chunked_prefill_size or 0
        return int(process_model_config().context_len) + max(int(chunk), 0) + SLACK_TOKENS
    except Exception as error:
        journal.say(f"the workspace for a prefix's keys is not bounded by the context length: {error!r}")
        return 0
