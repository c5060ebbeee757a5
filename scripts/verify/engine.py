"""What of /server_info belongs into a report. Pure; nothing else of it is kept, it may hold keys."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

REFERENCE_BACKEND = "dynchunk_reference"

FLAGS = (
    "chunked_prefill_size",
    "max_prefill_tokens",
    "context_length",
    "page_size",
    "attention_backend",
    "prefill_attention_backend",
    "tp_size",
    "pp_size",
    "dp_size",
    "nnodes",
    "mem_fraction_static",
    "max_total_num_tokens",
    "max_req_input_len",
    "kv_cache_dtype",
    "quantization",
    "disable_radix_cache",
    "enable_mixed_chunk",
    "enable_dynamic_chunking",
    "disable_overlap_schedule",
)


def facts(info: Mapping[str, Any]) -> dict[str, Any]:
    """Version, model, the flags that matter, DynChunk's state on each data-parallel rank (empty: not active)."""
    return {
        "version": info.get("version"),
        "model": info.get("served_model_name") or info.get("model_path"),
        "flags": {name: info[name] for name in FLAGS if info.get(name) is not None},
        "dynchunk": _dynchunk(info),
        "reference_platform": REFERENCE_BACKEND in {info.get(name) for name in FLAGS if name.endswith("backend")},
    }


NOTHING_KNOWN: dict[str, Any] = {
    "version": None,
    "model": None,
    "flags": {},
    "dynchunk": [],
    "reference_platform": False,
}


def unused_reserved_bytes(info: Mapping[str, Any]) -> int | None:
    """What the allocators of all ranks hold of their GPUs unused, as DynChunk reports it; None where it does not."""
    devices = [state.get("device") for state in _dynchunk(info)]
    unused = [device["unused_reserved_bytes"] for device in devices if isinstance(device, dict)]
    return sum(map(int, unused)) if unused else None


def coefficient(info: Mapping[str, Any]) -> dict[str, Any] | None:
    """What a row and key costs, as DynChunk has measured it so far; the dearest where several replicas tell."""
    found = [state.get("coefficient") for state in _dynchunk(info)]
    measured = [one for one in found if isinstance(one, dict) and one.get("belongs_to")]
    # A line counts before anything else: the others have no bytes for a row and key.
    return max(measured, key=lambda one: float(one.get("bytes_per_pair") or 0), default=None)


def longest_prompt(info: Mapping[str, Any], context_tokens: int | None) -> tuple[int, str] | None:
    """(the longest prompt that leaves room for one answer token, what binds); None where the server does not say.

    context_tokens: what the OpenAI endpoint says, for servers that were started without a context length.
    """
    limits = []
    context = info.get("context_length") or context_tokens
    if context:
        limits.append((int(context) - 1, f"the context length of {int(context):,}"))
    longest_input = info.get("max_req_input_len")
    if longest_input:  # the engine takes prompts below it; it keeps a few tokens of the context for itself
        pool = info.get("max_total_num_tokens")
        binding = (
            f"the KV cache of {int(pool):,} tokens"
            if pool and context and int(pool) < int(context)
            else f"the engine's limit of {int(longest_input):,} for an input"
            if not context
            else f"the context length of {int(context):,}"
        )
        limits.append((int(longest_input) - 1, binding))
    return min(limits, default=None)


def vocab_size(info: Mapping[str, Any]) -> int | None:
    """The size of the vocabulary, where this engine version says it."""
    size = info.get("vocab_size")
    return int(size) if isinstance(size, int) and size > 0 else None


def trace_path(engine: Mapping[str, Any]) -> Path | None:
    """The trace that DynChunk writes, if it does, as `facts` knows it."""
    for state in engine["dynchunk"]:
        hook = state.get("hooks", {}).get("trace", {})
        if hook.get("outcome") == "applied" and hook.get("detail"):
            return Path(str(hook["detail"]))
    return None


def dynchunk_active(engine: Mapping[str, Any]) -> bool:
    """Whether DynChunk sizes this engine's chunks; in report mode it only says what it would do."""
    return any(state.get("mode") == "on" for state in engine["dynchunk"])


def label(engine: Mapping[str, Any]) -> str:
    """What a run is called if nobody named it."""
    return "dynchunk" if dynchunk_active(engine) else "stock"


def _dynchunk(info: Mapping[str, Any]) -> list[dict[str, Any]]:
    """DynChunk's state on each data-parallel rank where it is active."""
    states = info.get("internal_states") or []
    return [
        state["dynchunk"] for state in states if isinstance(state, dict) and isinstance(state.get("dynchunk"), dict)
    ]
