"""Contracts: check all, then change all or none; live objects and source text give the same verdicts."""

from __future__ import annotations

import functools
import inspect
import types
from pathlib import Path

import pytest

from dynchunk.contract import Contract, ContractError, Patch, apply_all, read_source

SOURCE = """
class Engine:
    def step(self, batch, *, fast: bool = False, name="x") -> int:
        return self.helper(batch).result
    def other(self): pass

def top(a, /, b=None, *rest, **more): pass
"""


@pytest.fixture
def engine() -> types.ModuleType:
    module = types.ModuleType("engine")
    exec(compile(SOURCE, "engine", "exec"), vars(module))
    return module


def replace(original):
    return lambda *args, **kwargs: "ours"


STEP = Contract("Engine.step", ("self, batch, *, fast=False, name='x'",), ("helper", "result"))
OTHER = Contract("Engine.other", ("self",))
TOP = Contract("top", ("a, /, b=None, *rest, **more",))


def test_all_are_changed(engine: types.ModuleType) -> None:
    """Targets that match are replaced, in classes and at the top of the module."""
    apply_all(engine, [Patch(STEP, replace), Patch(OTHER, replace), Patch(TOP, replace)])
    assert engine.Engine().step(1) == engine.Engine().other() == engine.top(1) == "ours"


@pytest.mark.parametrize(
    ("contract", "found"),
    [
        (Contract("Engine.step", ("self, batch",)), "found (self, batch, *, fast=False, name='x')"),
        (Contract("Engine.gone", ("self",)), "found nothing of that name"),
        (Contract("Gone.step", ("self",)), "found nothing of that name"),
        (Contract("Engine.other", ("self",), ("sizer",)), "expected a body that uses sizer"),
    ],
)
def test_one_that_does_not_match_changes_none(engine: types.ModuleType, contract: Contract, found: str) -> None:
    """The message names target and finding, and the target that did match keeps its own function."""
    before = engine.top
    with pytest.raises(ContractError) as caught:
        apply_all(engine, [Patch(TOP, replace), Patch(contract, replace)])
    assert contract.target in str(caught.value)
    assert found in str(caught.value)
    assert engine.top is before


def test_every_mismatch_is_named(engine: types.ModuleType) -> None:
    """Two moved targets, one message."""
    with pytest.raises(ContractError, match=r"Engine\.gone.*Engine\.lost"):
        apply_all(engine, [Patch(Contract("Engine.gone", ("self",))), Patch(Contract("Engine.lost", ("self",)))])


def test_twice_is_once(engine: types.ModuleType) -> None:
    """A module that is patched already is left alone."""
    apply_all(engine, [Patch(OTHER, replace)])
    ours = engine.Engine.other
    apply_all(engine, [Patch(OTHER, replace)])
    assert engine.Engine.other is ours


def test_check_only(engine: types.ModuleType) -> None:
    """A patch without a replacement checks and changes nothing; neither does change=False."""
    before = engine.Engine.other
    apply_all(engine, [Patch(OTHER)])
    apply_all(engine, [Patch(OTHER, replace)], change=False)
    assert engine.Engine.other is before


def test_a_foreign_wrapper_is_refused(engine: types.ModuleType) -> None:
    """A function that other code wrapped is not the function the contract was written for."""
    engine.Engine.other = functools.wraps(engine.Engine.other)(lambda self: None)
    with pytest.raises(ContractError, match="other code has wrapped"):
        apply_all(engine, [Patch(OTHER, replace)])


def test_the_engines_own_decorators_are_read_through(engine: types.ModuleType) -> None:
    """SGLang decorates some targets itself; the contract speaks of the function that was written."""
    decorators = types.ModuleType("sglang.srt.observability")
    exec(
        "import functools\ndef timed(f):\n @functools.wraps(f)\n def inner(*a, **k): return f(*a, **k)\n return inner",
        vars(decorators),
    )
    engine.Engine.other = decorators.timed(engine.Engine.other)
    apply_all(engine, [Patch(OTHER, replace)])
    assert engine.Engine().other() == "ours"


def test_plugin_hooks_of_the_engine_are_foreign(engine: types.ModuleType) -> None:
    """SGLang's plugin framework wraps on behalf of others; that is refused like any other wrapper."""
    hooks = types.ModuleType("sglang.srt.plugins.hook_registry")
    exec(
        "import functools\ndef around(f):\n @functools.wraps(f)\n def inner(*a, **k): return f(*a, **k)\n return inner",
        vars(hooks),
    )
    engine.Engine.other = hooks.around(engine.Engine.other)
    with pytest.raises(ContractError, match="other code has wrapped"):
        apply_all(engine, [Patch(OTHER, replace)])


def test_source_text_is_seen_like_live_objects(engine: types.ModuleType) -> None:
    """The same contract holds for the text of a module and for the module."""
    seen = read_source(SOURCE)
    for contract in (STEP, OTHER, TOP):
        assert contract.problem(seen.get(contract.target)) is None
    bare = inspect.signature(engine.top)
    assert seen["top"].signature == str(bare)[1:-1]


def test_the_whole_engine_reads_the_same_both_ways() -> None:
    """Across a large real class, text and live objects give the same parameter lists.

    Left out: functions with a default that is not a literal, which prints differently; no contract has one.
    """
    import argparse

    from dynchunk.contract import _see

    seen = read_source(Path(argparse.__file__).read_text())
    compared = 0
    for name, value in vars(argparse.ArgumentParser).items():
        if inspect.isfunction(value) and "<class" not in str(inspect.signature(value)):
            assert seen[f"ArgumentParser.{name}"].signature == _see(value).signature
            compared += 1
    assert compared > 20
