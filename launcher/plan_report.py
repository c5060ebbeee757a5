"""A plan for people: the ladder by bands, what it comes to, and a drawing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from dynchunk.policy import latency, paths
from dynchunk.policy.auto_budget import MARGIN_PERCENT
from dynchunk.policy.latency import EQUAL, PIPELINE
from launcher import tables
from launcher.plan import Band, Plan, reserve_left_out, usable_bytes
from launcher.plan_inputs import GIB, Inputs
from launcher.plan_reserve import HOST_MEMORY, OWN_MEMORY, WITHOUT

MOST_ROWS = 24


def show(inputs: Inputs, planned: Plan, headroom_bytes: int | None) -> None:
    """Print one prompt's plan."""
    cached = f", {planned.cached:,} of them cached" if planned.cached else ""
    title = f"a prompt of {planned.prompt:,} tokens{cached}"
    tables.show(("prefix", "chunk", "chunks", "peak GiB", "seconds"), [_rows(planned.bands())], title)
    for line in summary(inputs, planned, headroom_bytes):
        print(line)


def _rows(bands: Sequence[Band]) -> list[tuple[str, ...]]:
    """One row a band; several to a row where there are too many to read."""
    step = -(-len(bands) // MOST_ROWS)
    rows: list[tuple[str, ...]] = []
    for first in range(0, len(bands), step):
        group = bands[first : first + step]
        sizes = [band.tokens for band in group]
        held = [band.transient_bytes for band in group if band.transient_bytes is not None]
        times = [band.ms for band in group if band.ms is not None]
        rows.append(
            (
                _span(group[0].prefix_from, group[-1].prefix_to),
                _span(max(sizes), min(sizes)),
                f"{sum(band.chunks for band in group):,}",
                f"{max(held) / GIB:.2f}" if held else "-",
                f"{sum(times) / 1000:,.2f}" if times else "-",
            )
        )
    return rows


def _span(first: int, last: int) -> str:
    return f"{first:,}" if first == last else f"{first:,} to {last:,}"


def summary(inputs: Inputs, planned: Plan, headroom_bytes: int | None) -> list[str]:
    """What follows from the ladder, a sentence a line."""
    lines = [*_memory(inputs, planned, headroom_bytes), *_time(inputs, planned)]
    limits = inputs.resolved.limits
    if planned.floor_exceeds_budget_from is not None:
        lines.append(
            f"floor: from prefix {planned.floor_exceeds_budget_from:,} on, even the smallest chunk "
            f"({limits.chunk_min:,}) is above the budget of {limits.budget:,}"
        )
    return [*lines, _fixed(planned)]


def _memory(inputs: Inputs, planned: Plan, headroom_bytes: int | None) -> list[str]:
    top = planned.top
    if inputs.cost is None or planned.peak_bytes is None:
        known = ", ".join(paths.PATHS)
        return [f"memory: not known without --path ({known}), --bytes or --report"]
    held = planned.peak_bytes
    lines = [f"memory: at most {held / GIB:.2f} GiB for a moment, {top.tokens:,} new tokens on {top.prefix:,}"]
    lines[0] += f" ({inputs.cost.source})"
    if inputs.cost.bound_bytes is not None:
        uncut = paths.transient_bytes(
            replace(inputs.cost, bound_bytes=None), inputs.rows(top.tokens), top.prefix + top.tokens
        )
        lines.append(f"  without the limit on its scores {uncut / GIB:.2f} GiB")
    elif inputs.cost.parts:
        lines.append("  of it " + ", ".join(_parts(inputs.cost, inputs.rows(top.tokens), top.prefix + top.tokens)))
    lines += [f"  {line}" for line in reserve_left_out(inputs, planned) or [_reserved(inputs, planned)]]
    if headroom_bytes is not None:
        usable = usable_bytes(headroom_bytes)
        verdict = "fits into" if held <= usable else "will not fit into"
        lines.append(
            f"  {verdict} {headroom_bytes / GIB:.2f} GiB: {usable / GIB:.2f} GiB of them are to be used, "
            f"{MARGIN_PERCENT} % are left for the allocator and others"
        )
    return lines


def _reserved(inputs: Inputs, planned: Plan) -> str:
    """What the allocator keeps, where it keeps different amounts."""
    words = [
        f"{planned.reserved[name] / GIB:.2f} GiB {where} ({inputs.remedies[name].words})"
        for name, where in ((HOST_MEMORY, "where GPU memory is host memory"), (OWN_MEMORY, "on another GPU"))
    ]
    without = planned.reserved[WITHOUT] / GIB
    return (
        f"reserved for it, in a model of torch's allocator with nothing else in it: {', '.join(words)}; "
        f"without a remedy {without:,.2f} GiB, or all there is"
    )


def _parts(cost: paths.Cost, rows: int, keys: int) -> list[str]:
    return [f"{part.name} {paths.part_bytes(part, rows, keys) / GIB:.2f} GiB" for part in cost.parts]


def _time(inputs: Inputs, planned: Plan) -> list[str]:
    known = [ms for ms in planned.ms_of if ms is not None]
    if planned.total_ms is None or planned.makespan_ms is None or not known:
        return ["time: not known without --model or --rates"]
    line = f"time: {_seconds(planned.total_ms)} in {len(known):,} chunks of {min(known):,.0f} to {max(known):,.0f} ms"
    if inputs.stages > 1:
        line += f"; {_seconds(planned.makespan_ms)} until the last one leaves the last of {inputs.stages} stages"
    lines = [line]
    if inputs.mode.kind == EQUAL and inputs.model is not None:
        if inputs.model.c > latency.work(inputs.model, 0, inputs.base):
            lines.append("  c is most of what the first chunk takes, and smaller ones would pay it again: not shrunk")
        last = latency.exhausted_after(inputs.model, inputs.base)
        if last is not None and planned.chunks[-1].prefix > last:
            lines.append(
                f"  beyond prefix {last:,}, its rebuild alone takes as long as the first chunk: not shrunk there"
            )
    if inputs.mode.kind == PIPELINE:
        ceiling = planned.choice.ceiling
        chosen = (
            f"chunks of at most {latency.in_ms(ceiling):,.0f} ms"
            if ceiling is not None
            else f"chunks of at most {planned.choice.most:,} tokens"
        )
        lines.append(f"  the pipeline is through soonest with {chosen}")
    return lines


def _seconds(ms: float) -> str:
    return f"{ms / 1000:,.2f} s"


def _fixed(planned: Plan) -> str:
    other, own = planned.fixed, len(planned.chunks)
    if other.chunks == own:
        return f"fixed: chunks of {other.tokens:,} throughout come to the same"
    line = (
        f"fixed: chunks of {other.tokens:,} throughout have the same peak, {other.chunks:,} of them instead of {own:,}"
    )
    if other.makespan_ms is not None and planned.makespan_ms:
        line += (
            f"; they take {_seconds(other.makespan_ms)}, {other.makespan_ms / planned.makespan_ms:.2f} times as long"
        )
    return line


def draw(planned: Plan, file: Path) -> None:
    """Chunk, transient and time against the prefix, as far as they are known. Raises OSError."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    prefixes = [one.prefix for one in planned.chunks]
    curves = [
        ("new tokens", [float(one.tokens) for one in planned.chunks]),
        ("transient, GiB", [held / GIB for held in planned.bytes_of if held is not None]),
        ("ms a chunk", [ms for ms in planned.ms_of if ms is not None]),
    ]
    curves = [(label, values) for label, values in curves if len(values) == len(prefixes)]
    figure, axes = plt.subplots(len(curves), 1, sharex=True, squeeze=False, figsize=(8, 1 + 2.2 * len(curves)))
    for axis, (label, values) in zip(axes[:, 0], curves, strict=True):
        axis.step(prefixes, values, where="post", color="tab:blue", linewidth=1.2)
        axis.set_ylabel(label)
        axis.set_ylim(0, 1.1 * max(values))
        axis.grid(visible=True, alpha=0.3)
    axes[-1, 0].set_xlabel("prefix, tokens")
    axes[-1, 0].xaxis.set_major_formatter(lambda tokens, _: f"{tokens:,.0f}")
    axes[0, 0].set_title(f"plan for {planned.prompt:,} tokens: {len(planned.chunks):,} chunks")
    figure.tight_layout()
    figure.savefig(file, dpi=120)
    plt.close(figure)
