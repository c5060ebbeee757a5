"""DeepSeek-V4.1's candidate source layer (0.5.21 to 0.5.23): free a tile of scores before the next one is made.

The engine's other loops over tiles end with `del logits`; the one in `publish_prefill_table` does not, so two tiles are
alive at its peak. When the loop asks for the next tile it has read the last one for the last time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from dynchunk import journal
from dynchunk.contract import Patch, apply_all
from dynchunk.patches import contracts
from dynchunk.settings import current

HOOK = "score_tiles"


def apply(module: ModuleType) -> None:
    """Wrap the tiles that `publish_prefill_table` runs over; only there is the last reader known."""
    if current().indexer == "keys":
        from dynchunk.patches import indexer_keys

        journal.record(HOOK, journal.NOT_IN_USE, "DYNCHUNK_INDEXER=keys frees its own tiles")
        indexer_keys.apply(module)
        return
    mode = current().mode
    patches = [Patch(contracts.PUBLISH_TABLE), Patch(contracts.SCORE_TILES, _free_each)]
    apply_all(module, patches, change=mode == "on", hint=contracts.HINT)
    journal.record(HOOK, journal.APPLIED if mode == "on" else journal.WOULD_APPLY, "one tile of scores, not two")


def _free_each(original: Callable[..., Any]) -> Callable[..., Any]:
    def score_tiles(data: Any, kv: Any, **options: Any) -> Iterator[Any]:
        for rows, logits in original(data, kv, **options):
            yield rows, logits
            storage = logits.untyped_storage()
            if storage.resizable():
                # Not `del`: the caller's own name still holds the tensor. Streams order this as they order any free.
                storage.resize_(0)
            else:
                journal.record(HOOK, journal.NOT_IN_USE, "this kernel's scores cannot be freed early")

    return score_tiles
