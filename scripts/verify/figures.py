"""The report's plots. Importing this imports matplotlib; only `publish` does, when nothing is measured any more."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from scripts.verify import bands
from scripts.verify.decide import GIB, HOST_FIGURE, Sample
from scripts.verify.report import band_tokens
from scripts.verify.results import Chunk, Run

Measured = Sequence[tuple[Run, Sequence[Sample]]]

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")  # told apart by colour-blind readers too
MARKERS = ("o", "s", "^", "D", "v", "P")
GUARD_COLOR = "#b00020"
_WIDTH_IN = 9.0
_DPI = 110
_ROOM_ABOVE = 0.10
_MOST_POINTS = 900
_LONG_LABEL = 30  # characters; four of them do not fit beside each other
_LABEL_SHARE = 0.045  # of the width, which a size's name needs


def draw(folder: Path, measured: Measured) -> list[str]:
    """Draw what there is data for; -> the names of the files. Raises OSError where the folder cannot take them."""
    figures = {
        "memory.png": memory(measured),
        "chunks-over-time.png": chunks_over_time(measured),
        "chunk-by-prefix.png": chunk_by_prefix(measured),
        "tokens-per-second.png": tokens_per_second(measured),
    }
    drawn = []
    for name, figure in figures.items():
        if figure is not None:
            FigureCanvasAgg(figure)
            figure.savefig(folder / name, dpi=_DPI)
            drawn.append(name)
    return drawn


def memory(measured: Measured) -> Any:
    """MemAvailable over time, with the guard and the moment it tripped.

    A ramp dips with every chunk: where the dips are too close for a line, the line is the lowest of each moment and the
    shade above it reaches to the highest.
    """
    with_samples = [(index, run, samples) for index, (run, samples) in enumerate(measured) if samples]
    if not with_samples:
        return None
    figure, axes = _figure(height_in=4.6)
    own_guards = _guards_differ(measured)
    low_gib, high_gib = float("inf"), 0.0
    for index, run, samples in with_samples:
        times, lowest, highest = _envelope(run, samples)
        width = _line_width(index, len(measured))
        axes.plot(times, lowest, color=_color(index), linewidth=width, label=f"{run.label}: {run.figure}")
        if len(times) < len(samples):
            axes.fill_between(times, lowest, highest, color=_color(index), alpha=0.18, linewidth=0)
        hosts = _host_line(axes, run, samples, _color(index))
        tripped_gib = [run.abort.available_bytes / GIB] if run.abort else []
        low_gib, high_gib = (
            min(low_gib, run.guard_bytes / GIB, *tripped_gib, *lowest, *hosts),
            max(high_gib, *highest, *hosts),
        )
        if run.guard_bytes and (own_guards or index == with_samples[0][0]):
            _guard_line(axes, run, _color(index) if own_guards else None)
    for _, run, _ in with_samples:
        if run.abort is not None:
            axes.plot(
                [run.abort.at_s - run.started_s],
                [run.abort.available_bytes / GIB],
                marker="X",
                markersize=10,
                color=GUARD_COLOR,
                markeredgecolor="white",
                linestyle="none",
                label=f"{run.label}: guard tripped",
                zorder=5,
            )
    room = max(high_gib - low_gib, 0.1) * _ROOM_ABOVE
    axes.set_ylim(max(0.0, low_gib - room), high_gib + room)
    axes.set_ylabel("MemAvailable (GiB)")
    axes.set_xlabel("time since the ramp started (s)")
    _finish(figure, axes, "MemAvailable during the ramp")
    if len(measured) == 1:
        _name_sizes(axes, measured[0][0])
    return figure


def chunks_over_time(measured: Measured) -> Any:
    """The prefix that each chunk found, and below it the chunk's size, over time."""
    runs = [run for run, _ in measured]
    if not _any_chunks(runs):
        return None
    figure = Figure(figsize=(_WIDTH_IN, 6.4), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    for index, run in enumerate(runs):
        named = False
        width = _line_width(index, len(runs))
        for probe in run.probes:
            if not probe.chunks:
                continue
            label = None if named else run.label
            named = True
            starts = [chunk.start_s - run.started_s for chunk in probe.chunks]
            end_s = probe.chunks[-1].end_s - run.started_s
            prefixes = [chunk.prefix_tokens for chunk in probe.chunks]
            last = prefixes[-1] + probe.chunks[-1].tokens
            upper.plot([*starts, end_s], [*prefixes, last], color=_color(index), linewidth=width, label=label)
            chosen = _chosen(probe.chunks)
            lower.step(
                [*starts[: len(chosen)], chosen[-1].end_s - run.started_s],
                [*(chunk.tokens for chunk in chosen), chosen[-1].tokens],
                where="post",
                color=_color(index),
                linewidth=width,
            )
    upper.set_ylabel("prefix (tokens)")
    lower.set_ylabel("chunk (tokens)")
    lower.set_xlabel("time since the ramp started (s)")
    for axes in (upper, lower):
        _from_zero(axes)
        axes.yaxis.set_major_formatter(_THOUSANDS)
        _grid(axes)
    _title_and_legend(figure, upper, "Prefix and chunk size over time")
    return figure


def chunk_by_prefix(measured: Measured) -> Any:
    """Chunk size against the prefix it found: a flat line is a static chunk, a falling one a budget."""
    runs = [run for run, _ in measured]
    if not _any_chunks(runs):
        return None
    figure, axes = _figure(height_in=4.4)
    for index, run in enumerate(runs):
        points = sorted({(chunk.prefix_tokens, chunk.tokens) for p in run.probes for chunk in _chosen(p.chunks)})
        if points:
            axes.plot(
                [prefix for prefix, _ in points],
                [tokens for _, tokens in points],
                color=_color(index),
                marker=MARKERS[index % len(MARKERS)],
                markersize=2.5 + 2 * _line_width(index, len(runs)),
                linestyle="none",
                label=run.label,
            )
    _from_zero(axes)
    axes.set_xlabel("prefix (tokens)")
    axes.set_ylabel("chunk (tokens)")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(_THOUSANDS)
    _finish(figure, axes, "Chunk size by prefix")
    return figure


def tokens_per_second(measured: Measured) -> Any:
    """Tokens per second by band of prefix: a line over all sizes of a run, a dot for every size."""
    runs = [run for run, _ in measured]
    if not any(probe.complete_chunks for run in runs for probe in run.probes):
        return None
    width = band_tokens(runs)
    figure, axes = _figure(height_in=4.4)
    last = 0
    for index, run in enumerate(runs):
        color, marker, line = _color(index), MARKERS[index % len(MARKERS)], _line_width(index, len(runs))
        for probe in run.probes:
            rates = bands.tokens_per_s(probe.complete_chunks, width)
            axes.plot(list(rates), list(rates.values()), marker=".", linestyle="none", color=color, alpha=0.35)
        rates = bands.tokens_per_s([chunk for probe in run.probes for chunk in probe.complete_chunks], width)
        if rates:
            axes.plot(list(rates), list(rates.values()), marker=marker, color=color, linewidth=line, label=run.label)
            last = max(last, *rates)
    names = [bands.name(band, width) for band in range(last + 1)]
    axes.set_xticks(range(last + 1), names, rotation=20, ha="right")
    _from_zero(axes)
    axes.yaxis.set_major_formatter(_THOUSANDS)
    axes.set_xlabel("prefix (tokens)")
    axes.set_ylabel("prefill speed (tokens/s)")
    _finish(figure, axes, "Prefill speed by prefix (line: all prompts, dots: each prompt)")
    return figure


_THOUSANDS = FuncFormatter(lambda value, _: f"{value:,.0f}")


def _figure(height_in: float) -> tuple[Any, Any]:
    figure = Figure(figsize=(_WIDTH_IN, height_in), layout="constrained")
    return figure, figure.subplots()


def _finish(figure: Any, axes: Any, title: str) -> None:
    _grid(axes)
    _title_and_legend(figure, axes, title)


def _title_and_legend(figure: Any, axes: Any, title: str) -> None:
    """The legend stands below the axes, where no data is."""
    handles, labels = axes.get_legend_handles_labels()
    figure.suptitle(title, fontsize=12)
    columns = min(len(labels), 3 if any(len(label) > _LONG_LABEL for label in labels) else 4)
    figure.legend(handles, labels, loc="outside lower center", ncols=columns or 1, frameon=False, fontsize=9)


def _grid(axes: Any) -> None:
    axes.grid(visible=True, color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _name_sizes(axes: Any, run: Run) -> None:
    """A thin line where each prompt starts, with its size on the upper edge."""
    left, right = axes.get_xlim()
    free_from = left
    for probe in run.probes:
        if probe.start_s is None:
            continue
        start = probe.start_s - run.started_s
        axes.axvline(start, color="#999999", linewidth=0.6, zorder=1)
        if start < free_from:
            continue
        free_from = start + (right - left) * _LABEL_SHARE
        axes.annotate(
            f" {bands.thousands(probe.size_tokens)}",
            (start, 1.0),
            xycoords=("data", "axes fraction"),
            va="top",
            fontsize=8,
            color="#555555",
        )


def _envelope(run: Run, samples: Sequence[Sample]) -> tuple[list[float], list[float], list[float]]:
    """(seconds since the start, lowest GiB, highest GiB), at most _MOST_POINTS of each."""
    step = -(-len(samples) // _MOST_POINTS)
    groups = [samples[start : start + step] for start in range(0, len(samples), step)]
    return (
        [group[0].t_s - run.started_s for group in groups],
        [min(sample.available_bytes for sample in group) / GIB for group in groups],
        [max(sample.available_bytes for sample in group) / GIB for group in groups],
    )


def _host_line(axes: Any, run: Run, samples: Sequence[Sample], color: str) -> list[float]:
    """What the host had left, thin, where something else was judged; -> its GiB."""
    read = [
        (s.t_s - run.started_s, s.host_available_bytes / GIB) for s in samples if s.host_available_bytes is not None
    ]
    if not read:
        return []
    step = -(-len(read) // _MOST_POINTS)
    lowest = [min(read[start : start + step], key=lambda point: point[1]) for start in range(0, len(read), step)]
    times, hosts = zip(*lowest, strict=True)
    axes.plot(times, hosts, color=color, linewidth=0.6, alpha=0.7, label=f"{run.label}: {HOST_FIGURE}")
    return list(hosts)


def _guard_line(axes: Any, run: Run, own_color: str | None) -> None:
    axes.axhline(
        run.guard_bytes / GIB,
        color=own_color or GUARD_COLOR,
        linestyle="--",
        linewidth=1.4,
        label=(f"{run.label}: " if own_color else "") + f"guard, {run.guard_bytes / GIB:.2f} GiB",
    )


def _line_width(index: int, n_runs: int) -> float:
    """Earlier runs are wider, so that a later one that goes the same way does not hide them."""
    return 1.2 + 1.6 * (n_runs - 1 - index)


def _guards_differ(measured: Measured) -> bool:
    guards = [run.guard_bytes for run, _ in measured if run.guard_bytes]
    return max(guards, default=0) - min(guards, default=0) > GIB // 100


def _any_chunks(runs: Iterable[Run]) -> bool:
    return any(probe.chunks for run in runs for probe in run.probes)


def _chosen(chunks: Sequence[Chunk]) -> Sequence[Chunk]:
    """Without the rest of a prompt at its end, whose size nobody chose."""
    return chunks[:-1] or chunks


def _from_zero(axes: Any) -> None:
    axes.margins(y=_ROOM_ABOVE)
    axes.set_ylim(bottom=0)


def _color(index: int) -> str:
    return COLORS[index % len(COLORS)]
