"""What the engine asks of its CPU kernels on arm64, for wheels that were built for a GPU and have none.

On x86 without AMX the engine goes without them by itself; on arm64 it takes them for granted.
"""

import contextlib
import importlib
import os

import torch

MISSING = "init_cpu_threads_env"
_library: torch.library.Library | None = None  # the operators live as long as this does


def stand_in_for_missing_kernels() -> None:
    """Define the two start-up operators as far as they are missing: bind no threads, share no memory."""
    global _library
    with contextlib.suppress(ImportError):
        importlib.import_module("sgl_kernel")  # defines the real ones, where there are any
    if _library is not None or hasattr(torch.ops.sgl_kernel, MISSING):
        return
    _library = torch.library.Library("sgl_kernel", "FRAGMENT")
    _library.define(MISSING + "(str cpu_ids) -> ()")
    _library.impl(MISSING, lambda _cpu_ids: None)
    _library.define("initialize(int size, int rank) -> ()")
    _library.impl("initialize", _use_gloo)


def _use_gloo(_size: int, _rank: int) -> None:
    # Set just before this call, it announces the shared-memory all-reduce, the third kernel that is missing.
    os.environ.pop("LOCAL_SIZE", None)
