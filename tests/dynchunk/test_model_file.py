"""A latency model between two starts: used for the engine it was learned on, and no other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dynchunk import journal
from dynchunk.model_file import ModelFile
from dynchunk.policy.latency import from_ms

MODEL = from_ms(2.5e-5, 0.015, 3, 0.002)
HERE = {"engine": "0.5.23", "model": "/models/m", "layout": "tp1 pp2"}


@pytest.fixture(autouse=True)
def empty_journal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "_hooks", {})


def said() -> str:
    return journal.snapshot()["hooks"]["model_file"]["detail"]


def test_what_is_kept_comes_back_to_the_tick(tmp_path: Path) -> None:
    kept = ModelFile(str(tmp_path / "model.json"), HERE)
    assert kept.load() is None
    assert "is not there yet" in said()
    kept.save(MODEL)
    assert kept.load() == MODEL
    assert [path.name for path in tmp_path.iterdir()] == ["model.json"], "half-written files are left"


@pytest.mark.parametrize("name", HERE)
def test_another_engine_does_not_use_it(tmp_path: Path, name: str) -> None:
    path = str(tmp_path / "model.json")
    ModelFile(path, HERE).save(MODEL)
    assert ModelFile(path, HERE | {name: "other"}).load() is None
    assert f"{name} is 'other' here and {HERE[name]!r} there" in said()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[" * 100_000,
        "[]",
        '{"belongs_to": 3}',
        json.dumps({"belongs_to": HERE, "ticks": {"a": 1}}),
        json.dumps({"belongs_to": HERE, "ticks": {"a": -1, "b": 1, "c": 1, "gamma": 1}}),
        json.dumps({"belongs_to": HERE, "ticks": {"a": "x", "b": 1, "c": 1, "gamma": 1}}),
        json.dumps({"belongs_to": HERE, "ticks": {"a": 1, "b": 1, "c": 10**320, "gamma": 1}}),
        json.dumps({"belongs_to": HERE, "ticks": {"a": 10**24 + 1, "b": 1, "c": 1, "gamma": 1}}),
    ],
)
def test_a_spoilt_file_is_said_and_not_used(tmp_path: Path, text: str) -> None:
    path = tmp_path / "model.json"
    path.write_text(text)
    assert ModelFile(str(path), HERE).load() is None
    assert "holds no latency model" in said()


def test_a_file_that_cannot_be_written_ends_nothing(tmp_path: Path) -> None:
    ModelFile(str(tmp_path / "no" / "such" / "folder" / "m.json"), HERE).save(MODEL)
    assert "learned anew at every start" in said()


def test_a_model_that_was_dropped_is_not_run_by_again(tmp_path: Path) -> None:
    kept = ModelFile(str(tmp_path / "model.json"), HERE)
    kept.forget()
    kept.save(MODEL)
    kept.forget()
    assert kept.load() is None


@pytest.mark.parametrize(
    "text", ['{"architectures": ["A"]}', "notes", '["belongs_to", "ticks"]', '{"belongs_to": {}}', "[" * 100_000]
)
def test_another_file_is_never_overwritten(tmp_path: Path, text: str) -> None:
    """The knob may be pointed at the model's own config.json by mistake."""
    path = tmp_path / "config.json"
    path.write_text(text)
    ModelFile(str(path), HERE).save(MODEL)
    assert path.read_text() == text
    assert f"DYNCHUNK_MODEL_FILE={path}: it holds something else" in said()
    assert "name a file of its own" in said()
    assert journal.snapshot()["hooks"]["model_file"]["outcome"] == journal.REFUSED
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_is_no_text_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(bytes(range(256)))
    ModelFile(str(path), HERE).save(MODEL)
    assert path.read_bytes() == bytes(range(256))


@pytest.mark.parametrize("text", ["", "\n", json.dumps({"belongs_to": {"engine": "old"}, "ticks": {}})])
def test_an_empty_file_and_an_earlier_model_make_room(tmp_path: Path, text: str) -> None:
    path = tmp_path / "model.json"
    path.write_text(text)
    kept = ModelFile(str(path), HERE)
    kept.save(MODEL)
    assert kept.load() == MODEL


@pytest.mark.parametrize("name", ["", "/dev/null"])
def test_what_is_no_file_is_refused(tmp_path: Path, name: str) -> None:
    ModelFile(name or str(tmp_path), HERE).save(MODEL)
    assert "it is no regular file" in said()
    assert list(tmp_path.iterdir()) == []
    assert Path("/dev/null").is_char_device()


def test_nothing_half_written_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    ModelFile(str(tmp_path / "model.json"), HERE).save(MODEL)
    assert "No space left on device; learned anew at every start" in said()
    assert list(tmp_path.iterdir()) == []
