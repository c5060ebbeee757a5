"""Score limits: lowered where they exist and are higher, otherwise left and said so."""

from __future__ import annotations

import types
from collections.abc import Iterator

import pytest

from dynchunk import journal, settings
from dynchunk.contract import ContractError
from dynchunk.patches import score_limits

SCORING = "sglang.srt.layers.attention.dsv4.v41_indexer.scoring"
MIB = 1 << 20


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(journal, "_hooks", {})
    settings.current.cache_clear()
    yield
    settings.current.cache_clear()


def module(name: str, **values: object) -> types.ModuleType:
    made = types.ModuleType(name)
    vars(made).update(values)
    return made


def outcome(hook: str) -> tuple[str, str]:
    entry = journal.snapshot()["hooks"]["score_limit." + hook]
    return entry["outcome"], entry["detail"]


def test_lowered_and_read_back() -> None:
    """Both limits of the V4.1 indexer come down to 256 MiB; the journal has the values before and after."""
    scoring = module(SCORING, _DEEP_GEMM_SCORE_BUDGET_BYTES=2 << 30, _TORCH_SCORE_BUDGET_BYTES=1 << 30)
    score_limits.apply(scoring)
    assert scoring._DEEP_GEMM_SCORE_BUDGET_BYTES == scoring._TORCH_SCORE_BUDGET_BYTES == 256 * MIB
    assert outcome("scoring._TORCH_SCORE_BUDGET_BYTES") == ("applied", "1024 MiB -> 256 MiB")


def test_a_lower_limit_is_left() -> None:
    """An engine that bounds itself lower is not loosened, and that is not called applied."""
    scoring = module(SCORING, _DEEP_GEMM_SCORE_BUDGET_BYTES=64 * MIB, _TORCH_SCORE_BUDGET_BYTES=256 * MIB)
    score_limits.apply(scoring)
    assert scoring._DEEP_GEMM_SCORE_BUDGET_BYTES == 64 * MIB
    assert outcome("scoring._DEEP_GEMM_SCORE_BUDGET_BYTES") == ("already lower", "64 MiB in force")
    assert outcome("scoring._TORCH_SCORE_BUDGET_BYTES")[0] == "already lower"


def test_an_absent_limit_is_not_invented() -> None:
    """Setting a name that the engine never reads would look like protection."""
    backend = module("sglang.srt.layers.attention.deepseek_v4_backend")
    score_limits.apply(backend)
    assert not hasattr(backend, "_TORCH_INDEXER_SCORE_BUDGET_BYTES")
    assert outcome("deepseek_v4_backend._TORCH_INDEXER_SCORE_BUDGET_BYTES")[0] == "absent"


def test_a_development_builds_constant() -> None:
    """Development builds keep one constant in the backend's own module."""
    backend = module("sglang.srt.layers.attention.deepseek_v4_backend", _TORCH_INDEXER_SCORE_BUDGET_BYTES=1 << 30)
    score_limits.apply(backend)
    assert backend._TORCH_INDEXER_SCORE_BUDGET_BYTES == 256 * MIB


def test_a_limit_in_elements() -> None:
    """The ROCm pool counts fp32 elements: 256 MiB are 64 Mi of them."""
    pool = module("sglang.kernels.ops.attention.dsv4.fp4_indexer_hip", _LOGITS_BUDGET_ELEMS=512 * MIB)
    score_limits.apply(pool)
    assert pool._LOGITS_BUDGET_ELEMS == 64 * MIB
    assert outcome("fp4_indexer_hip._LOGITS_BUDGET_ELEMS") == ("applied", "2048 MiB -> 256 MiB")


def test_zero_leaves_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """DYNCHUNK_INDEXER_SCORE_MIB=0 means that the engine's limits stay."""
    monkeypatch.setenv("DYNCHUNK_INDEXER_SCORE_MIB", "0")
    scoring = module(SCORING, _DEEP_GEMM_SCORE_BUDGET_BYTES=2 << 30, _TORCH_SCORE_BUDGET_BYTES=1 << 30)
    score_limits.apply(scoring)
    assert scoring._DEEP_GEMM_SCORE_BUDGET_BYTES == 2 << 30
    assert outcome("scoring._TORCH_SCORE_BUDGET_BYTES")[0] == "not in use"


def test_report_only_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mode `report` names the change and does not make it."""
    monkeypatch.setenv("DYNCHUNK_MODE", "report")
    scoring = module(SCORING, _DEEP_GEMM_SCORE_BUDGET_BYTES=2 << 30, _TORCH_SCORE_BUDGET_BYTES=1 << 30)
    score_limits.apply(scoring)
    assert scoring._TORCH_SCORE_BUDGET_BYTES == 1 << 30
    assert outcome("scoring._TORCH_SCORE_BUDGET_BYTES") == ("would apply", "1024 MiB -> 256 MiB")


@pytest.mark.parametrize("value", ["2 GiB", 2.5, -1, True])
def test_a_limit_of_another_kind_is_refused(value: object) -> None:
    """A constant that changed its meaning is a contract that does not match."""
    with pytest.raises(ContractError, match="expected a positive int"):
        score_limits.apply(module(SCORING, _DEEP_GEMM_SCORE_BUDGET_BYTES=value))
