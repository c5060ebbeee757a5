"""Which attention path a model runs on, the score limit that holds there, and what else a long prompt keeps.

A limit counts only where the path keeps to it: the engine imports every model's modules, so a limit that is in force
says nothing about the model that is served.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch

from dynchunk.patches import kv_workspace, score_limits
from dynchunk.policy import paths

FIRST_SM_OF_DEEP_GEMM_V41 = 10
WORKSPACE_KEY_BYTES = 1024
# The engine's own switch for scoring in plain torch.
TORCH_SCORING = "SGLANG_FP8_PAGED_MQA_LOGITS_TORCH"
_ATTENTION = "sglang.srt.layers.attention."
_ON = ("1", "true", "yes", "on")


def path_and_limit(scheduler: Any) -> tuple[str | None, int]:
    """(one of policy/auto_budget.PATHS, or None where costs are not known; bytes of the limit it keeps to, or 0)."""
    runner, config = scheduler.tp_worker.model_runner, scheduler.model_config.hf_config
    if runner.device == "cpu":
        known = type(runner.attn_backend).__name__ == "ReferenceAttentionBackend"
        return "reference" if known else None, 0
    shared = _tokens_per_key(config)
    if shared is not None:
        return _v4() if shared >= paths.V4_TOKENS_PER_KEY else _v41()
    if not getattr(config, "index_topk", None):
        return None, 0
    if int(getattr(config, "index_kpool", 1) or 1) > 1:
        return "kpool", score_limits.limit_of("mqa_logits_static_budget_bytes")
    if _torch_scoring() and hasattr(sys.modules.get(_ATTENTION + "dsa.utils"), "resolve_fp8_mqa_logits_fn"):
        return "dsa-torch", 0
    return "dsa", score_limits.limit_of("Indexer._mqa_logits_budget_bytes")


def workspace_bytes(scheduler: Any) -> int:
    """What V4 and V4.1 keep for a prefix's keys once a long prompt has come: allocated late, so free at start."""
    config = scheduler.model_config.hf_config
    shared = _tokens_per_key(config)
    if scheduler.tp_worker.model_runner.device == "cpu" or shared is None:
        return 0
    longest = kv_workspace.longest_tokens() or int(scheduler.model_config.context_len)
    return longest // shared * WORKSPACE_KEY_BYTES


def _v4() -> tuple[str, int]:
    if _torch_scoring():
        return "v4-torch", score_limits.wanted_bytes()
    limit = score_limits.limit_of("mqa_logits_static_budget_bytes")
    # Without DeepGEMM's metadata the engine does not cut the rows; 0.5.20 does not in any case.
    return ("v4", limit) if limit and torch.version.hip is None else ("v4-whole", 0)


def _v41() -> tuple[str, int]:
    if _ATTENTION + "dsv4.v41_indexer.scoring" not in sys.modules:
        return "v41-dev", 0
    if torch.cuda.get_device_capability()[0] >= FIRST_SM_OF_DEEP_GEMM_V41:
        return "v41", score_limits.limit_of("_DEEP_GEMM_SCORE_BUDGET_BYTES")
    return "v41-torch", score_limits.limit_of("_TORCH_SCORE_BUDGET_BYTES")


def _tokens_per_key(config: Any) -> int | None:
    return paths.tokens_per_key(getattr(config, "architectures", None), getattr(config, "compress_ratios", None))


def _torch_scoring() -> bool:
    return os.environ.get(TORCH_SCORING, "").strip().lower() in _ON
