"""Containers of the image: the adapter is in every Python, and the launcher says what is wrong and what it would do."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.image import harness

pytestmark = [pytest.mark.image, pytest.mark.xdist_group("docker"), pytest.mark.timeout(1800)]

SEEN = """
import json, sys
print(json.dumps({
    "watch": [type(finder).__module__ for finder in sys.meta_path].count("dynchunk.import_watch"),
    "first": type(sys.meta_path[0]).__module__,
    "dynchunk": sorted(name for name in sys.modules if name.startswith("dynchunk")),
    "heavy": [name for name in ("torch", "sglang", "numpy") if name in sys.modules],
    "base_sitecustomize_ran": getattr(sys, "base_sitecustomize_ran", False),
}))
"""


MOUNT = ("--volume", f"{sys.prefix}:{sys.prefix}:ro")


@pytest.fixture(scope="module")
def container(engine: harness.Engine, image: str) -> Iterator[Any]:
    """A function that runs a command in a container that does nothing else, the engine's environment mounted."""
    started = engine.run("run", "--detach", "--init", "--no-healthcheck", *MOUNT, image, "sleep", "infinity")
    name = started.stdout.strip()

    def execute(*command: str, options: tuple[str, ...] = (), check: bool = False, **environ: str) -> harness.Finished:
        return engine.run("exec", *given(environ), *options, name, *command, check=check)

    try:
        yield execute
    finally:
        engine.run("rm", "--force", "--volumes", name)


def given(environ: dict[str, str]) -> list[str]:
    """The options that give a container these variables."""
    return [word for name, value in environ.items() for word in ("--env", f"{name}={value}")]


def test_every_python_has_the_adapter(container: Any) -> None:
    """A fresh python3 has the import watch first, no engine, no torch, and the base's own sitecustomize has run."""
    seen = json.loads(container("python3", "-c", SEEN, check=True).stdout)
    assert (seen["watch"], seen["first"]) == (1, "dynchunk.import_watch")
    assert seen["heavy"] == []
    assert seen["base_sitecustomize_ran"]


def test_off_is_off(container: Any) -> None:
    """With DYNCHUNK_MODE=off a fresh python3 has nothing of ours; the base's sitecustomize has run all the same."""
    seen = json.loads(container("python3", "-c", SEEN, check=True, DYNCHUNK_MODE="off").stdout)
    assert (seen["watch"], seen["dynchunk"]) == (0, [])
    assert seen["base_sitecustomize_ran"]


def test_the_command_line_is_there(container: Any) -> None:
    """`dynchunk` is on PATH and shows its commands, from any folder."""
    done = container("dynchunk", "--help", options=("--workdir", "/tmp"))
    assert done.returncode == 0, done.stderr
    for word in ("serve", "status", "health", "memguard"):
        assert word in done.stdout


def test_a_dry_run_shows_what_would_start(container: Any) -> None:
    """`serve --dry-run` prints the engine's command with the image's own address, and starts nothing."""
    done = container("dynchunk", "serve", "--dry-run", MODEL_PATH="/models/some", DYNCHUNK_BUDGET="1e8")
    assert done.returncode == 0, done.stderr
    command = done.stdout.splitlines()[-1]
    assert f"{sys.prefix}/bin/python3 -m sglang.launch_server --model-path /models/some" in command
    assert "--chunked-prefill-size 2048" in command
    assert "--host 0.0.0.0" in command
    assert "budget 100,000,000" in done.stdout


def test_wrong_settings_end_the_container(engine: harness.Engine, image: str) -> None:
    """The image's own command names every wrong setting and exits with 2; the engine is not started."""
    wrong = {"MODEL_PATH": "/models/some", "DYNCHUNK_BUDGET": "-1", "DYNCHUNK_BUGDET": "1e8", "PORT": "0"}
    done = engine.run("run", "--rm", "--init", *MOUNT, *given(wrong), image, check=False)
    assert done.returncode == 2
    assert "not started: 3 settings are wrong" in done.stderr
    assert "DYNCHUNK_BUDGET='-1': not from 1 to" in done.stderr
    assert "DYNCHUNK_BUGDET: unknown setting; did you mean DYNCHUNK_BUDGET?" in done.stderr
    assert "PORT='0': not from 1 to" in done.stderr


def test_a_probe_without_a_server_is_unhealthy(container: Any) -> None:
    """`dynchunk health` says what it tried, and fails."""
    done = container("dynchunk", "health")
    assert done.returncode == 1
    assert done.stdout.startswith("unhealthy: http://127.0.0.1:30000/health: ")
