"""How a reading looks in a terminal."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from launcher import status, tables
from scripts.top.scrape import CACHE_USE, QUEUED, RUNNING, Reading, Replica

GIB = 1 << 30
BAR_COLUMNS = 40


def render(reading: Reading, url: str) -> RenderableType:
    """One panel a replica."""
    if not reading.replicas:
        return Panel("the server shows no metrics yet", title=_named(url))
    parts: list[RenderableType] = []
    for number, replica in reading.replicas.items():
        title = Text(tables.printable(reading.model)) if reading.model else _named(url)
        title.append(f", replica {number}" if len(reading.replicas) > 1 else "")
        parts.append(Panel(_replica(replica, dynchunk=reading.has_dynchunk), title=title, title_align="left"))
    if reading.broken:
        parts.append(Text("not in place: " + ", ".join(reading.broken), style="red"))
    if not reading.has_dynchunk:
        parts.append(Text("no dynchunk_ metrics: the stock engine, or DynChunk before its first prefill"))
    return Group(*parts)


def trouble(message: str, url: str) -> RenderableType:
    """When the server does not answer."""
    return Panel(Text(message, style="yellow"), title=_named(url), title_align="left")


def _named(url: str) -> Text:
    """A server's address as a title, without the name and password in it."""
    return Text(status.shown(url))


def _replica(replica: Replica, *, dynchunk: bool) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column()
    if dynchunk:
        grid.add_row("prefill", _progress(replica))
        grid.add_row("chunk", _chunk(replica))
        grid.add_row("budget", _budget(replica))
        grid.add_row("time", Text(_time(replica)))
        grid.add_row("memory", Text(f"{replica.get('dynchunk_mem_available_bytes') / GIB:.2f} GiB available"))
    running, queued = replica.get(RUNNING), replica.get(QUEUED)
    grid.add_row(
        "requests", Text(f"{running:,.0f} running, {queued:,.0f} queued, KV cache {replica.get(CACHE_USE):.0%} used")
    )
    if dynchunk:
        grid.add_row("since start", Text(_counts(replica)))
    return grid


def _bar(share: float) -> ProgressBar:
    return ProgressBar(total=1.0, completed=min(max(share, 0.0), 1.0), width=BAR_COLUMNS)


def _progress(replica: Replica) -> RenderableType:
    total = replica.get("dynchunk_prefill_total_tokens")
    if not total:
        return Text("no long prompt in flight")
    done, cached = replica.get("dynchunk_prefill_done_tokens"), replica.get("dynchunk_prefill_cached_tokens")
    seconds = replica.get("dynchunk_prefill_elapsed_seconds")
    rate = (done - cached) / seconds if seconds else 0.0
    words = f"{done:,.0f} of {total:,.0f} tokens, {cached:,.0f} cached, {seconds:,.0f} s"
    row = Table.grid(padding=(0, 2))
    # True progress leaves out what was cached: none of it had to be computed.
    row.add_row(
        _bar((done - cached) / (total - cached) if total > cached else 1.0),
        Text(words + (f", {rate:,.0f} tokens/s" if rate else "")),
    )
    return row


def _chunk(replica: Replica) -> Text:
    chunk, rows = replica.get("dynchunk_chunk_tokens"), replica.get("dynchunk_batch_rows")
    longest = replica.get("dynchunk_batch_longest_tokens")
    return Text(f"{chunk:,.0f} tokens of {rows:,.0f} in the batch, on a prefix of {longest:,.0f}")


def _budget(replica: Replica) -> RenderableType:
    share = replica.get("dynchunk_budget_utilisation")
    row = Table.grid(padding=(0, 2))
    row.add_row(_bar(share), Text(f"{share:.0%} of {replica.get('dynchunk_budget_tokens_squared'):,.0f} token^2"))
    return row


def _time(replica: Replica) -> str:
    measured, predicted = (
        replica.get("dynchunk_latency_measured_ms"),
        replica.get("dynchunk_latency_predicted_ms"),
    )
    state = replica.state or "off"
    words = f"latency model {state}"
    if measured:
        words += f"; {measured:,.1f} ms measured"
    return words + (f", {predicted:,.1f} predicted" if predicted else "")


def _counts(replica: Replica) -> str:
    floors = sum(replica.floors.values())
    causes = ", ".join(f"{cause} {count:,.0f}" for cause, count in sorted(replica.floors.items()))
    return (
        f"{replica.get('dynchunk_first_chunk_clamped_total'):,.0f} first chunks made smaller, "
        f"{replica.get('dynchunk_deferred_requests_total'):,.0f} times a request waited, "
        f"{floors:,.0f} chunks at a floor above the budget" + (f" ({causes})" if causes else "") + ", "
        f"cache released {replica.get('dynchunk_empty_cache_total'):,.0f} times "
        f"({replica.get('dynchunk_empty_cache_seconds_total'):,.1f} s)"
    )
