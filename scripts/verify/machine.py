"""What machine this is: a verdict holds for this one only. Read once, before the sampler starts."""

from __future__ import annotations

import hashlib
import importlib
import os
import platform
from pathlib import Path
from typing import Any

import psutil

from scripts.provenance import commit

CHECKOUT = Path(__file__).resolve().parents[2]
_MACHINE_ID = Path("/etc/machine-id")


def facts() -> dict[str, Any]:
    """Plain JSON values: kernel, CPUs, memory, GPUs as far as the driver says, the checkout's commit."""
    memory, swap = psutil.virtual_memory(), psutil.swap_memory()
    return {
        "machine_id": machine_id(),
        "kernel": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "memory_total_bytes": memory.total,
        "swap_total_bytes": swap.total,
        "swap_used_bytes": swap.used,
        **_gpus(),
        "commit": commit(),
    }


def machine_id() -> str:
    """Tells machines apart in reports without naming them."""
    try:
        own = _MACHINE_ID.read_text().strip()
    except OSError:
        own = ""
    return hashlib.sha256(f"dynchunk memguard {own or platform.node()}".encode()).hexdigest()[:12]


def _gpus() -> dict[str, Any]:
    """Names and memory through NVML, never nvidia-smi: that can wait behind the driver's lock for many minutes."""
    try:
        # Comes with the engine, so it may not be here; Any, because it has no types.
        nvml: Any = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except Exception:
        return {"gpus": [], "driver": None}
    gpus = []
    try:
        driver = _text(nvml.nvmlSystemGetDriverVersion())
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            gpus.append({"name": _text(nvml.nvmlDeviceGetName(handle)), "memory_bytes": _memory_bytes(nvml, handle)})
    except Exception:
        return {"gpus": gpus, "driver": None}
    finally:
        nvml.nvmlShutdown()
    return {"gpus": gpus, "driver": driver}


def _memory_bytes(nvml: Any, handle: Any) -> int | None:
    """None where GPU memory is host memory: NVML answers NOT_SUPPORTED there, which is not 0."""
    try:
        return int(nvml.nvmlDeviceGetMemoryInfo(handle).total)
    except Exception:
        return None


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
