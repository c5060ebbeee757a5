"""What the operator sees while the ramp runs: a live line on a terminal, plain lines in a pipe."""

from __future__ import annotations

import time
from dataclasses import dataclass

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table

from scripts.verify.decide import HOST_FIGURE, gib
from scripts.verify.engine import dynchunk_active
from scripts.verify.report import probe_chunks
from scripts.verify.results import Probe, Run, Verdict

_PLAIN_EVERY_S = 10.0
_STYLES = {
    Verdict.PASSED: "green",
    Verdict.CLOSE: "yellow",
    Verdict.PROJECTED: "yellow",
    Verdict.REFUSED: "yellow",
    Verdict.NOT_RUN: "dim",
    Verdict.INTERRUPTED: "yellow",
}


@dataclass(frozen=True)
class Now:
    """One moment of one size. doing: what is waited for when no prompt is running. figure: what the bytes are."""

    available_bytes: int
    low_bytes: int
    guard_bytes: int
    size_tokens: int = 0
    elapsed_s: float = 0.0
    done_tokens: int | None = None
    tokens_per_s: float | None = None
    left_s: float | None = None
    warning: bool = False
    doing: str = ""
    figure: str = HOST_FIGURE


class Display:
    """Close it: the live line is gone then, the rows stay."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None
        self._plain_s = time.monotonic()

    def close(self) -> None:
        """Take the live line away; lines that stay may still follow."""
        if self._live is not None:
            self._live.stop()

    def head(self, run: Run, folder: str) -> None:
        """What is about to happen."""
        version = f"SGLang {run.engine['version']}" if run.engine.get("version") else "a server"
        active = "DynChunk active" if dynchunk_active(run.engine) else "DynChunk not active"
        self.say(f"[bold]memguard[/] {escape(run.label)}: {escape(version)} at {escape(run.url)}, {active}")
        self.say(
            f"MemAvailable {gib(run.baseline_bytes)}, guard {gib(run.guard_bytes)} "
            f"({gib(run.baseline_bytes - run.guard_bytes)} to spare){_judged(run)}, report in {escape(folder)}"
        )

    def row(self, probe: Probe) -> None:
        """A size that is done with."""
        facts = [f"{probe.size_tokens:>9,} tokens"]
        if probe.seconds is not None:
            facts.append(f"{probe.seconds:8,.1f} s")
        if probe.tokens_per_s is not None:
            facts.append(f"{probe.tokens_per_s:8,.0f} tokens/s")
        if probe.low_water_bytes is not None:
            facts.append(f"low {gib(probe.low_water_bytes)}")
        if probe.chunks:
            facts.append(f"chunks {probe_chunks(probe)}")
        verdict = probe.verdict.value + (f": {probe.detail}" if probe.detail else "")
        self.say(f"{'  '.join(facts)}  [{_STYLES.get(probe.verdict, 'bold red')}]{escape(verdict)}[/]")

    def now(self, now: Now) -> None:
        """The present moment; replaces the one before."""
        if self._live is not None:
            self._live.start()  # does nothing if it has been
            self._live.update(_line(now), refresh=True)
        elif time.monotonic() - self._plain_s >= _PLAIN_EVERY_S:
            self._plain_s = time.monotonic()
            self._console.print("  ".join(_facts(now)), highlight=False, soft_wrap=True)

    def say(self, markup: str) -> None:
        """A line that stays."""
        self._console.print(markup, highlight=False, soft_wrap=True)
        self._plain_s = time.monotonic()

    def problem(self, text: str) -> None:
        """A line that stays and stands out."""
        self.say(f"[bold red]memguard:[/] {escape(text)}")


def _judged(run: Run) -> str:
    return ", judged by what the engine's own processes take" if run.own_memory else ""


def _facts(now: Now) -> list[str]:
    if now.doing:
        facts = [now.doing]
    else:
        done = "tokens done unknown (no trace)" if now.done_tokens is None else f"{now.done_tokens:,} done"
        facts = [f"{now.size_tokens:,} tokens", done, f"{_clock(now.elapsed_s)} gone"]
        if now.tokens_per_s is not None:
            facts.append(f"{now.tokens_per_s:,.0f} tokens/s")
        if now.left_s is not None:
            facts.append(f"about {_clock(now.left_s)} left")
    facts.append(f"{now.figure} {gib(now.available_bytes)}, low {gib(now.low_bytes)}, guard {gib(now.guard_bytes)}")
    return facts


def _line(now: Now) -> Table:
    line = Table.grid(padding=(0, 2))
    cells: list[str | ProgressBar] = [f"[yellow]{fact}[/]" if now.warning else fact for fact in _facts(now)]
    if now.done_tokens is not None and not now.doing:
        cells.insert(1, ProgressBar(total=max(1, now.size_tokens), completed=now.done_tokens, width=20))
    line.add_row(*cells)
    return line


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
