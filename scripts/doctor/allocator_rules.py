"""What torch's allocator settings do on this GPU. launcher/allocator.py says what holds on any. Pure text."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from launcher import allocator, flags
from scripts.doctor.verdict import Check, fail, ok, warn

# The compute capability of GB10, where expandable segments gave NaN logits for every prefill of more than 64 tokens.
NAN_CAPABILITY = "12.1"
EXPANDABLE = re.compile(r"expandable_segments\s*:\s*true", re.IGNORECASE)
GRAPHS_OFF = ("--disable-cuda-graph", "--disable-decode-cuda-graph")


def checks(
    environ: Mapping[str, str], words: Sequence[str], capabilities: Sequence[str], *, tp_size: int, allowed: bool
) -> list[Check]:
    """words: the engine's flags. capabilities: of the GPUs here. allowed: DYNCHUNK_ALLOW_EXPANDABLE_SEGMENTS."""
    name = "allocator"
    # Their sentences end with the cure.
    found = [fail(name, problem, "") for problem in allocator.problems(environ, allow_expandable_segments=allowed)]
    found += [warn(name, warning, "") for warning in allocator.warnings(environ)]
    expandable = any(re.search(EXPANDABLE, environ.get(variable, "")) for variable in allocator.VARIABLES)
    if expandable and allowed and NAN_CAPABILITY in capabilities:
        found.append(
            fail(
                name,
                f"expandable_segments:True on a GPU of capability {NAN_CAPABILITY}: NaN logits for every prefill of "
                "more than 64 tokens were seen there",
                "expandable_segments:False; DYNCHUNK_ALLOW_EXPANDABLE_SEGMENTS=0",
            )
        )
    if expandable and tp_size > 1 and custom_all_reduce(words) and graphs(words):
        found.append(
            warn(
                name,
                "expandable_segments:True, CUDA graphs and custom all-reduce together have ended starts with "
                "`invalid argument` and no traceback: the memory handle of such a segment cannot be shared",
                "expandable_segments:False, or --disable-custom-all-reduce",
            )
        )
    return found or [ok(name, "nothing that harms long prefills")]


def custom_all_reduce(words: Sequence[str]) -> bool:
    """Whether the engine's own all-reduce kernel may be used."""
    return not flags.given(words, "--disable-custom-all-reduce")


def graphs(words: Sequence[str]) -> bool:
    """Whether decoding runs through CUDA graphs."""
    off = flags.given(words, *GRAPHS_OFF) or flags.value(words, "--cuda-graph-backend-decode") == "disabled"
    return not off
