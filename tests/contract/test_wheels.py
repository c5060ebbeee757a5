"""The contracts against the published engine wheels, read as text: a moved target fails here before it fails a user."""

from __future__ import annotations

from pathlib import Path

import pytest

from dynchunk.activate import PATCHES
from dynchunk.contract import read_source
from dynchunk.patches import check, score_limits
from dynchunk.patches.contracts import INDEXER_CONTRACTS
from dynchunk.patches.score_limits import Limit
from scripts.engine_wheels import VERSIONS, unpacked


@pytest.fixture(scope="session", params=VERSIONS)
def engine(request: pytest.FixtureRequest) -> Path:
    """The unpacked wheel of one version (downloaded once into .cache/)."""
    return unpacked(request.param)


def test_every_contract_is_met(engine: Path) -> None:
    """Every function DynChunk relies on is where it was, with the parameters it had."""
    assert check.problems_of(engine) == []


@pytest.mark.slow
def test_a_moved_target_is_seen(engine: Path) -> None:
    """The check can fail: rename any one target in the real source, and exactly that one is reported."""
    for module, contracts in check.required(engine).items():
        text = engine.joinpath(*module.split(".")).with_suffix(".py").read_text()
        for contract in contracts:
            name = contract.target.rsplit(".", 1)[-1]
            moved = read_source(text.replace(f"def {name}(", f"def {name}_moved("))
            assert "found nothing of that name" in str(contract.problem(moved.get(contract.target)))


def test_score_limits_are_where_the_table_says(engine: Path) -> None:
    """A version has a limit exactly where the table names it, and what imports it by value is in the table too."""
    version = check.engine_version(engine)
    for limit in score_limits.LIMITS:
        assert (version in limit.versions) == _has(engine, limit), limit.hook
    everything = "".join(path.read_text() for path in engine.joinpath("sglang", "srt", "layers").rglob("*.py"))
    [shared] = [limit for limit in score_limits.LIMITS if limit.how == score_limits.FUNCTION]
    by_value = [m for m in shared.copies if f"    {shared.name},\n" in _text(engine, m)]
    assert everything.count(f"    {shared.name},\n") == len(by_value)


def _text(engine: Path, module: str) -> str:
    path = engine.joinpath(*module.split(".")).with_suffix(".py")
    return path.read_text() if path.is_file() else ""


def _has(engine: Path, limit: Limit) -> bool:
    text = _text(engine, limit.module)
    if limit.how == score_limits.ENVIRON:
        # Read at import by some versions, at every call by others; the value without it must be the table's.
        readers = text + _text(engine, "sglang.kernels.ops.attention.dsv4.fp4_indexer_hip")
        unset = str(limit.unset).replace("131072", "128 * 1024")
        return f'"{limit.name}", "{unset}"' in readers or f"{limit.name} = EnvInt({unset})" in readers
    if limit.how == score_limits.FUNCTION:
        return f"def {limit.name}(" in text
    if limit.how == score_limits.DEVICE_TABLE:
        return "    _mqa_logits_budget_bytes: Dict[int, int] = {}\n" in text
    return f"\n{limit.name} = " in text


def test_every_limit_has_its_module_watched() -> None:
    """A limit in the table without a line in the table of patches would never be lowered."""
    assert {limit.module for limit in score_limits.LIMITS} <= set(PATCHES)
    assert set(INDEXER_CONTRACTS) <= set(PATCHES)


def test_the_installed_version_is_read_without_importing_it(tmp_path: Path) -> None:
    """`check` names the version from metadata; a folder without an engine is a clear error."""
    assert check.engine_version(tmp_path) == "unknown"
    assert check.main([str(tmp_path)]) == 1
