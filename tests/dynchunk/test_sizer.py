"""The object the scheduler asks: whatever it is asked, its answer is one the engine can run."""

from __future__ import annotations

from math import lcm

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dynchunk import in_force, journal
from dynchunk.policy.budget import Budget, chunk_tokens
from dynchunk.sizer import BudgetSizer

LIMITS = Budget(200_000_000, "prefix", page=64, chunk_min=256, chunk_max=2048)


class EngineSizer:
    """Stands for the engine's own sizer."""

    def __init__(self, answer: object) -> None:
        self.answer = answer

    def predict(self, history_len: int) -> object:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def sizer(engine_answer: object = None, align: int | None = None, **floors: int) -> BudgetSizer:
    in_force.limits = LIMITS
    in_force.floors = {"DYNCHUNK_CHUNK_MIN": LIMITS.chunk_min} | floors
    in_force.truncation_align = lambda: align
    return BudgetSizer(EngineSizer(engine_answer), lambda: in_force.cut()[0])


def test_on_aligned_prefixes_it_is_the_rule() -> None:
    """Where the prefix is whole pages, the answer is the rule's, to the token."""
    for prefix in range(0, 800_000, 640):
        assert sizer().predict(prefix) == chunk_tokens(LIMITS, prefix)


@pytest.mark.parametrize(("engine", "answer"), [(320, 320), (1000, 960), (4096, 2048), (None, 2048), (128, 256)])
def test_the_smaller_of_two_sizers_counts(engine: int | None, answer: int) -> None:
    """Next to the engine's own sizer (pipelines) the smaller answer wins, down to the floor; None is no answer."""
    assert sizer(engine).predict(0) == answer


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    prefix=st.integers(0, 2_000_000),
    align=st.sampled_from([None, 1, 2, 64, 96, 256, 4096]),
    engine=st.one_of(st.none(), st.integers(1, 10_000)),
)
def test_every_answer_is_one_the_engine_can_run(prefix: int, align: int | None, engine: int | None) -> None:
    """Positive, never above the static size, and on the grid's boundary wherever the grid is not wider than that."""
    chunk = sizer(engine, align).predict(prefix)
    assert chunk is not None
    assert 0 < chunk <= LIMITS.chunk_max
    grid = lcm(LIMITS.page, align or 1)
    if grid <= LIMITS.chunk_max:
        assert (prefix + chunk) % grid == 0


@pytest.mark.parametrize("wrong", [-1, 1.25, True, None, "x"])
def test_a_prefix_that_is_none_is_no_size(wrong: object) -> None:
    """Nonsense in, the engine's own size out."""
    assert sizer().predict(wrong) is None  # type: ignore[arg-type]


def test_a_failure_falls_back_once_and_for_good(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exception never reaches the scheduler's loop; from then on the static size counts, said once."""
    monkeypatch.setattr(journal, "_written", True)
    broken = sizer(RuntimeError("engine sizer broke"))
    assert broken.predict(0) is None
    assert broken.predict(100_000) is None
    assert capsys.readouterr().err.count("engine sizer broke") == 1


def test_the_engines_own_floors_bind() -> None:
    """Where this engine cannot work with chunks as small as the budget asks, the floor is what runs."""
    assert sizer(**{"mamba checkpoint": 512}).predict(640_000) == 512


def test_without_anything_in_force_the_engine_decides() -> None:
    """Before the scheduler is ready there is no budget."""
    ours = sizer()
    in_force.limits = None
    assert ours.predict(0) is None


def test_asking_twice_changes_nothing() -> None:
    """The engine may ask again for a chunk that did not run."""
    one = sizer()
    assert [one.predict(131_072) for _ in range(3)] == [1472] * 3
