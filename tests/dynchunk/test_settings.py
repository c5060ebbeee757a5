"""Settings: what is accepted, what is refused, and that the refusal helps."""

from __future__ import annotations

import pytest

from dynchunk.policy.latency import TICKS_PER_MS, Mode, parse_mode
from dynchunk.settings import Settings, SettingsError, from_env


def problems(**environ: str) -> list[str]:
    with pytest.raises(SettingsError) as caught:
        from_env({f"DYNCHUNK_{name}": value for name, value in environ.items()})
    return caught.value.problems


def test_the_defaults() -> None:
    """Without any variable every knob has its documented default, and nothing counts as set by the operator."""
    settings = from_env({"PATH": "/bin"})
    assert settings == Settings()
    assert settings.budget == 200_000_000
    assert (settings.mode, settings.rule, settings.chunk_min) == ("on", "prefix", 256)
    assert settings.explicit == frozenset()


@pytest.mark.parametrize("text", ["2e8", "2.0e8", "200000000", "200M", "200m", " 0.2G ", "200_000_000", "200000K"])
def test_one_budget_many_spellings(text: str) -> None:
    """People write large numbers differently; all of these are 200,000,000 token^2 exactly."""
    assert from_env({"DYNCHUNK_BUDGET": text}).budget == 200_000_000


@pytest.mark.parametrize(
    "text",
    ["nan", "inf", "-inf", "-1", "0", "true", "False", "lots", "2e8x", "1.5", "1e999999999", "M", "0x10", "--1"],
)
def test_what_is_not_a_budget_is_refused(text: str) -> None:
    """A budget must be a positive finite whole number; anything else is refused with name, value and limit."""
    [problem] = problems(BUDGET=text)
    assert "DYNCHUNK_BUDGET=" in problem
    assert repr(text) in problem
    assert "accepted: " in problem


@pytest.mark.parametrize("name", ["CHUNK_MIN", "CHUNK_MAX", "PAGE", "EMPTY_CACHE_MIN_TOKENS"])
@pytest.mark.parametrize("text", ["0", "-1", "nan", "true", "1.5"])
def test_sizes_must_be_positive_whole_numbers(name: str, text: str) -> None:
    """Sizes in tokens obey the same rules as the budget."""
    assert f"DYNCHUNK_{name}=" in problems(**{name: text})[0]


def test_an_empty_value_is_unset() -> None:
    """Compose files pass `NAME=` for what the operator left out."""
    assert from_env({"DYNCHUNK_PAGE": "", "DYNCHUNK_BUDGET": "  ", "DYNCHUNK_MODE": ""}) == Settings()


def test_all_problems_come_at_once() -> None:
    """Whoever has three wrong settings reads about all three before the first restart."""
    found = problems(BUDGET="-1", RULE="both", PAGE="x", CHUNK_MIN="512", CHUNK_MAX="256")
    assert len(found) == 4
    assert "CHUNK_MIN=512 is above DYNCHUNK_CHUNK_MAX=256" in found[-1]


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [("BUDGT", "BUDGET"), ("CHUNKMIN", "CHUNK_MIN"), ("EMPTY_CACHES", "EMPTY_CACHE"), ("budget", "")],
)
def test_a_misspelt_name_is_refused(wrong: str, meant: str) -> None:
    """An unknown DYNCHUNK_ name is not ignored, because its value would be; the likely name is offered."""
    [problem] = problems(**{wrong: "1"})
    assert f"DYNCHUNK_{wrong}: unknown setting" in problem
    assert f"did you mean DYNCHUNK_{meant}" in problem or not meant


def test_off_is_off_whatever_else_is_wrong() -> None:
    """Whoever turns DynChunk off gets the stock engine, not a list of complaints."""
    assert from_env({"DYNCHUNK_MODE": "OFF", "DYNCHUNK_BUDGET": "-1", "DYNCHUNK_X": "1"}).mode == "off"


def test_what_the_operator_set_is_remembered() -> None:
    """A default may be fitted to the engine in silence; a value that somebody chose may not."""
    assert from_env({"DYNCHUNK_CHUNK_MIN": "256"}).explicit == frozenset({"chunk_min"})


@pytest.mark.parametrize(
    ("text", "mode"),
    [
        ("off", Mode("off")),
        ("EQUAL", Mode("equal")),
        ("pipeline", Mode("pipeline")),
        ("200ms", Mode("ceiling", 200 * TICKS_PER_MS)),
        (" 1e3 MS", Mode("ceiling", 1000 * TICKS_PER_MS)),
    ],
)
def test_latency_modes(text: str, mode: Mode) -> None:
    """Every accepted word, and what it comes to."""
    assert parse_mode(from_env({"DYNCHUNK_LATENCY": text}).latency) == mode


@pytest.mark.parametrize("text", ["on", "0ms", "-3ms", "200", "0.5ms", "nanms", "99999999999ms", "ms"])
def test_wrong_latency_modes(text: str) -> None:
    """Everything else is refused with what is accepted."""
    with pytest.raises(SettingsError, match=r"DYNCHUNK_LATENCY=.*250ms"):
        from_env({"DYNCHUNK_LATENCY": text})
