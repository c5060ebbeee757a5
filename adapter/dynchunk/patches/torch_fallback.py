"""DeepSeek-V4's scoring in plain torch (SGLANG_FP8_PAGED_MQA_LOGITS_TORCH=1, SM120): score some rows at a time.

The engine scores all rows of a chunk at once, at 919 bytes for each row and key: 115 GiB for 2,048 rows on 65,536
compressed keys, and no limit holds it. Rows do not depend on each other, so parts of them give the same bits. What the
function returns, 4 bytes for each row and key, stays.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from dynchunk import journal
from dynchunk.contract import Patch, apply_all
from dynchunk.patches import contracts, score_limits
from dynchunk.policy.score_budget import MIB, torch_rows
from dynchunk.settings import current

HOOK = "torch_fallback"


def apply(module: ModuleType) -> None:
    """Wrap both functions; which of them runs depends on the GPU."""
    mode = current().mode
    limit_bytes = score_limits.wanted_bytes()
    if limit_bytes == 0:
        journal.record(HOOK, journal.NOT_IN_USE, "DYNCHUNK_INDEXER_SCORE_MIB=0 leaves it")
        return
    patches = [
        Patch(contract, _in_parts(limit_bytes)) for contract in contracts.INDEXER_CONTRACTS[contracts.V4_INDEXER]
    ]
    apply_all(module, patches, change=mode == "on", hint=contracts.HINT)
    detail = f"unbounded -> {limit_bytes / MIB:g} MiB, where SGLANG_FP8_PAGED_MQA_LOGITS_TORCH uses it"
    journal.record(HOOK, journal.APPLIED if mode == "on" else journal.WOULD_APPLY, detail)


def _in_parts(limit_bytes: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def replace(original: Callable[..., Any]) -> Callable[..., Any]:
        def logits(q: Any, keys: Any, weight: Any, seq_lens: Any, page_table: Any, *rest: Any, **named: Any) -> Any:
            def score(part: slice) -> Any:
                return original(q[part], keys, weight[part], seq_lens[part], page_table[part], *rest, **named)

            rows, _, heads, _ = q.shape
            step = torch_rows(limit_bytes, max(1, page_table.shape[1] * keys.shape[1]), heads)
            if rows <= step:
                return score(slice(None))
            first = score(slice(0, step))
            scores = first.new_empty((rows, first.shape[1]))
            scores[:step] = first
            del first
            for start in range(step, rows, step):
                scores[start : start + step] = score(slice(start, start + step))
            return scores

        return logits

    return replace
