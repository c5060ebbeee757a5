"""The answers do not change: 200 prompts, fixed chunks against chunks cut by a budget, on the real engine."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from random import Random

import pytest
from rich.console import Console

from scripts.reference import prompt, serving
from scripts.verify import compare
from tests.engine.traffic import LOGPROB_TOLERANCE, PREFILL_LINE

pytestmark = pytest.mark.engine

PROMPTS, LONGEST_TOKENS, NEW_TOKENS = 200, 3_000, 8
CHUNK_TOKENS = 512
FLAGS = ("--chunked-prefill-size", str(CHUNK_TOKENS))
# 448 tokens at a prefix of 832 and 128 at one of 2,900: six sizes below the engine's own.
BUDGET, FLOOR_TOKENS = 400_000, 64


def lengths_tokens() -> list[int]:
    """Mixed, most of them more than one chunk."""
    draw = Random(4)
    return [draw.randint(40, draw.choice((900, 900, 1_500, LONGEST_TOKENS))) for _ in range(PROMPTS)]


def test_fixed_and_dynamic_chunks_give_the_same_answers(tmp_path: Path) -> None:
    """Every token equal, every log probability within the tolerance; both sides really cut, and cut differently."""
    lengths = lengths_tokens()
    file, fixed, out = tmp_path / "prompts.jsonl", tmp_path / "fixed.jsonl", tmp_path / "out"
    asked = [{"input_ids": prompt(n, seed), "max_new_tokens": NEW_TOKENS} for seed, n in enumerate(lengths)]
    file.write_text("".join(json.dumps(line) + "\n" for line in asked))
    console = Console(file=io.StringIO(), width=200)

    with serving(tmp_path / "fixed", *FLAGS, DYNCHUNK_MODE="off") as server:
        assert compare.run(compare.Options(file, a=server.url, record=fixed), console) == 0
        logged = [int(new) for new, _ in PREFILL_LINE.findall(server.log.read_text())]
    knobs = {"DYNCHUNK_BUDGET": str(BUDGET), "DYNCHUNK_CHUNK_MIN": str(FLOOR_TOKENS)}
    with serving(tmp_path / "dynamic", *FLAGS, **knobs) as server:
        options = compare.Options(file, b=server.url, against=fixed, out=out, tolerance=LOGPROB_TOLERANCE)
        assert compare.run(options, console) == 0

    summary = json.loads((out / compare.JSON_FILE).read_text())
    agreed, sides = summary["agreement"], summary["sides"]
    assert agreed["counts"]["equal"] == agreed["compared"] == PROMPTS
    assert agreed["common_tokens"] == PROMPTS * NEW_TOKENS
    assert agreed["logprob_gap_max"] <= LOGPROB_TOLERANCE

    several = sum(n > CHUNK_TOKENS for n in lengths)
    assert several > PROMPTS / 2
    assert [side["chunks"]["prompts"] for side in sides.values()] == [several, several]
    # What compare computes of a server without a trace is what that server's log says (a probe has one token).
    warmup = lengths[: sides["a"]["warmup_prompts"]]
    assert len([new for new in logged if new > 1]) == sum(-(-n // CHUNK_TOKENS) for n in (*warmup, *lengths))
    dynamic = sides["b"]["chunks"]
    assert dynamic["source"] == "DynChunk's trace"
    assert len(dynamic["sizes_tokens"]) >= 5
    assert dynamic["chunks"] > sum(-(-n // CHUNK_TOKENS) for n in lengths)
    assert [side["cached_tokens"] for side in sides.values()] == [0, 0]

    assert re.search(r"\*\*These figures are of DynChunk's CPU reference platform", (out / "COMPARE.md").read_text())
