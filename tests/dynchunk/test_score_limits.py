"""Score limits: lowered where they exist and are higher, otherwise left and said so; read again by `verify`."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from dynchunk import journal, settings
from dynchunk.contract import ContractError
from dynchunk.patches import score_limits
from dynchunk.patches.score_limits import Shape

ATTENTION = "sglang.srt.layers.attention."
SCORING = ATTENTION + "dsv4.v41_indexer.scoring"
FP4_POOL = "SGLANG_DSV4_FP4_LOGITS_BUDGET_MB"
KV_CHUNK = "SGLANG_MAX_KV_CHUNK_CAPACITY"
MIB = 1 << 20


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(journal, "_hooks", {})
    monkeypatch.setattr(score_limits, "_found", {})
    monkeypatch.setattr(score_limits, "_shape", None)
    for name in (score_limits.OURS, FP4_POOL, KV_CHUNK):
        # Set first, so that what the test sets is taken back.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
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


# ---- `auto`, once model and device are known


def settle(monkeypatch: pytest.MonkeyPatch, shape: Shape) -> None:
    monkeypatch.setattr(score_limits, "_ask_engine", lambda: shape)
    engine = types.ModuleType("sglang")
    engine.__path__ = ["/nowhere"]
    monkeypatch.setitem(sys.modules, "sglang", engine)
    score_limits.settle()


@pytest.mark.parametrize(
    ("keys", "heads", "processors", "mib", "rows", "busy"),
    [
        (262_144, 32, 148, 592, 592, 100),  # B200
        (262_144, 32, 48, 256, 256, 100),  # GB10: 192 MiB would do
        (262_144, 64, 148, 296, 296, 100),  # twice the heads, half the rows
        (1_048_576, 32, 148, 2048, 512, 86),  # capped at the engine's own
    ],
)
def test_auto_keeps_the_gpu_busy(
    monkeypatch: pytest.MonkeyPatch, keys: int, heads: int, processors: int, mib: int, rows: int, busy: int
) -> None:
    """max(256 MiB, what gives every multiprocessor rows), at most the engine's own; said with rows and share."""
    scoring = module(SCORING, _DEEP_GEMM_SCORE_BUDGET_BYTES=2 << 30, _TORCH_SCORE_BUDGET_BYTES=1 << 30)
    score_limits.apply(scoring)
    assert scoring._DEEP_GEMM_SCORE_BUDGET_BYTES == 256 * MIB, "until the GPU is known"
    settle(monkeypatch, Shape(keys, heads, processors, 0))
    assert mib * MIB == scoring._DEEP_GEMM_SCORE_BUDGET_BYTES
    assert scoring._TORCH_SCORE_BUDGET_BYTES == 256 * MIB, "the torch path gains nothing from more"
    said = outcome("scoring._DEEP_GEMM_SCORE_BUDGET_BYTES")[1]
    assert f"{rows:,} rows a tile at the longest context of {keys:,} keys" in said
    assert f"{busy} % of {processors} multiprocessors busy" in said
    assert score_limits.in_force_bytes() == mib * MIB
    assert score_limits.verify() == []


def test_without_a_device_what_is_known_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows at the longest context follow from the model; how much of a GPU they fill does not."""
    scoring = module(SCORING, _DEEP_GEMM_SCORE_BUDGET_BYTES=2 << 30)
    score_limits.apply(scoring)
    settle(monkeypatch, Shape(262_144, 32, None, None))
    assert scoring._DEEP_GEMM_SCORE_BUDGET_BYTES == 256 * MIB
    assert outcome("scoring._DEEP_GEMM_SCORE_BUDGET_BYTES")[1] == (
        "2048 MiB -> 256 MiB; 256 rows a tile at the longest context of 262,144 keys, no device to keep busy"
    )


def test_cut_by_keys_needs_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """With DYNCHUNK_INDEXER=keys a tile has rows enough under 256 MiB, at any context."""
    monkeypatch.setenv("DYNCHUNK_INDEXER", "keys")
    scoring = module(SCORING, _DEEP_GEMM_SCORE_BUDGET_BYTES=2 << 30)
    score_limits.apply(scoring)
    settle(monkeypatch, Shape(1_048_576, 32, 148, 0))
    assert scoring._DEEP_GEMM_SCORE_BUDGET_BYTES == 256 * MIB


def test_a_number_is_not_raised_to_keep_the_gpu_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the operator asks for counts, even where it leaves most of the GPU idle."""
    monkeypatch.setenv("DYNCHUNK_INDEXER_SCORE_MIB", "64")
    scoring = module(SCORING, _DEEP_GEMM_SCORE_BUDGET_BYTES=2 << 30)
    score_limits.apply(scoring)
    settle(monkeypatch, Shape(262_144, 32, 148, 0))
    assert scoring._DEEP_GEMM_SCORE_BUDGET_BYTES == 64 * MIB
    assert "10 % of 148 multiprocessors busy" in outcome("scoring._DEEP_GEMM_SCORE_BUDGET_BYTES")[1]


def test_a_model_without_an_indexer_has_no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is said of tiles that this model does not score, and nothing needs priming."""
    score_limits.apply(module(SCORING, _DEEP_GEMM_SCORE_BUDGET_BYTES=2 << 30))
    settle(monkeypatch, Shape(131_072, 0, 148, 0))
    assert "rows a tile" not in outcome("scoring._DEEP_GEMM_SCORE_BUDGET_BYTES")[1]
    assert score_limits.in_force_bytes() is None


# ---- the function that DeepSeek-V4, k-pool and DSA ask


def mqa_utils() -> types.ModuleType:
    utils = module(ATTENTION + "mqa_logits_utils", readings=[12 << 30])
    exec(
        "def mqa_logits_static_budget_bytes(*, device_index): return readings[-1]\n"
        "def mqa_logits_budget_bytes(*, device_index, allow_sync):\n"
        "    return mqa_logits_static_budget_bytes(device_index=device_index)\n",
        vars(utils),
    )
    return utils


def test_the_functions_result_is_capped(monkeypatch: pytest.MonkeyPatch) -> None:
    """min(engine's, ours) at every call, with ours as it is then; a copy imported by value before is replaced."""
    utils = mqa_utils()
    early = module(ATTENTION + "dsa.utils", mqa_logits_static_budget_bytes=utils.mqa_logits_static_budget_bytes)
    monkeypatch.setitem(sys.modules, early.__name__, early)
    score_limits.apply(utils)
    assert utils.mqa_logits_budget_bytes(device_index=0, allow_sync=False) == 256 * MIB
    assert early.mqa_logits_static_budget_bytes(device_index=0) == 256 * MIB
    settle(monkeypatch, Shape(262_144, 64, 148, 0))
    assert utils.mqa_logits_budget_bytes(device_index=0, allow_sync=False) == 296 * MIB
    utils.readings.append(100)
    assert utils.mqa_logits_budget_bytes(device_index=0, allow_sync=False) == 100
    assert score_limits.verify() == []


def test_a_copy_that_is_not_ours_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that asks another function than the one we limit is named at the first prefill."""
    utils = mqa_utils()
    score_limits.apply(utils)
    stray = module(ATTENTION + "dsa.utils", mqa_logits_static_budget_bytes=lambda device_index: 12 << 30)
    monkeypatch.setitem(sys.modules, stray.__name__, stray)
    [problem] = score_limits.verify()
    assert problem.startswith(ATTENTION + "dsa.utils.mqa_logits_static_budget_bytes: not the one")


# ---- the table that DSA fills once


def dsa(reading: int) -> types.ModuleType:
    indexer = module(ATTENTION + "dsa.dsa_indexer", reading=reading)
    exec(
        "class Indexer:\n"
        "    _mqa_logits_budget_bytes = {}\n"
        "    def _get_mqa_logits_budget_bytes(self, device_index):\n"
        "        return self._mqa_logits_budget_bytes.setdefault(device_index, reading)\n",
        vars(indexer),
    )
    return indexer


@pytest.mark.parametrize(("reading_mib", "kept_mib"), [(4096, 256), (100, 100)])
def test_the_device_table_is_preset(monkeypatch: pytest.MonkeyPatch, reading_mib: int, kept_mib: int) -> None:
    """The smaller of the engine's own reading and ours is there before the first prefill; no later one raises it."""
    indexer = dsa(reading_mib * MIB)
    score_limits.apply(indexer)
    assert indexer.Indexer._mqa_logits_budget_bytes == {}
    assert outcome("dsa_indexer.Indexer._mqa_logits_budget_bytes")[0] == "not in use"
    settle(monkeypatch, Shape(131_072, 64, 108, 3))
    assert indexer.Indexer._mqa_logits_budget_bytes == {3: kept_mib * MIB}
    assert score_limits.verify() == []
    indexer.Indexer._mqa_logits_budget_bytes[3] = 4096 * MIB
    assert len(score_limits.verify()) == (reading_mib > 256)


def test_no_device_no_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without CUDA the table stays as it is, and that is said."""
    indexer = dsa(1)
    score_limits.apply(indexer)
    settle(monkeypatch, Shape(131_072, 64, None, None))
    assert indexer.Indexer._mqa_logits_budget_bytes == {}
    assert outcome("dsa_indexer.Indexer._mqa_logits_budget_bytes")[0] == "no device"


# ---- what the engine reads from the environment


ENVIRON = "sglang.srt.environ"


def test_environment_is_set_before_anyone_reads_it() -> None:
    """Both variables are lowered when the engine's environment module has run, which is before all others."""
    import os

    score_limits.apply(module(ENVIRON))
    assert (os.environ[FP4_POOL], os.environ[KV_CHUNK]) == ("256", "32768")
    assert outcome("environ." + FP4_POOL) == ("applied", "2048 MiB -> 256 MiB")
    assert outcome("environ." + KV_CHUNK) == ("applied", "131,072 tokens -> 32,768 tokens")


def test_a_child_process_says_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inherited values are still DynChunk's own doing, not the operator's."""
    score_limits.apply(module(ENVIRON))
    monkeypatch.setattr(journal, "_hooks", {})
    monkeypatch.setattr(score_limits, "_found", {})
    score_limits.apply(module(ENVIRON))
    assert outcome("environ." + FP4_POOL) == ("applied", "2048 MiB -> 256 MiB")


def test_the_operators_own_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever sets the engine's own variable keeps it, larger or not, and the pool made from it."""
    import os

    monkeypatch.setenv(FP4_POOL, "4096")
    score_limits.apply(module(ENVIRON))
    pool = module("sglang.kernels.ops.attention.dsv4.fp4_indexer_hip", _LOGITS_BUDGET_ELEMS=1024 * MIB)
    score_limits.apply(pool)
    assert os.environ[FP4_POOL] == "4096"
    assert pool._LOGITS_BUDGET_ELEMS == 1024 * MIB
    assert outcome("environ." + FP4_POOL) == ("not in use", f"{FP4_POOL} of the operator counts")
    assert outcome("fp4_indexer_hip._LOGITS_BUDGET_ELEMS")[0] == "not in use"


def test_wrong_settings_are_said_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that only looks at the engine's environment is not ended for a setting of DynChunk."""
    monkeypatch.setenv("DYNCHUNK_BUDGET", "lots")
    score_limits.apply(module(ENVIRON))
    with pytest.raises(settings.SettingsError):
        score_limits.apply(module(SCORING, _TORCH_SCORE_BUDGET_BYTES=1 << 30))


# ---- read again


def test_what_was_changed_behind_our_back_is_found() -> None:
    """Another plugin that raises a limit again is named with both values."""
    scoring = module(SCORING, _DEEP_GEMM_SCORE_BUDGET_BYTES=2 << 30)
    score_limits.apply(scoring)
    assert score_limits.verify() == []
    scoring._DEEP_GEMM_SCORE_BUDGET_BYTES = 4 << 30
    [problem] = score_limits.verify()
    assert "set to 256 MiB, but 4096 MiB is in force" in problem


def test_a_pool_made_too_early_is_found() -> None:
    """The ROCm pool keeps the size it was made with; a later limit does not shrink it."""
    block = SimpleNamespace(numel=lambda: 512 * MIB)
    pool = module(
        "sglang.kernels.ops.attention.dsv4.fp4_indexer_hip",
        _LOGITS_BUDGET_ELEMS=512 * MIB,
        _LOGITS_POOL={"cuda:0": block},
    )
    score_limits.apply(pool)
    [problem] = score_limits.verify()
    assert "_LOGITS_POOL: 2048 MiB, made before the limit was lowered" in problem
