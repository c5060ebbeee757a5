"""The indexer hooks against the real modules of each supported engine version, on the CPU."""

from __future__ import annotations

import json

import pytest

from scripts.engine_wheels import VERSIONS
from tests.conftest import ROOT
from tests.engine import warm, wheels

pytestmark = pytest.mark.engine


REPORT = """
import importlib, json
from dynchunk import journal
from dynchunk.activate import PATCHES
from dynchunk.contract import MARK

marked = []
for name in PATCHES:
    if "attention" not in name and "environ" not in name:
        continue
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError:
        continue
    owners = [module, *(v for v in vars(module).values() if isinstance(v, type))]
    marked += [key for owner in owners for key, value in vars(owner).items() if getattr(value, MARK, False)]
    marked += [key for key in vars(module) if "BUDGET" in key and vars(module)[key] == 1 << 28]
print(json.dumps({"marked": marked, "hooks": journal.snapshot()["hooks"]}))
"""


@pytest.mark.parametrize("indexer", ["rows", "keys"])
@pytest.mark.parametrize("version", VERSIONS)
def test_report_changes_nothing(version: str, indexer: str) -> None:
    """In mode `report` every contract is held, nothing is replaced or lowered, and what would be is said."""
    environ = wheels.environ(version, DYNCHUNK_MODE="report", DYNCHUNK_INDEXER=indexer)
    done = warm.run(["python", "-W", "ignore", "-c", REPORT], env=environ, cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen["marked"] == []
    outcomes = {hook: entry["outcome"] for hook, entry in seen["hooks"].items()}
    assert not {"applied", "refused"} & set(outcomes.values()), outcomes
    assert outcomes["torch_fallback"] == outcomes["kv_workspace"] == "would apply"
    if version != "0.5.20":
        chosen, other = ("indexer_keys", "score_tiles") if indexer == "keys" else ("score_tiles", "indexer_keys")
        assert outcomes[chosen] == "would apply"
        assert outcomes[other] == "not in use"


def assert_skips_nothing_it_has(version: str, output: str) -> None:
    """The newest version has everything; the older ones skip what they do not have."""
    assert wheels.ONLY_PASSED.search(output) or (version != VERSIONS[-1] and " passed, " in output)


@pytest.mark.parametrize("version", VERSIONS)
def test_limits_and_hooks(version: str) -> None:
    """Every limit is in force, every hook gives the engine's own bits and holds what it says."""
    assert_skips_nothing_it_has(version, wheels.run_checks(version, "score_checks.py"))


@pytest.mark.parametrize("version", VERSIONS[1:])
def test_key_blocks(version: str) -> None:
    """DYNCHUNK_INDEXER=keys selects the values that the engine's own loops select, in every version that has them."""
    assert_skips_nothing_it_has(version, wheels.run_checks(version, "keys_checks.py", DYNCHUNK_INDEXER="keys"))
