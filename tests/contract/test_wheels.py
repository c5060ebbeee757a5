"""The contracts against the published engine wheels, read as text: a moved target fails here before it fails a user."""

from __future__ import annotations

from pathlib import Path

import pytest

from dynchunk.contract import read_source
from dynchunk.patches import check
from dynchunk.patches.contracts import CONTRACTS
from dynchunk.patches.score_limits import LIMITS
from scripts.engine_wheels import VERSIONS, unpacked


@pytest.fixture(scope="session", params=VERSIONS)
def engine(request: pytest.FixtureRequest) -> Path:
    """The unpacked wheel of one version (downloaded once into .cache/)."""
    return unpacked(request.param)


def test_every_contract_is_met(engine: Path) -> None:
    """Every function DynChunk relies on is where it was, with the parameters it had."""
    assert check.problems_of(engine) == []


def test_a_moved_target_is_seen(engine: Path) -> None:
    """The check can fail: rename any one target in the real source, and exactly that one is reported."""
    for module, contracts in CONTRACTS.items():
        text = engine.joinpath(*module.split(".")).with_suffix(".py").read_text()
        for contract in contracts:
            name = contract.target.rsplit(".", 1)[1]
            moved = read_source(text.replace(f"def {name}(", f"def {name}_moved("))
            assert "found nothing of that name" in str(contract.problem(moved.get(contract.target)))


def test_score_limits_are_where_the_table_says(engine: Path) -> None:
    """Each version that has a V4.1 indexer keeps both of its limits; 0.5.20 has none of it."""
    found = set()
    for limit in LIMITS:
        path = engine.joinpath(*limit.module.split(".")).with_suffix(".py")
        if path.is_file() and f"\n{limit.name} = " in path.read_text():
            found.add(limit.name)
    v41 = {"_DEEP_GEMM_SCORE_BUDGET_BYTES", "_TORCH_SCORE_BUDGET_BYTES"}
    assert v41 <= found if check.engine_version(engine) != "0.5.20" else not v41 & found


def test_the_installed_version_is_read_without_importing_it(tmp_path: Path) -> None:
    """`check` names the version from metadata; a folder without an engine is a clear error."""
    assert check.engine_version(tmp_path) == "unknown"
    assert check.main([str(tmp_path)]) == 1
