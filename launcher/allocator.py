"""What torch's allocator settings mean for a server with long prefills. Text only, torch is not imported."""

from __future__ import annotations

from collections.abc import Mapping

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def problems(environ: Mapping[str, str], *, allow_expandable_segments: bool) -> list[str]:
    """Reasons not to start."""
    if allow_expandable_segments:
        return []
    return [
        f"{name} has expandable_segments:True. On the stack that DynChunk comes from, that returns NaN logits for "
        "every prefill of more than 64 tokens. Set it to False, or DYNCHUNK_ALLOW_EXPANDABLE_SEGMENTS=1 if you have "
        "seen right answers from long prompts with it"
        for name in VARIABLES
        if _options(environ, name).get("expandable_segments", "").lower() == "true"
    ]


def warnings(environ: Mapping[str, str]) -> list[str]:
    """Settings that do not do what they look like."""
    return [
        f"{name}: garbage_collection_threshold does nothing unless a per-process memory fraction is set, and SGLang "
        "sets none; add per_process_memory_fraction:F (torch 2.14 and later) or drop it"
        for name in VARIABLES
        if "garbage_collection_threshold" in (options := _options(environ, name))
        and "per_process_memory_fraction" not in options
    ]


def _options(environ: Mapping[str, str], name: str) -> dict[str, str]:
    pairs = (part.partition(":") for part in environ.get(name, "").split(","))
    return {key.strip(): value.strip() for key, _, value in pairs if key.strip()}
