"""What the launcher's tests share: the command itself, without the .env of whoever runs the tests."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from unittest import mock

from typer.testing import CliRunner

from launcher.__main__ import app
from tests.conftest import ROOT, clean_environ

SERVED = ("API_KEY", "CONTEXT_LENGTH", "EXTRA_ARGS", "HOST", "MODEL_PATH", "NNODES", "NODE_RANK", "PORT", "http_proxy")


def outer_environ() -> dict[str, str]:
    """This environment without anything that the launcher reads."""
    return {name: value for name, value in clean_environ().items() if name not in SERVED}


def dynchunk(
    *words: str, cwd: Path | None = None, env_file: str = os.devnull, **environ: str
) -> subprocess.CompletedProcess[str]:
    """Run `./dynchunk WORDS` with nothing set but `environ`. env_file: "" for no such option."""
    return subprocess.run(
        [ROOT / "dynchunk", *words, *(["--env-file", env_file] if env_file else [])],
        env=outer_environ() | environ,
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
    )


def within(*words: str, env_file: str = os.devnull, **environ: str) -> subprocess.CompletedProcess[str]:
    """The same within this process, which is quicker: for what does not become another program."""
    with mock.patch.dict(os.environ, outer_environ() | environ, clear=True):
        done = CliRunner().invoke(app, [*words, "--env-file", env_file], catch_exceptions=False)
    return subprocess.CompletedProcess(words, done.exit_code, done.stdout, done.stderr)
