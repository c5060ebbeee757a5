"""The indexer's hooks: contracts first, nothing in mode `report`, and the journal says which of them are there."""

from __future__ import annotations

import importlib
import types
from collections.abc import Iterator

import pytest

from dynchunk import journal, settings
from dynchunk.contract import MARK, ContractError
from dynchunk.patches import contracts

SOURCES = {
    "score_tiles": (
        contracts.SPARSE_TABLE,
        """
def score_tiles(data, kv): return flat_index_logits_tiles(data, kv)
def publish_prefill_table(*, data, kv, index_page_table, index_page_size, topk_blocks, out_positions):
    return score_tiles, _build_prefill_table
""",
        ["score_tiles"],
    ),
    "kv_workspace": (
        contracts.SPARSE_PREFILL,
        "class SparsePrefillKVBuffer:\n    def _reserve(self, num_tokens, dtype): return self._buffer\n",
        ["SparsePrefillKVBuffer._reserve"],
    ),
    "torch_fallback": (
        contracts.V4_INDEXER,
        "".join(
            f"def {name}(q_fp8, kvcache_fp8, weight, seq_lens, page_table, deep_gemm_metadata, max_seq_len, "
            "clean_logits=True): return 1\n"
            for name in ("fp8_paged_mqa_logits_torch", "fp8_paged_mqa_logits_torch_sm120")
        ),
        ["fp8_paged_mqa_logits_torch", "fp8_paged_mqa_logits_torch_sm120"],
    ),
}
HOOKS = pytest.mark.parametrize("hook", SOURCES)


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(journal, "_hooks", {})
    settings.current.cache_clear()
    yield
    settings.current.cache_clear()


def made(hook: str, change: tuple[str, str] = ("", "")) -> types.ModuleType:
    name, source, _ = SOURCES[hook]
    module = types.ModuleType(name)
    exec(source.replace(*change), vars(module))
    return module


def apply(hook: str, module: types.ModuleType) -> str:
    importlib.import_module("dynchunk.patches." + hook).apply(module)
    return journal.snapshot()["hooks"][hook]["outcome"]


def hooked(hook: str, module: types.ModuleType) -> list[bool]:
    seen = []
    for target in SOURCES[hook][2]:
        owner, _, name = target.rpartition(".")
        seen.append(getattr(vars(getattr(module, owner) if owner else module)[name], MARK, False))
    return seen


@HOOKS
def test_applied(hook: str) -> None:
    """Where every contract is met, all targets are replaced, and that is said."""
    module = made(hook)
    assert apply(hook, module) == "applied"
    assert all(hooked(hook, module))


@HOOKS
def test_report_changes_nothing(hook: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In mode `report` the contracts are held and the functions stay the engine's."""
    monkeypatch.setenv("DYNCHUNK_MODE", "report")
    module = made(hook)
    assert apply(hook, module) == "would apply"
    assert not any(hooked(hook, module))


@HOOKS
def test_all_or_none(hook: str) -> None:
    """One target that is not as expected, and none is replaced."""
    module = made(hook, ("topk_blocks", "top_blocks") if hook == "score_tiles" else ("(self, num", "(self, size, num"))
    if hook == "torch_fallback":
        module = made(hook, ("_sm120(q_fp8", "_sm120(q"))
    with pytest.raises(ContractError, match="expected"):
        apply(hook, module)
    assert not any(hooked(hook, module))


def test_a_workspace_of_another_name_is_refused() -> None:
    """A version with neither of the two classes is not taken for one that needs no hook."""
    with pytest.raises(ContractError, match=r"expected SparsePrefillKVBuffer\._reserve, found nothing"):
        apply("kv_workspace", made("kv_workspace", ("SparsePrefillKVBuffer", "Scratch")))


def test_zero_leaves_the_torch_scoring(monkeypatch: pytest.MonkeyPatch) -> None:
    """DYNCHUNK_INDEXER_SCORE_MIB=0 leaves what only a limit would bound."""
    monkeypatch.setenv("DYNCHUNK_INDEXER_SCORE_MIB", "0")
    module = made("torch_fallback")
    assert apply("torch_fallback", module) == "not in use"
    assert not any(hooked("torch_fallback", module))


def test_every_hook_is_watched() -> None:
    """The journal's table of hooks and the table of patches name the same modules."""
    from dynchunk.activate import PATCHES

    assert set(contracts.INDEXER_HOOKS.values()) <= set(PATCHES)
