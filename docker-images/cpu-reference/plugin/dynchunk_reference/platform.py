"""The platform: SGLang's CPU device operations under the out-of-tree flag.

The flag is what makes the engine ask a plugin, and not its CUDA defaults, whenever a choice depends on the
device. The in-tree CPU platform is no alternative: it is built on AMX kernels that the GPU wheels of SGLang
do not contain.
"""

import logging
import os
from typing import Any

from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import CpuArchEnum, PlatformEnum
from sglang.srt.platforms.interface import SRTPlatform

from dynchunk_reference import NAME
from dynchunk_reference.arm64 import stand_in_for_missing_kernels
from dynchunk_reference.older_engines import asks_about_triton, torch_paged_allocator

logger = logging.getLogger(__name__)

KV_POOL_TOKENS = 262_144
RUNNING_REQUESTS = 16


class ReferencePlatform(CpuDeviceMixin, SRTPlatform):  # type: ignore[misc]  # untyped engine
    """Everything on the host CPU: no Triton, no graphs, no PyNccl, which are the defaults of `capabilities`."""

    _enum = PlatformEnum.OOT

    def __init__(self) -> None:
        super().__init__()
        if self.cpu_arch == CpuArchEnum.ARM:
            stand_in_for_missing_kernels()
        # The engine makes one platform a process. WARNING, because some processes meet it before they
        # configure logging, and Python then shows nothing below that.
        logger.warning(
            "%s: this is a reference platform for demonstration and tests; figures taken on it are not GPU figures.",
            NAME,
        )

    def apply_server_args_defaults(self, server_args: Any) -> None:
        """What else would have to be said beside `--device cpu`; in the main process, before it starts the ranks."""
        # The engine's own rule for that device runs first, and its pick cannot be told from a wish of the user.
        engines_pick = "torch_native" if self.cpu_arch == CpuArchEnum.ARM else "intel_amx"
        if server_args.attention_backend in (None, engines_pick):
            server_args.attention_backend = NAME
        # "auto" turns an fp32 model into fp16, which is slow on a CPU and rounds differently chunk by chunk.
        if server_args.dtype == "auto":
            server_args.dtype = "float32"
        # Left to itself the engine gives most of the host's memory to the KV pool, and 4 bytes a token of context to
        # each of some thousand requests, and touches it all.
        if server_args.max_total_tokens is None:
            server_args.max_total_tokens = KV_POOL_TOKENS
        if server_args.max_running_requests is None:
            server_args.max_running_requests = RUNNING_REQUESTS
        # An idle scheduler spins on a whole core; here the cores are also the accelerator.
        server_args.sleep_on_idle = True
        _set_environment_of_ranks(server_args.tp_size * server_args.pp_size)

    def get_default_attention_backend(self) -> str:
        """The reference backend; asked only where no rule of the engine has answered before."""
        return NAME

    def get_compile_backend(self, mode: str | None = None) -> str:  # noqa: ARG002
        """Not inductor: with --tp it compiles the embedding's mask in C++ in the first forward, 15 s a boot."""
        return "eager"

    def get_kv_pool_cls(self, *, kind: str) -> type | None:  # noqa: ARG002
        """None: the engine's own pool is right for any torch device."""
        return None

    # Asked by 0.5.20 and 0.5.21 only; None is no answer there.

    def get_mha_kv_pool_cls(self) -> Any:
        """The engine's own pool."""
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

        return MHATokenToKVPool

    def get_paged_allocator_cls(self) -> type | None:
        """None, the engine's own, once that can do without Triton."""
        return None if asks_about_triton() else torch_paged_allocator()


def _set_environment_of_ranks(ranks: int) -> None:
    """What the rank processes read from the environment, unless the user has set it."""
    # Torch then asks for huge pages. A score matrix is new memory in every forward: page by page of 4 KiB its
    # first touch takes as long as the arithmetic.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    os.environ.setdefault("SGLANG_EXTERNAL_MODEL_PACKAGE", "dynchunk_reference.models")
    if ranks == 1:
        return
    # The engine wants a NUMA node a rank, or to be told the cores of each. On a CPU without its kernels it binds
    # nothing, so the number of threads has to be said as well; more than cores makes short prompts twice as slow.
    cores = sorted(os.sched_getaffinity(0))
    each = max(1, len(cores) // ranks)
    shares = [[cores[(rank * each + i) % len(cores)] for i in range(each)] for rank in range(ranks)]
    os.environ.setdefault("SGLANG_CPU_OMP_THREADS_BIND", "|".join(",".join(map(str, share)) for share in shares))
    os.environ.setdefault("OMP_NUM_THREADS", str(each))
