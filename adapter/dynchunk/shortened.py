"""Text of others, cut to a length that fits a message."""

from __future__ import annotations

LONGEST_SHOWN = 200


def shortened(text: str) -> str:
    """A text of any length as one that fits a message."""
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}... ({len(text):,} characters)"
