"""`dynchunk doctor` inside the image, and from outside on a container of it."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from scripts.doctor import containers
from scripts.doctor.verdict import Level
from tests.image import harness
from tests.image.conftest import NAME

pytestmark = [pytest.mark.image, pytest.mark.xdist_group("docker"), pytest.mark.timeout(1800)]


def doctor(engine: harness.Engine, image: str, *options: str) -> dict[str, dict[str, Any]]:
    """The checks of a fresh container, by name. Its exit code is the verdict."""
    mount = ("--volume", f"{sys.prefix}:{sys.prefix}:ro", "--env", "MODEL_PATH=/models/none")
    done = engine.run("run", "--rm", *mount, *options, image, "dynchunk", "doctor", "--json", check=False)
    answer = json.loads(done.stdout)
    assert done.returncode == (0 if answer["ok"] else 1), done.stderr
    return {check["name"]: check for check in answer["checks"]}


def test_inside_the_image(engine: harness.Engine, image: str) -> None:
    """Engine, contracts and the start hook are found; with --init and no limit the container is all right."""
    found = doctor(engine, image, "--init")
    for name in ("engine", "contracts", "start hook", "init in the container", "memory limit of the container"):
        assert found[name]["level"] == "ok", found[name]


def test_a_container_without_init_and_with_a_limit(engine: harness.Engine, image: str) -> None:
    """Both are warned about from the inside, the limit with its size."""
    found = doctor(engine, image, "--memory", "2g")
    assert found["init in the container"]["level"] == "warn"
    assert found["memory limit of the container"]["level"] == "warn"
    assert "2.00 GiB" in found["memory limit of the container"]["reason"]


def test_from_outside(engine: harness.Engine, image: str) -> None:
    """What `docker inspect` says of a container of our image: its health check is light, its init is there."""
    name = f"{NAME}-doctor"
    engine.run("create", "--init", "--name", name, image, "dynchunk", "serve", check=True)
    try:
        [inspected] = json.loads(engine.run("inspect", name, check=True).stdout)
    finally:
        engine.run("rm", "--force", name, check=True)
    assert containers.runs_engine(inspected)
    checks = {check.name: check for check in containers.from_outside(inspected, unified=True)}
    assert {check.level for check in checks.values()} == {Level.OK}
    assert "health.py" in checks[f"{name}: health check of the container"].reason
