"""How many bytes of index scores an engine should hold at once, and what that leaves of the GPU.

The sparse indexer scores rows x keys in tiles of whole rows, fp32, under a limit of bytes. The scoring kernel gives one
block of 128 / heads rows to a multiprocessor, so a tile of fewer rows than all of them can take leaves some idle.
"""

from __future__ import annotations

MIB = 1 << 20
PLAIN_LIMIT_BYTES = 256 * MIB  # costs nothing measurable where no kernel's rows depend on it
SCORE_BYTES = 4  # the engine sizes its tiles as fp32, whatever it scores in
KEYS_STEP = 256  # a row of scores is padded to 1,024 bytes
ROWS_TIMES_HEADS = 128  # what one multiprocessor scores at a time
KEY_BLOCK = 32_768
SMALLEST_KEY_BLOCK = 4_096  # below it, merging costs more than scoring


def row_bytes(keys: int) -> int:
    """One row's scores, padded as the engine pads them."""
    return -(-keys // KEYS_STEP) * KEYS_STEP * SCORE_BYTES


def rows_step(heads: int) -> int:
    """Rows that one multiprocessor scores at a time; tiles are whole multiples of it."""
    return max(1, ROWS_TIMES_HEADS // heads)


def rows_per_tile(limit_bytes: int, keys: int, heads: int) -> int:
    """Rows the engine scores at once under a limit, rounded down; never below one multiprocessor's."""
    step = rows_step(heads)
    return max(step, limit_bytes // row_bytes(keys) // step * step)


def busy_limit_bytes(keys: int, heads: int, processors: int) -> int:
    """The smallest limit whose tiles keep every multiprocessor busy when rows see `keys` keys."""
    return row_bytes(keys) * rows_step(heads) * processors


def auto_limit_bytes(keys: int, heads: int, processors: int) -> int:
    """What `auto` asks for on this GPU and context, before it is capped at the engine's own limit."""
    return max(PLAIN_LIMIT_BYTES, busy_limit_bytes(keys, heads, processors))


def busy_percent(rows: int, heads: int, processors: int) -> int:
    """The share of the multiprocessors that a tile of `rows` rows occupies, rounded down."""
    return min(100, 100 * (rows // rows_step(heads)) // processors)


def key_block(limit_bytes: int, rows: int) -> int:
    """Keys that `rows` rows are scored against at once under a limit: a power of two, so that blocks of 8 fit."""
    block = KEY_BLOCK
    while block > SMALLEST_KEY_BLOCK and rows * block * SCORE_BYTES > limit_bytes:
        block //= 2
    return block
