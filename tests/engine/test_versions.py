"""Hooks against the real modules of each supported engine version, from its wheel, on the CPU: one process for all that
needs the same settings.
"""

from __future__ import annotations

import json
import re

import pytest

from scripts.bench import soak_admission
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


@pytest.mark.parametrize(("version", "indexer"), [*((version, "rows") for version in VERSIONS), (VERSIONS[-1], "keys")])
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


@pytest.mark.parametrize("version", VERSIONS)
def test_scores_and_batches(version: str) -> None:
    """Every limit is in force, every hook gives the engine's own bits and holds what it says.

    And the real PrefillAdder keeps the promises in worlds that hypothesis draws (and shrinks), and in seeded queues as
    in scripts/bench/soak_admission.py, which runs a million passes of them.
    """
    names = ("score_checks", "admission_properties", "turns_properties", "controls_properties", "soak_checks")
    output = wheels.run_checks(version, *(f"{name}.py" for name in names))
    # The older ones skip the scoring that they do not have.
    assert skipped_in(output) <= (set() if version == VERSIONS[-1] else {"score_checks.py"})


@pytest.mark.parametrize("version", VERSIONS[1:])
def test_key_blocks(version: str) -> None:
    """DYNCHUNK_INDEXER=keys selects the values that the engine's own loops select, in every version that has them."""
    output = wheels.run_checks(version, "keys_checks.py", DYNCHUNK_INDEXER="keys")
    assert skipped_in(output) <= (set() if version == VERSIONS[-1] else {"keys_checks.py"})


def skipped_in(output: str) -> set[str]:
    """Files in which a check was skipped, of checks of which some passed and none failed."""
    assert wheels.SOME_PASSED.search(output), output[-2000:]
    return set(re.findall(r"^SKIPPED \[\d+\] tests/engine/(\w+\.py)", output, re.MULTILINE))


def test_the_judge_can_fail() -> None:
    """Without DynChunk's hooks the same worlds break the promises at once: the checks are not empty."""
    with pytest.raises(RuntimeError, match='"failed"'):
        soak_admission.run_version("0.5.23", passes=15_000, seed=7, hooks=False)
