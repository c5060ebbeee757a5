"""Our reader of `.env` against the real Compose, over the same table. Needs no engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.image import harness
from tests.launcher.dotenv_cases import ENVIRON, READ, REFUSED_BY_BOTH

pytestmark = pytest.mark.image

PROJECT = "services:\n  a:\n    image: x\n    env_file: [.env]\n"


def compose(programs: Path, folder: Path, text: str) -> dict[str, str] | None:
    """What Compose makes of a `.env`; None where it refuses it."""
    (folder / "compose.yaml").write_text(PROJECT)
    (folder / ".env").write_bytes(text.encode())
    done = harness.run(
        *(str(programs / "docker-compose"), "--project-directory", str(folder), "config", "--format", "json"),
        environ=harness.clean_environ(**ENVIRON),
        check=False,
    )
    if done.returncode:
        return None
    found = json.loads(done.stdout)["services"]["a"]["environment"]
    return {name: value.replace("$$", "$") for name, value in found.items()}


@pytest.mark.parametrize(("text", "expected"), READ.items(), ids=repr)
def test_compose_reads_it_so(programs: Path, tmp_path: Path, text: str, expected: dict[str, str]) -> None:
    """One file serves both: what our table says is what Compose does."""
    assert compose(programs, tmp_path, text) == expected


@pytest.mark.parametrize("text", REFUSED_BY_BOTH)
def test_compose_refuses_it_too(programs: Path, tmp_path: Path, text: str) -> None:
    """We are not stricter than we say."""
    assert compose(programs, tmp_path, text) is None
