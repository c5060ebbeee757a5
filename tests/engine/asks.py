"""What engine tests ask where the stock engine's answer counts. One chunk size for all, so that it is asked once.

The lengths are a third of what shows the effect to people (scripts/quickstart.sh): the same ladder, budget over prefix,
from the engine's chunk down to the floor, in a tenth of the time.
"""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

from scripts.reference import prompt
from tests.engine.traffic import Ask

CHUNK_TOKENS = 1024
STATIC = ("--chunked-prefill-size", str(CHUNK_TOKENS))
# The engine's chunk up to a prefix of 1,953, the floor from 15,625 on.
BUDGET, FLOOR = 2_000_000, 128

SHARED = tuple(prompt(4_000, 99))
# A long prompt, a prefix hit on it, and short ones: what every configuration is asked.
LONG = Ask.of("long", 6_000, 1, prefix=SHARED)
HIT = Ask.of("hit", 1_500, 2, prefix=SHARED)
CROWD = (
    Ask.of("c1", 3_000, 3),
    Ask.of("c2", 200, 4),
    Ask.of("c3", 2_000, 5, prefix=SHARED),
    Ask.of("c4", 900, 6),
)
# One prompt for each part of the ladder: down to the floor, just below the engine's chunk, one chunk, less than one.
LADDER = {n: Ask.of(f"r{n}", n, n, new_tokens=12) for n in (17_000, 3_000, CHUNK_TOKENS, 700)}
# Unless they ignore the end of a text, the engine sets no cache aside for what they will decode.
GROWING = tuple(Ask(f"t{i}", tuple(prompt(1_500, 200 + i)), 260, ignore_eos=False) for i in range(6))

# One at a time.
EVERY = (LONG, HIT, *CROWD, *LADDER.values())

MANY, MANY_NEW_TOKENS = 100, 4


def many_lengths_tokens() -> list[int]:
    """Two of three are more than one chunk."""
    draw = Random(4)
    return [draw.randint(*draw.choice(((40, CHUNK_TOKENS), (1_100, 2_000), (1_100, 3_000)))) for _ in range(MANY)]


def write_many(file: Path) -> Path:
    """The prompts of many lengths, as `compare` reads them."""
    asked = [
        {"input_ids": prompt(n, seed), "max_new_tokens": MANY_NEW_TOKENS}
        for seed, n in enumerate(many_lengths_tokens())
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in asked), encoding="utf-8")
    return file
