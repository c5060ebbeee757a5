"""What a chunk size means to the engine's other settings. Pure arithmetic; sizes in tokens.

Sources, of the rules that are not in the engine's own checks: sgl-project/sglang issues and pull requests 36458
(sliding-window pool), 20018 and 35414 (data-parallel attention), 26777 (one lock over a whole chunk), and
kvcache-ai/sglang 60 (the ratio).
"""

from __future__ import annotations

from scripts.doctor.verdict import Check, fail, ok, warn

# Two chunks hold their window rows at once: nothing is evicted before the second of them has run.
CHUNKS_IN_FLIGHT = 2
RATIO_MARGIN = 1.05
RATIO_LEAST, RATIO_MOST = 0.1, 0.9
WINDOWS_IN_A_CHUNK = 64


def swa_pool_tokens(max_total_tokens: int, ratio: float, page: int) -> int:
    """The sliding-window layers' part of the KV cache: whole pages of `ratio` of the whole."""
    return int(max_total_tokens // page * page * ratio) // page * page


def largest_chunk(swa_pool: int, page: int) -> int:
    """The largest chunk of which two fit into the sliding-window pool beside one page. Whole pages, rounded down."""
    return max((swa_pool - page) // CHUNKS_IN_FLIGHT // page * page, 0)


def ratio_wanted(chunk: int, max_total_tokens: int) -> float:
    """The --swa-full-tokens-ratio that makes room for this chunk."""
    wanted = CHUNKS_IN_FLIGHT * chunk * RATIO_MARGIN / max_total_tokens
    return min(max(wanted, RATIO_LEAST), RATIO_MOST)


def swa_pool(chunk: int, max_total_tokens: int, ratio: float, page: int) -> Check:
    """Whether prefill of a sliding-window model can run out of window rows and hang, while /health still answers."""
    name = "sliding-window pool"
    pool = swa_pool_tokens(max_total_tokens, ratio, page)
    most = largest_chunk(pool, page)
    figures = f"{max_total_tokens:,} tokens x {ratio:g} in pages of {page} are {pool:,} window tokens"
    if chunk <= most:
        return ok(name, f"{figures}; chunks of up to {most:,} fit, {chunk:,} is set")
    wanted = ratio_wanted(chunk, max_total_tokens)
    return fail(
        name,
        f"{figures}: a chunk may be (pool - page) / {CHUNKS_IN_FLIGHT} = {most:,} at the most, {chunk:,} is set; "
        "prefill would hang without a word while /health answers",
        (f"CHUNKED_PREFILL_SIZE={most}, or " if most else "")
        + f"--swa-full-tokens-ratio {wanted:.3f} ({CHUNKS_IN_FLIGHT} x {chunk:,} x {RATIO_MARGIN} / "
        f"{max_total_tokens:,}), or more MAX_TOTAL_TOKENS",
    )


def window_lock(chunk: int, window: int) -> Check:
    """Whether a chunk holds far more window rows than the window needs."""
    name = "chunk and window"
    share = chunk / window
    if share <= WINDOWS_IN_A_CHUNK:
        return ok(name, f"a chunk of {chunk:,} is {share:.0f} windows of {window:,}")
    return warn(
        name,
        f"a chunk of {chunk:,} keeps {share:.0f} times the window of {window:,} locked until it is cached; the "
        "sliding-window pool fills long before the cache does, and requests are taken back and run again",
        f"CHUNKED_PREFILL_SIZE={window * WINDOWS_IN_A_CHUNK} or less",
    )


def dp_attention(chunk: int, dp_size: int, chunk_max: int | None) -> Check:
    """What is left of the chunk on each rank. chunk_max: DYNCHUNK_CHUNK_MAX where it is set."""
    name = "data-parallel attention"
    each = chunk // dp_size
    reason = f"CHUNKED_PREFILL_SIZE={chunk:,} on {dp_size} data-parallel ranks is {each:,} tokens per rank"
    if chunk_max is not None and chunk_max > each:
        reason += f"; DYNCHUNK_CHUNK_MAX={chunk_max:,} is above that and does not count"
    if each < 1:
        return fail(name, reason, f"CHUNKED_PREFILL_SIZE={chunk * dp_size} for {chunk:,} on each rank")
    return warn(name, reason, f"CHUNKED_PREFILL_SIZE={chunk * dp_size} for {chunk:,} on each rank, if memory allows")


def requests_per_stage(max_running_requests: int, pp_size: int) -> Check:
    """Whether every pipeline stage can have a request of its own."""
    name = "requests and pipeline stages"
    each = max_running_requests // pp_size
    reason = f"MAX_RUNNING_REQUESTS={max_running_requests} // PP_SIZE={pp_size} = {each} requests in each micro-batch"
    if each >= 1:
        return ok(name, reason)
    return fail(name, reason + ": there is less than one for each stage", f"MAX_RUNNING_REQUESTS={pp_size} or more")


def mixed_with_speculation(algorithm: str) -> Check:
    """Mixed chunks run decoding requests beside a prefill as plain steps of one token."""
    return fail(
        "mixed chunk",
        f"--enable-mixed-chunk with --speculative-algorithm {algorithm}: a speculating request cannot resume from a "
        "mixed step; the engine refuses it or turns it off, depending on version and algorithm",
        "take out --enable-mixed-chunk; DYNCHUNK_INTERLEAVE gives decoding its passes",
    )


def page_and_chunk(chunk: int, page: int) -> Check:
    """What the engine asserts at start, after loading: its chunk is whole pages."""
    name = "chunk and page"
    if chunk and chunk % page == 0:
        return ok(name, f"{chunk:,} is {chunk // page:,} pages of {page}")
    cure = f"CHUNKED_PREFILL_SIZE={chunk // page * page}" if chunk > page else f"CHUNKED_PREFILL_SIZE={page} or more"
    return fail(name, f"a chunk of {chunk:,} is no multiple of the engine's page of {page}; it will not start", cure)


def truncation_alignment(chunk: int, budget: int, align: int, context_tokens: int) -> Check:
    """Whether chunks that must be multiples of `align` can keep the budget (token^2) at the longest context."""
    name = "truncation alignment"
    if chunk < align:
        return fail(
            name,
            f"prompts are cut at multiples of {align:,} only, and the chunk is {chunk:,}: a longer prompt would wait "
            "forever",
            f"CHUNKED_PREFILL_SIZE={align} or a multiple",
        )
    last = budget // align
    if last >= context_tokens:
        return ok(name, f"prompts are cut at multiples of {align:,}, within the budget up to {last:,} tokens")
    return warn(
        name,
        f"prompts are cut at multiples of {align:,} only (deterministic inference): from a prefix of {last:,} on every "
        f"chunk exceeds the budget of {budget:,}",
        f"another attention backend, or CONTEXT_LENGTH={last} or less",
    )


def context_parallel(chunk_min: int, cp_size: int) -> Check:
    """Each of `cp_size` ranks computes its share of a chunk's rows; with too few the engine leaves it for a forward."""
    name = "context parallel prefill"
    least = 2 * cp_size
    reason = f"the rows of a chunk are divided by {cp_size}; the budget counts them whole, so each rank stays below it"
    if chunk_min >= least:
        return ok(name, reason)
    return warn(name, f"{reason}; chunks below {least} rows run without it", f"DYNCHUNK_CHUNK_MIN={least} or more")
