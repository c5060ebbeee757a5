"""Prompts that no cache can know: token ids drawn anew for every probe."""

from __future__ import annotations

import json
import random
from typing import Any

LOWEST_ID = 100  # below are the special tokens of most vocabularies
HIGHEST_ID = 9_999  # above, added and image tokens begin in some models


def id_range(vocab_size: int | None) -> range:
    """Ids that any model with this vocabulary takes as plain text; a conservative range where it is not known."""
    highest = min(HIGHEST_ID, vocab_size - 1) if vocab_size else HIGHEST_ID
    return range(LOWEST_ID, highest + 1) if highest > 2 * LOWEST_ID else range(highest // 2, highest + 1)


def token_ids(n_tokens: int, ids: range, probe: int, rng: random.Random) -> list[int]:
    """`n_tokens` random ids. The first differs from probe to probe, so no two prompts share a prefix."""
    return [ids[probe % len(ids)], *rng.choices(ids, k=n_tokens - 1)]


def body(rid: str, input_ids: list[int]) -> bytes:
    """The JSON of /generate: read the whole prompt, answer one token."""
    request: dict[str, Any] = {
        "rid": rid,
        "input_ids": input_ids,
        "sampling_params": {"max_new_tokens": 1, "temperature": 0, "ignore_eos": True},
    }
    return json.dumps(request, separators=(",", ":")).encode()
