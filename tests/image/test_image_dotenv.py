"""Our reader of `.env` against the real Compose, over the same table. Needs no engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.image import harness
from tests.launcher.dotenv_cases import ENVIRON, READ, REFUSED_BY_BOTH


def compose(programs: Path, folder: Path, texts: list[str]) -> list[dict[str, str]] | None:
    """What Compose makes of each of these files, in services of their own; None where it refuses one."""
    services = {}
    for number, text in enumerate(texts):
        (folder / f"{number}.env").write_bytes(text.encode())
        services[f"s{number}"] = {"image": "x", "env_file": [f"{number}.env"]}
    (folder / "compose.yaml").write_text(json.dumps({"services": services}))
    done = harness.run(
        *(str(programs / "docker-compose"), "--project-directory", str(folder), "config", "--format", "json"),
        environ=harness.clean_environ(**ENVIRON),
        check=False,
    )
    if done.returncode:
        return None
    found = json.loads(done.stdout)["services"]
    seen = [found[name].get("environment", {}) for name in services]
    return [{name: value.replace("$$", "$") for name, value in environment.items()} for environment in seen]


@pytest.fixture(scope="session")
def seen(programs: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """What Compose makes of every file of the table."""
    found = compose(programs, tmp_path_factory.mktemp("dotenv"), list(READ))
    assert found is not None
    return dict(zip(READ, found, strict=True))


@pytest.mark.parametrize(("text", "expected"), READ.items(), ids=repr)
def test_compose_reads_it_so(seen: dict[str, dict[str, str]], text: str, expected: dict[str, str]) -> None:
    """One file serves both: what our table says is what Compose does."""
    assert seen[text] == expected


@pytest.mark.parametrize("text", REFUSED_BY_BOTH)
def test_compose_refuses_it_too(programs: Path, tmp_path: Path, text: str) -> None:
    """We are not stricter than we say."""
    assert compose(programs, tmp_path, [text]) is None
    # As the project's own .env, which no service need name, as well.
    (tmp_path / "0.env").rename(tmp_path / ".env")
    assert compose(programs, tmp_path, ["A=1"]) is None
