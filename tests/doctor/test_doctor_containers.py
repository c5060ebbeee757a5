"""The doctor on containers, from what `docker inspect` says and from the inside."""

from __future__ import annotations

from typing import Any

from scripts.doctor import containers
from scripts.doctor.readings import Container
from scripts.doctor.verdict import GIB, Level

OURS: dict[str, Any] = {
    "Name": "/dynchunk-server-1",
    "Config": {
        "Cmd": ["dynchunk", "serve"],
        "Entrypoint": None,
        "Image": "dynchunk",
        "Healthcheck": {"Test": ["CMD", "python3", "-S", "-E", "/opt/dynchunk/launcher/health.py"]},
    },
    "HostConfig": {"Init": True, "Memory": 0},
}
THEIRS: dict[str, Any] = {
    "Name": "/sglang",
    "Config": {
        "Cmd": ["python3", "-m", "sglang.launch_server", "--model-path", "/m"],
        "Entrypoint": None,
        "Image": "lmsysorg/sglang:v0.5.23",
        "Healthcheck": {"Test": ["CMD-SHELL", "python3 -c 'import sglang'"]},
    },
    "HostConfig": {"Init": None, "Memory": 100 * GIB},
}


def test_our_own_container_has_nothing_to_complain_about() -> None:
    """Init, a probe that cannot load the engine, no limit."""
    assert containers.runs_engine(OURS)
    assert {check.level for check in containers.from_outside(OURS, unified=True)} == {Level.OK}


def test_what_is_wrong_with_others() -> None:
    """No init, a health check that imports the engine, a limit that CUDA does not know: three warnings, each named."""
    assert containers.runs_engine(THEIRS)
    checks = containers.from_outside(THEIRS, unified=True)
    assert [check.level for check in checks] == [Level.WARN] * 3
    assert all(check.name.startswith("sglang: ") for check in checks)


def test_health_checks() -> None:
    """Any Python with site packages may be pulled into the engine; a generated token waits for the long prefill."""
    levels = {
        "curl -f http://127.0.0.1:30000/health": Level.OK,
        "python3 -S -E health.py": Level.OK,
        "python3 health.py": Level.WARN,
        "curl -f http://127.0.0.1:30000/health_generate": Level.WARN,
    }
    for command, level in levels.items():
        assert containers.health_check(["CMD-SHELL", command]).level is level, command
    assert containers.health_check(None).level is Level.OK


def test_other_peoples_containers_are_left_out() -> None:
    """Only what runs an engine is looked at."""
    assert not containers.runs_engine({"Config": {"Cmd": ["postgres"], "Image": "postgres:17"}})


def test_from_the_inside() -> None:
    """Process 1 by its name, and the cgroup's limit."""
    inits = {name: containers.first_process(name).level for name in ("tini", "docker-init", "python3", "sh")}
    assert inits == {"tini": Level.OK, "docker-init": Level.OK, "python3": Level.WARN, "sh": Level.WARN}
    init, limit = containers.inside(Container("tini", 8 * GIB), unified=True)
    assert (init.level, limit.level) == (Level.OK, Level.WARN)
