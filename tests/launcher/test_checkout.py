"""The program in its folder: the `.env` and the `.venv` beside it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from pytest_httpserver import HTTPServer

from tests.conftest import ROOT
from tests.launcher.conftest import outer_environ

pytestmark = pytest.mark.slow

MEMGUARD = "import json, os, sys\nprint(json.dumps([sys.argv[1:], dict(os.environ)]))\n"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the program, whose memguard only says what it was given."""
    folder = tmp_path / "checkout"
    for name in ("adapter", "launcher"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "dynchunk", folder)
    (folder / "scripts" / "verify").mkdir(parents=True)
    for name in ("__init__.py", "verify/__init__.py"):
        (folder / "scripts" / name).write_text("")
    (folder / "scripts" / "verify" / "memguard.py").write_text(MEMGUARD)
    return folder


def run(folder: Path, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """The copy's `dynchunk`, called from elsewhere, with this Python as the one on PATH."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    return subprocess.run(
        [folder / "dynchunk", *words],
        env=outer_environ() | {"PATH": path} | environ,
        cwd=folder.parent,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_env_file_beside_the_program(checkout: Path, httpserver: HTTPServer) -> None:
    """Read by serve, status, budget and memguard from wherever they are called; that of another folder is not."""
    httpserver.expect_request("/server_info", headers={"Authorization": "Bearer k"}).respond_with_json(
        {"internal_states": [{"dynchunk": {"mode": "on"}}]}
    )
    httpserver.expect_request("/set_internal_state", headers={"Authorization": "Bearer k"}).respond_with_json([True])
    (checkout / ".env").write_text(f"MODEL_PATH=/models/mine\nPORT={httpserver.port}\nexport API_KEY='k'  # mine\n")
    (checkout.parent / ".env").write_text("MODEL_PATH=/models/theirs\nTP_SIZE=0\n")
    shown = run(checkout, "serve", "--dry-run").stdout
    assert ["MODEL_PATH", "/models/mine", ".env"] in [line.split() for line in shown.splitlines()]
    assert run(checkout, "status").returncode == 0
    assert run(checkout, "budget", "1e8").returncode == 0
    words, environ = json.loads(run(checkout, "memguard", "--sizes", "1k", PORT="1").stdout)
    assert words == ["--sizes", "1k"]
    assert (environ["API_KEY"], environ["PORT"], environ["MODEL_PATH"]) == ("k", "1", "/models/mine")


@pytest.mark.parametrize("where", ["before", "behind"])
def test_another_env_file_for_memguard(checkout: Path, where: str) -> None:
    """It is named as for the other commands, wherever among memguard's own flags; the engine's are the engine's."""
    (checkout / ".env").write_text("PORT=2\n")
    (checkout / "other").write_text("PORT=3\n")
    own, named = ["--sizes", "1k"], ["--env-file", str(checkout / "other")]
    given = named + own if where == "before" else own + named
    words, environ = json.loads(run(checkout, "memguard", *given, "--launch", "--", "x", "--env-file", "y").stdout)
    assert words[:4] == [*own, "--launch", "x"]
    assert words[-2:] == ["--env-file", "y"]
    assert environ["PORT"] == "3"
    done = run(checkout, "memguard", "--env-file", str(checkout / "none"))
    assert done.returncode == 1
    assert "there is no such file" in done.stderr


def test_a_mistake_in_the_env_file_ends_every_command(checkout: Path) -> None:
    """With the file and the line, and without the value: there are keys in it."""
    (checkout / ".env").write_text("PORT=1\nAPI_KEY='s3cret\n")
    for words, code in {("serve",): 2, ("status",): 1, ("budget", "1e8"): 1, ("memguard",): 1}.items():
        done = run(checkout, *words)
        assert done.returncode == code
        assert f"{checkout / '.env'}, line 2, API_KEY: the closing ' is missing" in done.stderr
        assert "s3cret" not in done.stderr


def test_settings_of_the_file_are_checked_as_any(checkout: Path) -> None:
    """And the message says that the file was read."""
    (checkout / ".env").write_text("MODEL_PATH=/m\nDYNCHUNK_BUGDET=1e8\n")
    done = run(checkout, "serve")
    assert done.returncode == 2
    assert "DYNCHUNK_BUGDET: unknown setting; did you mean DYNCHUNK_BUDGET?" in done.stderr
    assert f"(from the environment and {checkout / '.env'})" in done.stderr


@pytest.mark.parametrize("made", ["bare", "broken", "none"])
def test_a_venv_without_the_tools_is_not_used(checkout: Path, made: str) -> None:
    """Where .venv was made for something else, or half made, the Python on PATH does it."""
    if made != "none":
        python = checkout / ".venv" / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n' if made == "bare" else "#!/nowhere\n")
        python.chmod(0o755)
    done = run(checkout, "--version")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("dynchunk ")


def test_without_any_env_file(checkout: Path) -> None:
    """It is no mistake to have none."""
    done = run(checkout, "serve", "--dry-run", MODEL_PATH="/models/some")
    assert (done.returncode, done.stderr) == (0, "")
