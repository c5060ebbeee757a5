"""`.env` is read as Docker Compose reads it. tests/image/test_image_dotenv.py holds the same table against Compose."""

from __future__ import annotations

from pathlib import Path

import pytest

from dynchunk.settings import SettingsError
from launcher import dotenv
from tests.launcher.dotenv_cases import ENVIRON, READ, REFUSED


@pytest.mark.parametrize(("text", "expected"), READ.items(), ids=repr)
def test_what_is_read(text: str, expected: dict[str, str]) -> None:
    """Quotes, comments, `export`, escapes, expansion: the table."""
    assert dotenv.parse(text, ENVIRON) == expected


@pytest.mark.parametrize("text", REFUSED)
def test_what_is_refused(text: str) -> None:
    """A line that is no setting, or a value that ends in the middle, is named by its line, and no value is shown."""
    with pytest.raises(dotenv.DotenvError) as caught:
        dotenv.parse("FINE=1\n\n" + text, ENVIRON, "here/.env")
    assert str(caught.value).startswith("here/.env, line 3")
    assert "s3cret" not in str(caught.value)


def test_the_environment_wins(tmp_path: Path) -> None:
    """Even an empty variable: that is how a line of the file is turned off for once."""
    file = tmp_path / ".env"
    file.write_text("PORT=1\nHOST=a\nAPI_KEY=k\nHF_HOME=\n")
    found = dotenv.merged({"PORT": "2", "HOST": ""}, file)
    assert found.environ == {"PORT": "2", "HOST": "", "API_KEY": "k"}
    assert found.names == {"API_KEY"}


def test_without_a_file_nothing_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No .env is no mistake, a folder of that name is no file of settings; one that is asked for has to be there."""
    monkeypatch.setattr(dotenv, "FILE", tmp_path / ".env")
    assert dotenv.merged({"PORT": "2"}).environ == {"PORT": "2"}
    (tmp_path / ".env").mkdir()
    assert dotenv.merged({"PORT": "2"}).names == frozenset()
    with pytest.raises(SettingsError, match="no such file"):
        dotenv.merged({}, tmp_path / "other")
    with pytest.raises(SettingsError, match=r"it is a folder; name the file in it: .*/\.env"):
        dotenv.merged({}, tmp_path)


@pytest.mark.parametrize("content", [b"A=\xff\xfe", b"A=1\0"])
def test_a_file_that_is_no_text(tmp_path: Path, content: bytes) -> None:
    """One sentence with the file's name."""
    (tmp_path / "env").write_bytes(content)
    with pytest.raises(dotenv.DotenvError, match="no text in UTF-8"):
        dotenv.load(tmp_path / "env", {})


def test_the_example_is_such_a_file() -> None:
    """.env.example sets nothing as it is, and with its lines uncommented it sets everything to nothing."""
    text = (dotenv.ROOT / ".env.example").read_text(encoding="utf-8")
    assert dotenv.parse(text, {}) == {}
    lines = [line[1:] if line.startswith("#") and line.endswith("=") else line for line in text.splitlines()]
    found = dotenv.parse("\n".join(lines), {})
    assert {"MODEL_PATH", "DYNCHUNK_BUDGET", "MODELS_DIR"} <= set(found)
    assert set(found.values()) == {""}
