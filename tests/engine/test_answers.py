"""The answers do not change: many prompts, fixed chunks against chunks cut by a budget, on the real engine."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from scripts.reference import Server
from scripts.verify import compare
from tests.engine import asks, stock, traffic

pytestmark = [pytest.mark.engine, pytest.mark.xdist_group("guarded")]

# 384 tokens at a prefix of 1,024 and the floor at 3,000: five sizes below the engine's own.
BUDGET = 400_000


def test_fixed_and_dynamic_chunks_give_the_same_answers(tmp_path: Path, guarded: Server) -> None:
    """Every token equal, every log probability within the tolerance; both sides really cut, and cut differently."""
    out, record = tmp_path / "out", stock.record()
    console = Console(file=io.StringIO(), width=200)
    with traffic.budget(guarded, BUDGET, back_to=asks.BUDGET):
        questions = asks.write_many(tmp_path / "prompts.jsonl")
        options = compare.Options(
            questions, b=guarded.url, against=record, out=out, tolerance=traffic.LOGPROB_TOLERANCE
        )
        assert compare.run(options, console) == 0

    summary = json.loads((out / compare.JSON_FILE).read_text())
    agreed, sides = summary["agreement"], summary["sides"]
    assert agreed["counts"]["equal"] == agreed["compared"] == asks.MANY
    assert agreed["common_tokens"] == asks.MANY * asks.MANY_NEW_TOKENS
    assert agreed["logprob_gap_max"] <= traffic.LOGPROB_TOLERANCE

    lengths = asks.many_lengths_tokens()
    several = sum(n > asks.CHUNK_TOKENS for n in lengths)
    assert several > asks.MANY / 2
    assert [side["chunks"]["prompts"] for side in sides.values()] == [several, several]
    dynamic = sides["b"]["chunks"]
    assert dynamic["source"] == "DynChunk's trace"
    assert len(dynamic["sizes_tokens"]) >= 5
    assert dynamic["chunks"] > sum(-(-n // asks.CHUNK_TOKENS) for n in lengths)
    assert [side["cached_tokens"] for side in sides.values()] == [0, 0]

    assert re.search(r"\*\*These figures are of DynChunk's CPU reference platform", (out / "COMPARE.md").read_text())
