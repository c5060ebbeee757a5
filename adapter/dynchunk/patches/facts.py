"""What DynChunk reads off live engine objects, with the names that each version has for it."""

from __future__ import annotations

import os
import platform
from itertools import islice
from typing import Any

from sglang.srt.runtime_context import get_disagg, get_exec, get_parallel, get_schedule

from dynchunk import journal, settings
from dynchunk.patches import score_limits

ENCODER_REPLAY_ROWS = 128  # DeepSeek-V4.1's sliding window: a first chunk must hold a replay of it and a page


def rank_name(scheduler: Any) -> str:
    """This scheduler's place, such as `pp0tp1`, or `dp1pp0tp0` where there are several replicas."""
    place = _place(scheduler)
    dp = place.dp_rank
    return (f"dp{dp}" if dp is not None else "") + f"pp{place.pp_rank}tp{place.tp_rank}"


def is_entry_rank(scheduler: Any) -> bool:
    """Whether requests of this replica enter here: the rank that answers /server_info."""
    place = _place(scheduler)
    return not (place.pp_rank or place.attn_tp_rank or place.attn_cp_rank)


def speaks_for_all(scheduler: Any) -> bool:
    """Whether updates that this rank posts reach every rank that batches as it does.

    Under data-parallel attention several ranks take requests in, and what is not a request goes out from the first, to
    all of them or, where the engine broadcasts controls locally, from the first of each group to its own.
    """
    parallel, moe = get_parallel(), get_exec().moe
    locally = getattr(parallel, "enable_dp_attention_local_control_broadcast", False) or moe.is_ep_scale_joiner
    return is_entry_rank(scheduler) and bool(locally or not getattr(_place(scheduler), "attn_dp_rank", 0))


def pipeline_slots() -> int:
    """Batches that a pipeline keeps in flight, each with decoding requests of its own; 1 without a pipeline."""
    parallel = get_parallel()
    return int(parallel.pp_size + parallel.pp_async_batch_depth) if parallel.pp_size > 1 else 1


def stages() -> int:
    """Pipeline stages."""
    return int(get_parallel().pp_size)


# Switches of the engine that choose how chunks are scored.
SWITCHES = (
    "SGLANG_FP8_PAGED_MQA_LOGITS_TORCH",
    "SGLANG_OPT_USE_TILELANG_INDEXER",
    "SGLANG_OPT_USE_AITER_INDEXER",
    "SGLANG_OPT_DSV4_NONPAGED_INDEXER",
    "SGLANG_OPT_DSV41_BF16_INDEX_LOGITS",
    "SGLANG_DSV41_TORCH_PREFILL_INDEXER",
    "SGLANG_MAX_KV_CHUNK_CAPACITY",
)


def identity(scheduler: Any) -> dict[str, str]:
    """What the time of a chunk depends on, so that a model learned here is used here only."""
    import torch

    parallel, runner = get_parallel(), scheduler.tp_worker.model_runner
    return {
        "engine": journal.engine_version(),
        "model": str(scheduler.model_config.model_path),
        "layout": f"tp{parallel.tp_size} pp{parallel.pp_size} cp{_place(scheduler).attn_cp_size} "
        f"dp{getattr(parallel, 'attn_dp_size', 1)} ep{getattr(parallel, 'moe_ep_size', 1)}",
        "attention backend": type(runner.attn_backend).__name__,
        "device": torch.cuda.get_device_name() if runner.device == "cuda" else f"{runner.device} {platform.node()}",
        "numbers": f"{scheduler.model_config.dtype}, {scheduler.model_config.quantization}, {runner.kv_cache_dtype}",
        "indexer": settings.current().indexer,
        "switches": " ".join(f"{name}={os.environ[name]}" for name in SWITCHES if name in os.environ),
        "chunk size": str(scheduler.chunked_prefill_size),
    }


def cost_identity(scheduler: Any) -> dict[str, str]:
    """What the bytes of a row and key depend on, so that what was measured here counts here only."""
    limit = score_limits.in_force_bytes()
    return identity(scheduler) | {"score limit": "none" if limit is None else f"{limit:,} bytes"}


def long_waiting(scheduler: Any) -> int:
    """Waiting requests that are longer than a chunk; counted no further than the two that matter."""
    chunk = scheduler.chunked_prefill_size
    return len(list(islice((req for req in scheduler.waiting_queue if len(req.origin_input_ids) > chunk), 2)))


def own_order_of_passes() -> str | None:
    """Why passes must not be given to others in this engine, or None. Read from its configuration."""
    if get_exec().dllm.dllm_algorithm is not None:
        return "diffusion models are scheduled in their own way"
    if get_disagg().disaggregation_mode != "null":
        return "prefill and decode are on different servers; the open request is sent from here chunk by chunk"
    if get_schedule().enable_prefill_delayer:
        return "the prefill delayer lets the ranks negotiate once a pass"
    return None


def world() -> tuple[Any, int, int]:
    """(the store the ranks met in, this rank, how many): all ranks that run one engine together."""
    from torch.distributed import distributed_c10d, get_rank, get_world_size, is_initialized

    if not is_initialized():
        return None, 0, 1
    return distributed_c10d._get_default_store(), get_rank(), get_world_size()


def _place(scheduler: Any) -> Any:
    # 0.5.20 keeps the ranks on the scheduler; later versions in the runtime context.
    return getattr(scheduler, "ps", None) or get_parallel()


def prefix_tokens(req: Any) -> int:
    """Tokens of a request already computed. 0.5.22 and later count them; before, it is the list of their slots."""
    prefix = getattr(req, "prefix_len", None)
    return int(len(req.prefix_indices) if prefix is None else prefix)


def total_tokens(req: Any) -> int:
    """Tokens a request has to have computed before it decodes."""
    return len(req.full_untruncated_fill_ids)


def new_tokens(req: Any) -> int:
    """Tokens of a request in the batch it was admitted to."""
    new = getattr(req, "extend_len", None)
    return int(req.extend_range.length if new is None else new)


def longest_decoding(reqs: Any) -> int:
    """The longest context of decoding requests, and one more: with overlap the newest token is not in the list yet."""
    return 1 + max(req.seqlen for req in reqs) if reqs else 0


def cache_left_tokens(scheduler: Any) -> int:
    """Tokens that the cache still takes: what is free, and what is held for nobody. As the engine's adder counts."""
    allocator, tree = scheduler.token_to_kv_pool_allocator, scheduler.tree_cache
    free = getattr(allocator, "full_available_size", allocator.available_size)()
    held = tree.full_evictable_size() if tree.supports_mamba() else tree.evictable_size()
    return int(free + (held[0] if isinstance(held, tuple) else held))


def shorten(req: Any, tokens: int) -> None:
    """Cut an admitted request to fewer new tokens, before anything is allocated for it."""
    start = prefix_tokens(req)
    if hasattr(req, "set_extend_range"):  # up to 0.5.21
        req.set_extend_range(start, start + tokens)
    else:
        req.extend_end = start + tokens


def replay_tokens(adder: Any, req: Any, prefix: int) -> int:
    """Cached rows that run again beside the new ones (encoder replay, 0.5.21 and later)."""
    replay = getattr(adder, "_replay_len", None)
    return 0 if replay is None else replay(req, prefix)


def floors(scheduler: Any, chunk_min: int) -> dict[str, int]:
    """The smallest chunk that works in this engine, by cause, in tokens. Truncation alignment is known only later."""
    found = {"DYNCHUNK_CHUNK_MIN": chunk_min, "page": scheduler.page_size}
    execution = get_exec()
    if getattr(getattr(execution, "features", None), "enable_encoder_swa_bounded_replay", False):
        found["encoder replay"] = ENCODER_REPLAY_ROWS + scheduler.page_size
    if scheduler.tree_cache.supports_mamba() and execution.mamba.enable_mamba_extra_buffer:
        from sglang.srt.runtime_context import mamba_checkpoint_grid

        # A shorter chunk leaves no state in the prefix cache.
        found["mamba checkpoint"] = mamba_checkpoint_grid(scheduler.tree_cache.page_size)
    context_parallel = _place(scheduler).attn_cp_size
    if context_parallel > 1:
        # With fewer rows the engine leaves context parallelism for that forward.
        found["context parallel"] = 2 * context_parallel
    return found
