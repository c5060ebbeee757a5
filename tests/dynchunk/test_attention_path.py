"""Which path a model is taken to run on, and that a limit counts only where the path keeps to it. No device: faked."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed here"),
]
MIB = 1 << 20
LIMITS = {
    "mqa_logits_static_budget_bytes": 256 * MIB,
    "Indexer._mqa_logits_budget_bytes": 256 * MIB,
    "_DEEP_GEMM_SCORE_BUDGET_BYTES": 512 * MIB,
    "_TORCH_SCORE_BUDGET_BYTES": 128 * MIB,
}
V4 = {"architectures": ["DeepseekV4ForCausalLM"], "compress_ratios": [0, 4, 128]}
V41 = {"architectures": ["DeepseekV4ForCausalLM"], "compress_ratios": [1, 2, 128]}
DSA = {"architectures": ["DeepseekV32ForCausalLM"], "index_topk": 2048}


def found(monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], limits: dict[str, int] | None = None) -> Any:
    from dynchunk.patches import attention_path, score_limits

    have = LIMITS if limits is None else limits
    monkeypatch.setattr(score_limits, "limit_of", lambda name: have.get(name, 0))
    monkeypatch.setattr(score_limits, "wanted_bytes", lambda: 256 * MIB)
    runner = SimpleNamespace(device="cuda", attn_backend=None)
    model = SimpleNamespace(hf_config=SimpleNamespace(**config), context_len=262_144)
    return attention_path.path_and_limit(
        SimpleNamespace(tp_worker=SimpleNamespace(model_runner=runner), model_config=model)
    )


def test_v4(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are cut from 0.5.21 on, unless scoring runs in torch; before, nothing keeps to a limit."""
    assert found(monkeypatch, V4) == ("v4", 256 * MIB)
    assert found(monkeypatch, V4, {"Indexer._mqa_logits_budget_bytes": 256 * MIB}) == ("v4-whole", 0)
    monkeypatch.setenv("SGLANG_FP8_PAGED_MQA_LOGITS_TORCH", "1")
    assert found(monkeypatch, V4) == ("v4-torch", 256 * MIB)


@pytest.mark.parametrize(("capability", "expected"), [(10, ("v41", 512 * MIB)), (9, ("v41-torch", 128 * MIB))])
def test_v41(monkeypatch: pytest.MonkeyPatch, capability: int, expected: tuple[str, int]) -> None:
    """DeepGEMM's tiles are for SM100 and later; Hopper scores in torch; development builds have neither."""
    import torch

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (capability, 0))
    name = "sglang.srt.layers.attention.dsv4.v41_indexer.scoring"
    monkeypatch.delitem(sys.modules, name, raising=False)
    assert found(monkeypatch, V41) == ("v41-dev", 0)
    monkeypatch.setitem(sys.modules, name, ModuleType(name))
    assert found(monkeypatch, V41) == expected


def test_dsa(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pooled keys have no limit in 0.5.20; a model without an indexer is not known."""
    assert found(monkeypatch, DSA) == ("dsa", 256 * MIB)
    assert found(monkeypatch, DSA | {"index_kpool": 4}) == ("kpool", 256 * MIB)
    assert found(monkeypatch, DSA | {"index_kpool": 4}, {}) == ("kpool", 0)
    assert found(monkeypatch, {"architectures": ["LlamaForCausalLM"]}) == (None, 0)


def test_every_path_is_in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """And without a limit the whole coefficient counts."""
    from dynchunk.policy import auto_budget

    for name in ("v4-whole", "v4-torch", "v41-torch", "dsa-torch", "kpool"):
        assert name in auto_budget.PATHS
    assert auto_budget.of_path(*found(monkeypatch, V4, {})).millibytes == 1_300


def test_the_workspace_is_taken_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """1,024 bytes for each key that is kept: every fourth token of V4, every one of V4.1."""
    from dynchunk.patches import attention_path, kv_workspace

    monkeypatch.setattr(kv_workspace, "longest_tokens", lambda: 0)
    runner = SimpleNamespace(device="cuda")
    for config, ratio in ((V4, 4), (V41, 1)):
        model = SimpleNamespace(hf_config=SimpleNamespace(**config), context_len=262_144)
        scheduler = SimpleNamespace(tp_worker=SimpleNamespace(model_runner=runner), model_config=model)
        assert attention_path.workspace_bytes(scheduler) == 262_144 // ratio * 1024
    model = SimpleNamespace(hf_config=SimpleNamespace(**DSA), context_len=262_144)
    scheduler = SimpleNamespace(tp_worker=SimpleNamespace(model_runner=runner), model_config=model)
    assert attention_path.workspace_bytes(scheduler) == 0
