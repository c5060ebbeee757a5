"""SGLang before 0.5.23, which cannot be told everything that this platform lacks.

0.5.20 and 0.5.21 go by the name of the attention backend to decide whether Triton can run, and know only their
own names; 0.5.22 reads `capabilities` of the platform, but only 0.5.23 finds PyNccl among them. What is missing
is said with the engine's own plugin hooks.
"""

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.platforms.interface import SRTPlatform


def asks_about_triton() -> bool:
    """Whether this engine asks the platform (0.5.22 and later)."""
    return hasattr(SRTPlatform, "capabilities")


def asks_about_pynccl() -> bool:
    """Whether this engine asks the platform (0.5.23 and later)."""
    return asks_about_triton() and hasattr(SRTPlatform.capabilities, "supports_pynccl")


def register_hooks() -> None:
    """Answer what the engine does not ask; nothing on 0.5.23."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if not asks_about_pynccl():
        groups = "sglang.srt.distributed.parallel_state.init_model_parallel_group"
        HookRegistry.register(groups, _without_pynccl, HookType.AROUND)
    if not asks_about_triton():
        HookRegistry.register("sglang.srt.utils.common.support_triton", _support_triton, HookType.REPLACE)
        HookRegistry.register("sglang.srt.mem_cache.allocation.get_last_loc", _get_last_loc, HookType.REPLACE)


def _without_pynccl(original: Callable[..., object], *args: object, **kwargs: object) -> object:
    if kwargs.get("use_pynccl") is None:
        kwargs["use_pynccl"] = False
    return original(*args, **kwargs)


def _support_triton(_backend: str) -> bool:
    return False


def _get_last_loc(*tensors: torch.Tensor) -> torch.Tensor:
    from sglang.srt.mem_cache.allocation import get_last_loc_torch

    return get_last_loc_torch(*tensors)


def torch_paged_allocator() -> type:
    """The engine's paged allocator with its two Triton kernels replaced by the engine's own torch function."""
    from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator, alloc_extend_naive
    from sglang.srt.utils import get_num_new_pages

    class TorchPagedAllocator(PagedTokenToKVPoolAllocator):  # type: ignore[misc]  # untyped engine
        free_pages: torch.Tensor

        def alloc_extend(  # noqa: PLR0917  # the engine's signature
            self,
            prefix_lens: torch.Tensor,
            prefix_lens_cpu: torch.Tensor,
            seq_lens: torch.Tensor,
            seq_lens_cpu: torch.Tensor,
            last_loc: torch.Tensor,
            extend_num_tokens: int,
            num_new_pages: int | None = None,
            **_unused: Any,
        ) -> torch.Tensor | None:
            """Places for `extend_num_tokens` new tokens, or None if the pool is full."""
            if num_new_pages is None:
                num_new_pages = get_num_new_pages(
                    seq_lens=seq_lens_cpu, page_size=self.page_size, prefix_lens=prefix_lens_cpu
                )
            if num_new_pages > len(self.free_pages):
                self.merge_and_sort_free()
            if num_new_pages > len(self.free_pages):
                return None
            places = torch.empty(extend_num_tokens, dtype=torch.int64, device=self.device)
            alloc_extend_naive(prefix_lens, seq_lens, last_loc, self.free_pages, places, self.page_size, self.device)
            self.free_pages = self.free_pages[num_new_pages:]
            return places

        def alloc_decode(
            self, seq_lens: torch.Tensor, seq_lens_cpu: torch.Tensor, last_loc: torch.Tensor
        ) -> torch.Tensor | None:
            """One new place a sequence: a decode is an extend by one."""
            return self.alloc_extend(seq_lens - 1, seq_lens_cpu - 1, seq_lens, seq_lens_cpu, last_loc, len(seq_lens))

    return TorchPagedAllocator
