"""REPORT.md: one run, or several side by side, as text. Pure.

Another script may load runs with `records.load` and call `render`, `joint_table` or `results_table`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.verify import bands
from scripts.verify.decide import LOAD, ORDINARY_GUARD_BYTES, OWN_FIGURE, START, gib
from scripts.verify.results import Chunk, Outcome, Probe, Run
from scripts.verify.sampler import SLOWEST_PROMISED_S

NO_CHUNKS = "no trace: chunk sizes unknown"
_UNKNOWN = "-"
_MOST_SIZES_NAMED = 3
_HOSTS_LOW = "host's low water"


def render(runs: Sequence[Run], plot_files: Sequence[str], remarks: Sequence[str] = ()) -> str:
    """The whole report. plot_files: names of the PNG files beside it."""
    parts = [f"# memguard: {', '.join(run.label for run in runs)} ({_dates(runs)})"]
    if any(run.engine.get("reference_platform") for run in runs):
        parts.append(
            "> **These figures are of DynChunk's CPU reference platform, not of a GPU.** The scheduler and its chunk "
            "sizes are the engine's own; seconds and bytes are what this machine's CPU took."
        )
    parts += [_summary(run) for run in runs]
    if len(runs) > 1:
        parts += ["## Side by side", joint_table(runs)]
    for run in runs:
        parts += [f"## {'Sizes' if len(runs) == 1 else run.label}", results_table(run), *_after_table(run)]
    parts += ["## Tokens per second by prefix", bands_table(runs)]
    parts += ["## Plots", *(_plot(name) for name in plot_files), *remarks]
    if not plot_files and not remarks:
        parts.append("There was nothing to draw.")
    parts += ["## What ran", facts_table(runs), *_dynchunk(runs)]
    parts += ["## What the words mean", _WORDS + (_OWN_WORDS if any(run.own_memory for run in runs) else "")]
    return "\n\n".join(parts) + "\n"


def results_table(run: Run) -> str:
    """A row for every size of one run."""
    gpus = any(probe.gpu_free_low_bytes for probe in run.probes)
    hosts = run.own_memory
    head = ["prompt", "seconds", "tokens/s", "chunk sizes", "cached", "low water", "above the guard"]
    head += [*([_HOSTS_LOW] if hosts else []), *(["GPU free"] if gpus else []), "verdict"]
    rows = []
    for probe in run.probes:
        low = probe.low_water_bytes
        rows.append(
            [
                f"{probe.size_tokens:,}",
                _number(probe.seconds, 1),
                _number(probe.tokens_per_s),
                probe_chunks(probe) or _UNKNOWN,
                _number(probe.cached_tokens),
                _gib(low),
                _UNKNOWN if low is None else gib(low - run.guard_bytes),
                *([_gib(probe.host_low_water_bytes)] if hosts else []),
                *([_gpu_free(probe)] if gpus else []),
                probe.verdict.value + (f": {probe.detail}" if probe.detail else ""),
            ]
        )
    return table(head, rows, left=(3, len(head) - 1))


def joint_table(runs: Sequence[Run]) -> str:
    """A row for every size, for each run its seconds, tokens/s, low water and verdict in a word."""
    sizes = sorted({probe.size_tokens for run in runs for probe in run.probes})
    hosts = any(run.own_memory for run in runs)
    columns = ("s", "tokens/s", "low water", *([_HOSTS_LOW] if hosts else []), "verdict")
    head = ["prompt", *(f"{run.label}: {column}" for run in runs for column in columns)]
    rows = []
    for size in sizes:
        row = [f"{size:,}"]
        for run in runs:
            probe = next((p for p in run.probes if p.size_tokens == size), None)
            if probe is None:
                row += [_UNKNOWN] * len(columns)
                continue
            row += [
                _number(probe.seconds, 1),
                _number(probe.tokens_per_s),
                _gib(probe.low_water_bytes),
                *([_gib(probe.host_low_water_bytes)] if hosts else []),
                probe.verdict.value,
            ]
        rows.append(row)
    return table(head, rows, left=tuple(range(len(columns), len(head), len(columns))))


def bands_table(runs: Sequence[Run]) -> str:
    """A row for every size and run, a column for every band of prefix."""
    width = band_tokens(runs)
    measured = [
        (run, probe, rates)
        for run in runs
        for probe in run.probes
        if (rates := bands.tokens_per_s(probe.complete_chunks, width))
    ]
    if not measured:
        return (
            "Unknown (the trace is incomplete)."
            if any(p.chunks for r in runs for p in r.probes)
            else f"Unknown ({NO_CHUNKS})."
        )
    last = max(max(rates) for _, _, rates in measured)
    head = ["prompt", *(["run"] if len(runs) > 1 else []), *(bands.name(band, width) for band in range(last + 1))]
    rows = [
        [
            f"{probe.size_tokens:,}",
            *([run.label] if len(runs) > 1 else []),
            *(_number(rates.get(band)) for band in range(last + 1)),
        ]
        for run, probe, rates in sorted(measured, key=lambda item: (item[1].size_tokens, item[0].started_s))
    ]
    return table(head, rows, left=(1,) if len(runs) > 1 else ())


def band_tokens(runs: Sequence[Run]) -> int:
    """One band width for all runs of a report."""
    return bands.width_tokens(max((p.size_tokens for run in runs for p in run.probes if p.chunks), default=1))


def chunk_summary(chunks: Sequence[Chunk]) -> str:
    """'48 of 2,048' or '143: 2,048 to 384 in 8 sizes'; the rest of a prompt at its end is no size of its own."""
    if not chunks:
        return ""
    whole = chunks[:-1] or chunks
    sizes = list(bands.chunk_sizes(whole))
    if len(sizes) <= _MOST_SIZES_NAMED:
        return f"{len(chunks):,} of {', '.join(f'{size:,}' for size in sizes)}"
    return f"{len(chunks):,}: {sizes[0]:,} to {sizes[-1]:,} in {len(sizes)} sizes"


def probe_chunks(probe: Probe) -> str:
    """`chunk_summary`, and how much of the prompt it is about where that is not all of it."""
    missing = probe.untraced_tokens
    seen = sum(chunk.tokens for chunk in probe.chunks)
    return chunk_summary(probe.chunks) + (f" ({seen:,} of {seen + missing:,} tokens)" if missing else "")


def facts_table(runs: Sequence[Run]) -> str:
    """Machine, engine and settings, a column for every run."""
    rows: list[list[str]] = []
    for name, value in _FACTS:
        values = [value(run) for run in runs]
        if any(values):
            rows.append([name, *(v or _UNKNOWN for v in values)])
    flags = {flag: None for run in runs for flag in run.engine.get("flags", {})}
    rows += [
        [f"`{flag}`", *(f"`{run.engine['flags'][flag]}`" if flag in run.engine["flags"] else _UNKNOWN for run in runs)]
        for flag in flags
    ]
    return table(["", *(run.label for run in runs)], rows, left=tuple(range(len(runs) + 1)))


def _summary(run: Run) -> str:
    largest = run.largest_passed_tokens
    low = run.low_water_bytes
    sentences = [f"**{run.label}: {run.outcome.value}.**"]
    if run.abort is not None:
        sentences.append(_abort_sentence(run))
    if largest is not None:
        sentences.append(f"The largest prompt that passed has {largest:,} tokens.")
    elif run.outcome is not Outcome.GUARD:
        sentences.append("No prompt passed.")
    if low is not None:
        sentences.append(
            f"{run.figure} was {gib(run.baseline_bytes)} before the ramp and {gib(low)} at its lowest; "
            f"the guard stood at {gib(run.guard_bytes)}."
        )
    if run.own_memory:
        sentences.append(
            "**It was judged by what the engine's own processes take**, whatever other programs took or gave back; "
            f"the host's own MemAvailable was {_gib(run.host_low_water_bytes)} at its lowest."
        )
    sentences += run.notes
    return " ".join(sentences)


def _abort_sentence(run: Run) -> str:
    abort = run.abort
    if abort is None:
        return ""
    idle = "while the engine started" if abort.phase in (START, LOAD) else "between two prompts"
    where = idle if abort.size_tokens is None else f"at {abort.size_tokens:,} tokens"
    text = f"It tripped {where}: {abort.reason}."
    if abort.size_tokens is not None:
        text += " The request was aborted." if abort.request_ended else " **The request did not end.**"
    if abort.recovered:
        text += f" Memory recovered in {_number(abort.recovery_s, 1)} s."
    elif abort.available_after_bytes is not None:
        text += f" **Memory not recovered**: {run.figure} stayed at {gib(abort.available_after_bytes)}."
    if abort.server_healthy is not None:
        text += " The server is healthy." if abort.server_healthy else " **The server's health check fails.**"
    return text


def _after_table(run: Run) -> list[str]:
    lines = []
    if any(probe.chunks for probe in run.probes):
        lines.append(f"Chunk sizes are from {run.chunk_source}.")
    elif any(probe.start_s is not None for probe in run.probes):
        lines.append(run.chunk_source[:1].upper() + run.chunk_source[1:] + ".")
    missing = sum(probe.untraced_tokens for probe in run.probes)
    if missing:
        seen = sum(chunk.tokens for probe in run.probes for chunk in probe.chunks)
        lines.append(
            f"**The trace covers only {seen:,} of {seen + missing:,} tokens**: lines are missing, so the chunk sizes "
            "are not all there. Sizes it does not cover whole have no speed by prefix."
        )
    reused = sum(1 for probe in run.probes if probe.cached_tokens)
    if reused:
        lines.append(f"Prompts that found cached tokens: {reused}; tokens/s counts the computed ones only.")
    lines += _memory(run)
    if run.steps:
        lines.append("What the guard did, in seconds since the ramp started:")
        lines.append("\n".join(f"- {step.at_s - run.started_s:.1f}: {step.what}" for step in run.steps))
    return lines


def _memory(run: Run) -> list[str]:
    text = f"Memory was read {run.samples:,} times, every {run.sample_interval_s:g} s."
    if run.largest_sample_gap_s > SLOWEST_PROMISED_S:
        text += f" **The longest gap was {run.largest_sample_gap_s:.2f} s**, so a short dip may have been missed."
    if run.swap_in_pages:
        text += f" {run.swap_in_pages:,} pages came back from swap."
    if run.psi_full_max:
        text += f" At the worst, all tasks waited for memory in {run.psi_full_max:.1f} % of 10 s."
    if run.kernel_oom:
        text += f" **The kernel was out of memory {run.kernel_oom:,} times**, by its own lines and kills."
    if run.coefficient is None:
        return [text]
    return [text, f"What long prefills held for a moment, measured in the engine: {run.coefficient.get('in_words')}."]


def _dynchunk(runs: Sequence[Run]) -> list[str]:
    lines = []
    for run in runs:
        states = run.engine.get("dynchunk", [])
        if not states:
            lines.append(f"DynChunk in {run.label}: stock engine, DynChunk not active.")
        for state in states:
            effective = state.get("effective") or {}
            lines.append(
                f"DynChunk in {run.label}: {state.get('version')}, mode {state.get('mode')}"
                + (f", rank {state['rank']}" if state.get("rank") else "")
                + (f"; {effective['summary']}" if effective.get("summary") else "")
                + "."
            )
            by_outcome: dict[str, list[str]] = {}
            for name, hook in (state.get("hooks") or {}).items():
                detail = f" ({hook['detail']})" if hook.get("detail") else ""
                by_outcome.setdefault(str(hook.get("outcome")), []).append(f"`{name}`{detail}")
            if by_outcome:
                lines.append("\n".join(f"- {outcome}: {', '.join(names)}" for outcome, names in by_outcome.items()))
    return lines


def _gpus(run: Run) -> str:
    names: list[str] = []
    for gpu in run.machine.get("gpus", []):
        memory = (
            gib(gpu["memory_bytes"]) if gpu.get("memory_bytes") else "memory not reported, as where it is the host's"
        )
        names.append(f"{gpu['name']} ({memory})")
    return ", ".join(names)


def _swap(run: Run) -> str:
    total = run.machine.get("swap_total_bytes")
    return f"{gib(run.machine.get('swap_used_bytes') or 0)} of {gib(total)} used" if total else "off"


def _gpu_free(probe: Probe) -> str:
    """The fullest GPU at its worst, and what the engine's allocator could have used on top."""
    if not probe.gpu_free_low_bytes:
        return _UNKNOWN
    unused = probe.gpu_unused_bytes
    return gib(min(probe.gpu_free_low_bytes)) + (f", {gib(unused)} reserved unused" if unused is not None else "")


def _guard(run: Run) -> str:
    how = f"baseline less {gib(run.headroom_bytes)}" if run.headroom_bytes is not None else "MemAvailable"
    how += ", by what the engine's own processes take" if run.own_memory else ""
    locked = "locked in memory" if run.locked_in_memory else "not locked in memory"
    return f"{gib(run.guard_bytes)} ({how}); the guard's process was {locked}"


def _text(section: str, name: str) -> Any:
    return lambda run: str(getattr(run, section).get(name) or "")


_FACTS: tuple[tuple[str, Any], ...] = (
    ("command", lambda run: f"`{run.command}`"),
    ("server", lambda run: f"`{run.url}`"),
    ("guard", _guard),
    ("guard while the engine starts", lambda run: gib(run.start_guard_bytes) if run.start_guard_bytes else ""),
    ("signals to the engine", lambda run: run.signals),
    ("machine id", _text("machine", "machine_id")),
    ("kernel", _text("machine", "kernel")),
    ("CPUs", _text("machine", "cpus")),
    ("MemTotal", lambda run: gib(run.machine["memory_total_bytes"]) if run.machine.get("memory_total_bytes") else ""),
    ("swap", _swap),
    ("GPU", _gpus),
    ("GPU driver", _text("machine", "driver")),
    ("DynChunk checkout", _text("machine", "commit")),
    ("image", lambda run: run.image or ""),
    ("engine", lambda run: f"SGLang {run.engine['version']}" if run.engine.get("version") else ""),
    ("model", _text("engine", "model")),
)

_CAPTIONS = {
    "memory.png": "Every chunk makes a dip. Where they are too close to be drawn one by one, the line is the lowest "
    "reading of each moment and the shade above it reaches to the highest.",
    "chunk-by-prefix.png": "The last chunk of a prompt, whatever was left of it, is not drawn.",
}

_WORDS = (
    "**Prompt**: tokens sent; every prompt is new to the server, its cache is emptied in between. "
    "**Prefix**: tokens of the prompt already computed. **Chunk**: new tokens in one forward. "
    "**Low water**: the least MemAvailable read while the size ran. **Guard**: below it the request is aborted. "
    "**Close to the guard**: within half a GiB of it. "
    "MemAvailable is what the kernel can give without swapping, page cache included; on machines whose GPU memory is "
    "host memory it is the number that counts. On others it says nothing about GPU memory. "
    "**GPU free**: the least that the driver had left on a GPU with memory of its own, and what the engine's allocator "
    "held unused after the prompt. "
    "A verdict holds for this machine, driver, image, engine, model, flags and chunk sizes, and for nothing else."
)

_OWN_WORDS = (
    f" **{OWN_FIGURE}**: MemAvailable as it would be if nobody but the engine's own processes had taken or given back "
    "memory since just before the baseline (their anonymous and shared memory, from /proc/PID/status). Where it was "
    "judged, low water is of it, and **host's low water** of the host's MemAvailable, other programs included; below "
    f"{gib(ORDINARY_GUARD_BYTES)} that is judged all the same."
)


def _plot(name: str) -> str:
    image = f"![{Path(name).stem.replace('-', ' ')}]({name})"
    return f"{image}\n\n{_CAPTIONS[name]}" if name in _CAPTIONS else image


def _dates(runs: Sequence[Run]) -> str:
    return ", ".join(dict.fromkeys(run.date for run in runs))


def _gib(n_bytes: int | None) -> str:
    return _UNKNOWN if n_bytes is None else gib(n_bytes)


def _number(value: float | None, decimals: int = 0) -> str:
    return _UNKNOWN if value is None else f"{value:,.{decimals}f}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[int] = ()) -> str:
    """A Markdown table; columns are set to the right unless named in `left`."""
    rule = [":--" if index in left else "--:" for index in range(len(head))]
    lines = [head, rule, *([cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
