"""Whose pass it is while one long request is being prefilled.

In the stock engine the next chunk of an open request takes the whole chunk of every pass, and prefill comes before
decoding: for the minutes a 500k prompt takes, nobody else gets a first token, and no stream gets its next one. So after
every n chunks one pass belongs to waiting requests that fit whole, and one to decoding. Counts only, no clock: every
rank comes to the same turn at the same pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Turn(Enum):
    """What a pass is for."""

    STOCK = "stock"  # as the engine would have it: the next chunk
    WAITING = "waiting"
    DECODE = "decode"


@dataclass
class Turns:
    """every: chunks of a long request between two turns of the others; 0: never. slots: batches a loop keeps in flight.

    In a pipeline each slot has decoding requests of its own, and each gets its decoding pass.
    """

    every: int
    slots: int = 1
    _chunks: int = 0
    _decode_passes: int = 0

    def next(self, *, long_open: bool, waiting: bool, decoding: bool) -> Turn:
        """Whose the coming pass is. Asked again in the same pass when a WAITING turn finds nobody who fits."""
        if not long_open or not self.every:
            self._chunks = self._decode_passes = 0
            return Turn.STOCK
        if self._chunks >= self.every:
            self._chunks = 0
            self._decode_passes = self.slots
            if waiting:
                return Turn.WAITING
        if self._decode_passes:
            self._decode_passes -= 1
            if decoding:
                return Turn.DECODE
        return Turn.STOCK

    def chunk_ran(self) -> None:
        """A chunk of the long request is on its way."""
        self._chunks += 1
