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
TORCH_BYTES_PER_KEY = 560
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


def doubled(tokens: int, longest_tokens: int) -> int:
    """The power of two that holds `tokens`, but not above what can ever be needed. longest_tokens: 0 if not known."""
    power = 1 << (tokens - 1).bit_length()
    return max(tokens, min(power, longest_tokens)) if longest_tokens else power


def torch_rows(limit_bytes: int, keys: int, heads: int) -> int:
    """Rows that DeepSeek-V4's scoring in plain torch may take at once under a limit, its result not counted.

    For each row and key it holds the gathered page, its bytes and its bf16 values (528 bytes), and the products of all
    heads twice and three times over (6 bytes a head); measured 919 bytes at 64 heads.
    """
    return max(1, limit_bytes // (keys * (TORCH_BYTES_PER_KEY + 6 * heads)))
