"""What torch's allocator settings mean for a server with long prefills. Text only, torch is not imported."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping

from dynchunk.settings import Settings

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
FRACTION = "per_process_memory_fraction"
THRESHOLD = "garbage_collection_threshold"
# Earlier torch ends the import of its allocator with "unrecognized key".
FIRST_WITH_FRACTION = (2, 14)
_ASK = "from importlib.metadata import version; print(version('torch'))"


def problems(environ: Mapping[str, str], *, allow_expandable_segments: bool) -> list[str]:
    """Reasons not to start."""
    first, second = (environ.get(name, "").strip() for name in VARIABLES)
    found = []
    if first and second and first != second:
        found.append(
            f"{VARIABLES[0]}={first} and {VARIABLES[1]}={second}: torch heeds one of them only (2.14 the second); set "
            "the first alone, with all options in it"
        )
    if not allow_expandable_segments:
        found += [
            f"{name} has expandable_segments:True. On the stack that DynChunk comes from, that returns NaN logits for "
            "every prefill of more than 64 tokens. Set it to False, or DYNCHUNK_ALLOW_EXPANDABLE_SEGMENTS=1 if you "
            "have seen right answers from long prompts with it"
            for name in VARIABLES
            if _options(environ, name).get("expandable_segments", "").lower() == "true"
        ]
    return found


def warnings(environ: Mapping[str, str]) -> list[str]:
    """Settings that do not do what they look like."""
    return [
        f"{name}: {THRESHOLD} does nothing unless a per-process memory fraction is set, and SGLang sets none; set "
        "DYNCHUNK_MEMORY_FRACTION (torch 2.14 and later) or drop it"
        for name in VARIABLES
        if THRESHOLD in (options := _options(environ, name)) and FRACTION not in options
    ]


def fraction_problems(settings: Settings, environ: Mapping[str, str], static_share: float | None) -> list[str]:
    """What is wrong with DYNCHUNK_MEMORY_FRACTION and DYNCHUNK_GC_THRESHOLD. static_share: MEM_FRACTION_STATIC."""
    fraction, threshold = settings.memory_fraction, settings.gc_threshold
    if fraction is None:
        return []
    found = [
        f"{name} has {key}, and {knob} is set too; keep one of the two"
        for name in VARIABLES
        for key, knob, value in _knobs(settings)
        if value is not None and key in _options(environ, name)
    ]
    if static_share is not None and fraction <= static_share:
        found.append(
            f"DYNCHUNK_MEMORY_FRACTION={fraction:g} is not above MEM_FRACTION_STATIC={static_share:g}: weights and KV "
            "cache alone would exceed it; raise the first or lower the second"
        )
    elif static_share is not None and threshold is not None and threshold * fraction <= static_share:
        found.append(
            f"DYNCHUNK_GC_THRESHOLD={threshold:g} of DYNCHUNK_MEMORY_FRACTION={fraction:g} is not above "
            f"MEM_FRACTION_STATIC={static_share:g}: torch would look for memory to give back at every new buffer; "
            f"set it above {static_share / fraction:.2f}, or lower MEM_FRACTION_STATIC"
        )
    return found


def fraction_warnings(settings: Settings, static_share: float | None) -> list[str]:
    """What could not be checked."""
    if settings.memory_fraction is None or static_share is not None:
        return []
    warning = (
        "MEM_FRACTION_STATIC is left to the engine, so that nobody knows yet whether DYNCHUNK_MEMORY_FRACTION="
        f"{settings.memory_fraction:g} is above what weights and KV cache take; set both"
    )
    return [warning]


def engine_variables(environ: Mapping[str, str], settings: Settings) -> dict[str, str]:
    """The engine's environment with DynChunk's two options in it; unchanged unless DYNCHUNK_MODE is on.

    An empty variable goes: torch takes an empty PYTORCH_CUDA_ALLOC_CONF as a reason to forget the other one.
    """
    if settings.mode != "on":
        return dict(environ)
    made = {k: v for k, v in environ.items() if k not in VARIABLES or v.strip()}
    if settings.memory_fraction is not None:
        given = [made.pop(name) for name in VARIABLES if name in made]
        ours = [f"{key}:{value:g}" for key, _, value in _knobs(settings) if value is not None]
        made[VARIABLES[0]] = ",".join([*given[-1:], *ours])
    return made


def too_old(settings: Settings, torch_version: str | None) -> str | None:
    """Why the engine's torch cannot have a memory fraction; None where it can, or where nobody asked for one."""
    if settings.memory_fraction is None or settings.mode != "on":
        return None
    numbers = re.match(r"(\d+)\.(\d+)", torch_version or "")
    if numbers and (int(numbers[1]), int(numbers[2])) >= FIRST_WITH_FRACTION:
        return None
    found = f"torch {torch_version}, which refuses {FRACTION}" if torch_version else "no torch that could be asked"
    return (
        f"DYNCHUNK_MEMORY_FRACTION={settings.memory_fraction:g} needs torch 2.14 or later, and the engine's Python has "
        f"{found}; leave DYNCHUNK_MEMORY_FRACTION and DYNCHUNK_GC_THRESHOLD unset"
    )


def torch_version(python: str, environ: Mapping[str, str]) -> str | None:
    """The version of torch in another Python, from its package's metadata; None where there is none."""
    try:
        done = subprocess.run(
            [python, "-c", _ASK], env=dict(environ), capture_output=True, text=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _knobs(settings: Settings) -> tuple[tuple[str, str, float | None], ...]:
    return (
        (FRACTION, "DYNCHUNK_MEMORY_FRACTION", settings.memory_fraction),
        (THRESHOLD, "DYNCHUNK_GC_THRESHOLD", settings.gc_threshold),
    )


def _options(environ: Mapping[str, str], name: str) -> dict[str, str]:
    pairs = (part.partition(":") for part in environ.get(name, "").split(","))
    return {key.strip(): value.strip() for key, _, value in pairs if key.strip()}
