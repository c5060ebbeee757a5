"""Settings meet an engine: rounding, contradictions, advice."""

from __future__ import annotations

import pytest

from dynchunk import effective
from dynchunk.effective import Effective
from dynchunk.settings import SettingsError, from_env


def resolve(
    *, engine_page: int = 1, static_tokens: int = 2048, context_tokens: int | None = None, **environ: str
) -> Effective:
    settings = from_env({f"DYNCHUNK_{name}": value for name, value in environ.items()})
    return effective.resolve(
        settings, engine_page=engine_page, static_tokens=static_tokens, context_tokens=context_tokens
    )


def refused(**kwargs: object) -> str:
    with pytest.raises(SettingsError) as caught:
        resolve(**kwargs)  # type: ignore[arg-type]
    return str(caught.value)


@pytest.mark.parametrize(("engine_page", "page"), [(1, 64), (16, 64), (48, 96), (64, 64), (128, 128), (256, 256)])
def test_the_default_page(engine_page: int, page: int) -> None:
    """Unset, the page is the smallest multiple of the engine's that is at least 64."""
    assert resolve(engine_page=engine_page).limits.page == page


def test_a_page_that_does_not_fit_the_engines_is_refused() -> None:
    """The engine cuts whole pages; a chunk of half ones would be cut differently from what was asked."""
    message = refused(engine_page=64, PAGE="96")
    assert "DYNCHUNK_PAGE=96 is not a multiple of the engine's page of 64" in message
    assert "use 128" in message


def test_a_page_above_the_largest_chunk_is_refused() -> None:
    """A page of 4352 with chunks of 2048 would otherwise run chunks of more than twice what was asked."""
    assert "a page of 4,352 tokens is larger than the largest chunk of 2,048" in refused(PAGE="4352")


def test_the_static_size_is_the_ceiling() -> None:
    """The engine's buffers are sized for its own chunk size; a larger maximum is not honoured, and that is said."""
    resolved = resolve(static_tokens=512, CHUNK_MAX="2048")
    assert resolved.limits.chunk_max == 512
    assert any("DYNCHUNK_CHUNK_MAX=2,048 is above" in note for note in resolved.notes)


def test_rounding_is_said() -> None:
    """3000 in pages of 256 is 2816; a minimum of 300 is 512, never less than what was asked."""
    resolved = resolve(static_tokens=4096, PAGE="256", CHUNK_MAX="3000", CHUNK_MIN="300")
    assert (resolved.limits.chunk_min, resolved.limits.chunk_max) == (512, 2816)
    assert len(resolved.notes) == 2


def test_a_minimum_the_operator_chose_above_the_largest_chunk_is_refused() -> None:
    """It cannot be kept, so it is not silently lowered."""
    assert "DYNCHUNK_CHUNK_MIN=256 is above the largest chunk of 128" in refused(static_tokens=128, CHUNK_MIN="256")


def test_the_default_minimum_bows_to_a_small_engine() -> None:
    """A default is not a promise to anybody: with a static size of 128 the floor is 128."""
    assert resolve(static_tokens=128).limits.chunk_min == 128


def test_a_static_size_below_the_default_page() -> None:
    """A tiny chunk size is the operator's choice; the engine's own page is then the page."""
    limits = resolve(engine_page=16, static_tokens=48).limits
    assert (limits.page, limits.chunk_min, limits.chunk_max) == (16, 48, 48)


def test_all_contradictions_at_once() -> None:
    """Two contradictions, two sentences."""
    message = refused(engine_page=64, static_tokens=2048, PAGE="4352", CHUNK_MIN="1")
    assert "larger than the largest chunk" in message
    message = refused(engine_page=100, static_tokens=2048, PAGE="4096")
    assert "not a multiple" in message
    assert "larger than the largest chunk" in message


def test_the_context_length_that_reaches_the_floor() -> None:
    """From 781,250 tokens on 256 new ones exceed 2.0e8; a context length beyond that is a warning at start."""
    assert resolve(PAGE="256", context_tokens=781_250).warnings == []
    [warning] = resolve(PAGE="256", context_tokens=1_048_576).warnings
    assert "beyond a prefix of 781,250" in warning
    assert "1,048,576" in warning


def test_a_floor_above_the_budget_everywhere() -> None:
    """Under the sequence rule a tiny budget can be below the floor even on an empty prefix."""
    [warning] = resolve(RULE="sequence", BUDGET="1000").warnings
    assert "above the budget at every prefix" in warning


def test_overshoot_of_the_prefix_rule() -> None:
    """With a large static chunk the prefix rule can exceed the budget by more than its size; `sequence` is advised."""
    [warning] = resolve(static_tokens=16_384).warnings
    assert "134%" in warning
    assert "DYNCHUNK_RULE=sequence" in warning
    assert resolve(static_tokens=16_384, RULE="sequence").warnings == []
    assert resolve(static_tokens=2048).warnings == []
