"""What the CUDA driver and NVML say of the GPUs here, as JSON on stdout. Standard library only, no CUDA context.

A program of its own (`python3 -S -E devices.py`), because a driver can keep a caller waiting for many minutes: doctor
gives it a time limit. `integrated` is the device's own word for GPU memory that is host memory; names say nothing
about it. NVML answers "not supported" for memory there, which is unknown and not 0.
"""

from __future__ import annotations

import ctypes
import json
import sys
from typing import Any

CUDA, NVML = "libcuda.so.1", "libnvidia-ml.so.1"
# Of CUdevice_attribute.
MULTIPROCESSORS, INTEGRATED, MAJOR, MINOR = 16, 18, 75, 76
NAME_BYTES = 256
NVML_NOT_SUPPORTED = 3


class _NvmlMemory(ctypes.Structure):
    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]


def _load(library: str) -> Any | None:
    try:
        return ctypes.CDLL(library)
    except OSError:
        return None


def cuda_devices(cuda: Any) -> dict[str, Any]:
    """The driver's version and the devices; an `error` where the driver does not work."""
    code = cuda.cuInit(0)
    if code:
        return {"error": f"cuInit answers {code}", "devices": []}
    version, count = ctypes.c_int(), ctypes.c_int()
    cuda.cuDriverGetVersion(ctypes.byref(version))
    cuda.cuDeviceGetCount(ctypes.byref(count))
    return {
        "cuda_driver": f"{version.value // 1000}.{version.value % 1000 // 10}",
        "devices": [_cuda_device(cuda, index) for index in range(count.value)],
    }


def _cuda_device(cuda: Any, index: int) -> dict[str, Any]:
    device, total, name = ctypes.c_int(), ctypes.c_size_t(), ctypes.create_string_buffer(NAME_BYTES)
    cuda.cuDeviceGet(ctypes.byref(device), index)
    cuda.cuDeviceGetName(name, NAME_BYTES, device)
    cuda.cuDeviceTotalMem_v2(ctypes.byref(total), device)

    def attribute(number: int) -> int:
        found = ctypes.c_int()
        cuda.cuDeviceGetAttribute(ctypes.byref(found), number, device)
        return found.value

    return {
        "name": name.value.decode(errors="replace"),
        "total_bytes": total.value,
        "integrated": bool(attribute(INTEGRATED)),
        "capability": f"{attribute(MAJOR)}.{attribute(MINOR)}",
        "multiprocessors": attribute(MULTIPROCESSORS),
    }


def nvml_memory(nvml: Any) -> list[dict[str, int] | str]:
    """For each GPU its memory in bytes, or the reason in words why that is not known."""
    if nvml.nvmlInit_v2():
        return []
    count = ctypes.c_uint()
    nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
    answers: list[dict[str, int] | str] = []
    for index in range(count.value):
        handle, memory = ctypes.c_void_p(), _NvmlMemory()
        nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle))
        code = nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory))
        if code:
            answers.append("not supported" if code == NVML_NOT_SUPPORTED else f"error {code}")
        else:
            answers.append({"total": memory.total, "free": memory.free, "used": memory.used})
    nvml.nvmlShutdown()
    return answers


def main() -> None:
    """Print what is known; an empty list of devices where there is no driver."""
    found: dict[str, Any] = {"devices": []}
    cuda, nvml = _load(CUDA), _load(NVML)
    if cuda is not None:
        found = cuda_devices(cuda)
    if nvml is not None:
        found["nvml_memory"] = nvml_memory(nvml)
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
