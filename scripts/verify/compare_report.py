"""A comparison as data (compare.json), as Markdown (COMPARE.md) and as tables for the terminal. Pure but for rich."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Group
from rich.markup import escape
from rich.table import Table

from scripts.verify import engine
from scripts.verify.compare_errors import EXIT_DIFFERENT, EXIT_INTERRUPTED, EXIT_SAME
from scripts.verify.compare_prompts import Prompt
from scripts.verify.compare_record import Recorded
from scripts.verify.compare_results import (
    APART,
    SIGNIFICANT,
    Likeness,
    Pair,
    agreement,
    compare,
    exact_match,
    latency,
    several_chunks,
)
from scripts.verify.report import table

SCHEMA = 1
_MOST_LISTED = 20
_UNKNOWN = "-"


def summarise(
    prompts: Sequence[Prompt],
    a: Recorded,
    b: Recorded,
    *,
    tolerance: float,
    allowed_apart: int,
    interleaved: bool,
    provenance: dict[str, Any],
) -> dict[str, Any]:
    """Everything that compare says, as plain JSON values. Prompts that not both sides were asked yet are left out."""
    asked = min(len(a.answers), len(b.answers))
    said_a, said_b = a.answers[:asked], b.answers[:asked]
    pairs = [compare(x, y, tolerance) for x, y in zip(said_a, said_b, strict=True)]
    right = exact_match(prompts[:asked], said_a, said_b)
    agreed = agreement(pairs)
    shifted = right is not None and right["mcnemar_p"] < SIGNIFICANT
    same = agreed["apart"] <= allowed_apart and not shifted
    interrupted = asked < len(prompts)
    return {
        "schema": SCHEMA,
        "verdict": "same" if same else "different",
        "exit_code": EXIT_INTERRUPTED if interrupted else EXIT_SAME if same else EXIT_DIFFERENT,
        "prompts": len(prompts),
        "asked": asked,
        "interrupted": interrupted,
        "tolerance": tolerance,
        "allowed_apart": allowed_apart,
        "interleaved": interleaved,
        "agreement": agreed,
        "exact_match": right,
        "sides": {"a": _side(a, said_a), "b": _side(b, said_b)},
        "remarks": remarks(a, b, interleaved=interleaved),
        "pairs_not_equal": [_listed(pair) for pair in pairs if pair.likeness is not Likeness.EQUAL],
        "provenance": provenance,
    }


def remarks(a: Recorded, b: Recorded, *, interleaved: bool) -> list[str]:
    """What a reader of the figures should know."""
    found = []
    if engine.dynchunk_active(a.about.engine):
        found.append("Side a runs DynChunk: this is not a comparison with fixed chunks.")
    if not engine.dynchunk_active(b.about.engine):
        found.append("Side b does not run DynChunk.")
    if interleaved and a.about.url == b.about.url:
        found.append("Both sides are one server: this tells how far it differs from itself.")
    if not interleaved:
        found.append("The sides were asked at different times: their latencies are not of one moment of the machine.")
    if a.about.keep_cache:
        found.append("The prefix cache was not emptied between prompts: chunks and times depend on what it held.")
    flags_a, flags_b = a.about.engine["flags"], b.about.engine["flags"]
    other = sorted(name for name in {*flags_a, *flags_b} if flags_a.get(name) != flags_b.get(name))
    if other:
        found.append(f"The engines differ in {', '.join(f'`{name}`' for name in other)}.")
    if a.about.engine["version"] != b.about.engine["version"]:
        found.append("The engines differ in version.")
    return found


def verdict_sentence(summary: dict[str, Any]) -> str:
    """One sentence for the exit code."""
    agreed, right = summary["agreement"], summary["exact_match"]
    ties = agreed["counts"][Likeness.TIE.value]
    text = f"{agreed['tokens_equal']:,} of {agreed['compared']:,} answers have equal tokens"
    if ties:
        text += f", {ties:,} more differ from a tie on"
    if agreed["apart"]:
        text += f"; {agreed['apart']:,} differ by more than rounding explains ({summary['allowed_apart']:,} allowed)"
    if right is not None and right["mcnemar_p"] < SIGNIFICANT:
        text += f"; exact match has shifted (p = {right['mcnemar_p']:.3g})"
    lead = "The answers are the same" if summary["verdict"] == "same" else "The answers are different"
    if summary["interrupted"]:
        lead = f"Interrupted after {summary['asked']:,} of {summary['prompts']:,} prompts"
    return f"{lead}: {text}."


def side_rows(summary: dict[str, Any]) -> list[tuple[str, str, str]]:
    """(what, a, b) of everything that each side has of its own."""
    a, b = summary["sides"]["a"], summary["sides"]["b"]
    right = summary["exact_match"]
    rows = [
        ("prompts answered", f"{a['answered']:,}", f"{b['answered']:,}"),
        ("prompts in more than one chunk", _several(a["chunks"]), _several(b["chunks"])),
        ("chunk sizes", _sizes(a["chunks"]), _sizes(b["chunks"])),
        ("tokens read, cached", f"{a['prompt_tokens']:,}, {a['cached_tokens']:,}", _read(b)),
    ]
    if right is not None:
        n = right["questions"]
        rows.append(("exact match", _share(right["a_right"], n), _share(right["b_right"], n)))
    for name, key in (("time to first token", "ttft"), ("between tokens", "itl")):
        rows.append((f"{name}: median / p95", _times(a["latency"], key), _times(b["latency"], key)))
    return rows


def pair_rows(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """(what, value) of everything that the two sides have together."""
    agreed, right = summary["agreement"], summary["exact_match"]
    compared = agreed["compared"]
    rows = [("equal tokens", _share(agreed["tokens_equal"], compared))]
    rows += [(kind, f"{count:,}") for kind, count in agreed["counts"].items() if count or kind in _ALWAYS]
    if agreed["logprob_gap_max"] is not None:
        gaps = f"{agreed['logprob_gap_max']:.2g} / {agreed['logprob_gap_mean']:.2g}"
        rows.append(("log probabilities apart: max / mean", f"{gaps} over {agreed['common_tokens']:,} tokens"))
    if agreed["first_different_earliest"] is not None:
        first = f"token {agreed['first_different_earliest']:,} / {agreed['first_different_median']:g}"
        rows.append(("first different token: earliest / median", first))
    if right is not None:
        rows.append(("right on a only, on b only", f"{right['only_a_right']:,}, {right['only_b_right']:,}"))
        rows.append(("McNemar's exact test", f"p = {right['mcnemar_p']:.3g}"))
    return rows


def terminal(summary: dict[str, Any]) -> Group:
    """The tables and the verdict."""
    sides = Table("", *(escape(name) for name in _names(summary)))
    for row in side_rows(summary):
        sides.add_row(*map(escape, row))
    both = Table("both sides", "")
    for pair_row in pair_rows(summary):
        both.add_row(*map(escape, pair_row))
    parts: list[Any] = [sides, both, *_chunk_sources(summary), *summary["remarks"]]
    parts += [f"line {pair['line']}: {pair['likeness']}: {pair['detail']}" for pair in _apart(summary)]
    colour = "green" if summary["verdict"] == "same" else "red"
    verdict = f"[bold {colour}]{escape(verdict_sentence(summary))}[/]"
    return Group(*(escape(part) if isinstance(part, str) else part for part in parts), verdict)


def markdown(summary: dict[str, Any]) -> str:
    """COMPARE.md."""
    provenance = summary["provenance"]
    parts = [f"# Answers side by side ({provenance['date']})", f"**{verdict_sentence(summary)}**"]
    if any(side["engine"]["reference_platform"] for side in summary["sides"].values()):
        parts.append(
            "> **These figures are of DynChunk's CPU reference platform, not of a GPU.** The scheduler and its chunk "
            "sizes are the engine's own; milliseconds are what this machine's CPU took."
        )
    parts += [table(["", *_names(summary)], side_rows(summary), left=(0,)), "\n".join(_chunk_sources(summary))]
    parts.append(table(["both sides", ""], pair_rows(summary), left=(0,)))
    parts += summary["remarks"]
    parts += _list_of_pairs(summary)
    parts += ["## What ran", table(["", *_names(summary)], _fact_rows(summary), left=(0, 1, 2))]
    parts.append(
        f"`{provenance['command']}` at {provenance['commit']} on {provenance['machine']}, Python "
        f"{provenance['python']}, {provenance['date']}."
    )
    parts += ["## What the words mean", _words(summary)]
    return "\n\n".join(filter(None, parts)) + "\n"


_ALWAYS = (Likeness.EQUAL.value, Likeness.TIE.value, *(kind.value for kind in APART))


def _side(recorded: Recorded, answers: Sequence[Any]) -> dict[str, Any]:
    about = recorded.about
    dynamic = engine.dynchunk_active(about.engine)
    return {
        "name": f"{about.side}: {'dynamic' if dynamic else 'fixed'}",
        "url": about.url,
        "engine": about.engine,
        "provenance": about.provenance,
        "keep_cache": about.keep_cache,
        "warmup_prompts": about.warmup_prompts,
        "answered": sum(not answer.refused for answer in answers),
        "prompt_tokens": sum(answer.prompt_tokens for answer in answers),
        "cached_tokens": sum(answer.cached_tokens for answer in answers),
        "chunks": several_chunks(answers, about.engine["flags"], dynamic=dynamic),
        "latency": latency(answers),
    }


def _listed(pair: Pair) -> dict[str, Any]:
    return {
        "line": pair.line,
        "likeness": pair.likeness.value,
        "first_different": pair.first_different,
        "detail": pair.detail,
    }


def _names(summary: dict[str, Any]) -> list[str]:
    return [side["name"] for side in summary["sides"].values()]


def _chunk_sources(summary: dict[str, Any]) -> list[str]:
    return [f"Chunks of {name}: {side['chunks']['source']}." for name, side in summary["sides"].items()]


def _apart(summary: dict[str, Any]) -> list[dict[str, Any]]:
    wanted = {kind.value for kind in APART}
    return [pair for pair in summary["pairs_not_equal"] if pair["likeness"] in wanted][:_MOST_LISTED]


def _list_of_pairs(summary: dict[str, Any]) -> list[str]:
    """Those that are apart first: they are the reason for the verdict."""
    wanted = {kind.value for kind in APART}
    listed = sorted(summary["pairs_not_equal"], key=lambda pair: pair["likeness"] not in wanted)
    if not listed:
        return []
    rows = [(f"{pair['line']:,}", pair["likeness"], pair["detail"]) for pair in listed[:_MOST_LISTED]]
    more = f"{len(listed) - _MOST_LISTED:,} more are in compare.json." if len(listed) > _MOST_LISTED else ""
    return ["## Prompts that are not equal", table(["line", "how", "detail"], rows, left=(1, 2)), more]


def _fact_rows(summary: dict[str, Any]) -> list[tuple[str, ...]]:
    sides = list(summary["sides"].values())
    rows = [
        ("engine", *(f"SGLang {side['engine']['version']}" for side in sides)),
        ("model", *(str(side["engine"]["model_path"] or side["engine"]["model"]) for side in sides)),
        ("DynChunk", *(_dynchunk(side["engine"]["dynchunk"]) for side in sides)),
        ("server", *(f"`{side['url']}`" for side in sides)),
        ("asked", *(f"{side['provenance']['date']}, commit {side['provenance']['commit']}" for side in sides)),
        ("unmeasured prompts before", *(f"{side['warmup_prompts']:,}" for side in sides)),
        ("prefix cache", *("left as it was" if side["keep_cache"] else "emptied for each prompt" for side in sides)),
    ]
    flags = dict.fromkeys(flag for side in sides for flag in side["engine"]["flags"])
    return rows + [(f"`{flag}`", *(_flag(side["engine"]["flags"], flag) for side in sides)) for flag in flags]


def _dynchunk(states: Iterable[dict[str, Any]]) -> str:
    said = [
        f"{state.get('version')}, mode {state.get('mode')}, {state.get('effective', {}).get('summary', 'no summary')}"
        for state in states
    ]
    return "; ".join(said) or "not active"


def _flag(flags: dict[str, Any], name: str) -> str:
    return f"`{flags[name]}`" if name in flags else _UNKNOWN


def _several(chunks: dict[str, Any]) -> str:
    return f"{'at least ' if chunks['at_least'] else ''}{chunks['prompts']:,}"


def _sizes(chunks: dict[str, Any]) -> str:
    sizes = chunks.get("sizes_tokens")
    if not sizes:
        return _UNKNOWN
    return f"{sizes[0]:,}" if len(sizes) == 1 else f"{sizes[0]:,} to {sizes[-1]:,} in {len(sizes)} sizes"


def _read(side: dict[str, Any]) -> str:
    return f"{side['prompt_tokens']:,}, {side['cached_tokens']:,}"


def _share(part: int, whole: int) -> str:
    return f"{part:,} of {whole:,} ({part / whole:.1%})" if whole else _UNKNOWN


def _times(latencies: dict[str, float | None], key: str) -> str:
    median, p95 = latencies[f"{key}_median_ms"], latencies[f"{key}_p95_ms"]
    return _UNKNOWN if median is None or p95 is None else f"{median:,.1f} / {p95:,.1f} ms"


def _words(summary: dict[str, Any]) -> str:
    return (
        "Prompts were asked one at a time, greedily (temperature 0), with log probabilities. "
        "**Equal**: all tokens are, and each token's log probability differs between the sides by at most the "
        f"tolerance of {summary['tolerance']:g}. **Equal up to a tie**: so they are up to the first different token, "
        "and there the log probabilities of both tokens agree within the tolerance as well: the two were as good as "
        "equally likely, and rounding chose. What follows it is another text and is not compared. **Different**: "
        "anything else. Sums in 16-bit formats round a logit of 16 to steps of 0.06 to 0.13 (bfloat16), so chunks of "
        "other sizes make such ties; a server compared with itself (--a and --b the same) tells how many it makes "
        "alone. **Exact match**: the number behind the last ####, or the last one of the answer, is the right one. "
        "**McNemar's exact test**: how likely a split at least as uneven between 'right on a only' and 'right on b "
        f"only' is if both are equally good; below {SIGNIFICANT:g} counts as a difference. **Time to first token**: "
        "from sending to the first token's arrival here. **Between tokens**: over all tokens of all answers."
    )
