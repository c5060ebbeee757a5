"""Tables for people: with lines on a terminal; in a pipe or a log, one line a row and nothing cut or folded.

Every text is shown as it is: what looks like markup is no markup, and control characters are written out.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

WIDEST_PADDING = 80


def show(headings: Sequence[str], groups: Sequence[Sequence[Sequence[str]]], title: str = "") -> None:
    """Print rows of texts, a line between groups of them."""
    cleaned = [[[printable(cell) for cell in row] for row in group] for group in groups]
    if sys.stdout.isatty():
        table = Table(title=Text(title) if title else None, title_justify="left")
        for heading in headings:
            table.add_column(heading, overflow="fold")
        for group in cleaned:
            for row in group:
                table.add_row(*(Text(cell) for cell in row))
            table.add_section()
        Console().print(table)
        return
    rows = [list(headings), *(row for group in cleaned for row in group)]
    # One long value does not push the rest of its column away.
    widths = [max(len(cell) for cell in column if len(cell) <= WIDEST_PADDING) for column in zip(*rows, strict=True)]
    if title:
        print(title)
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def printable(text: object) -> str:
    """A text on one line that cannot steer a terminal: what is not printable as Python writes it."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in str(text))
