"""What can be wrong with a container around the engine: no init, a health check that loads the engine, a limit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from scripts.doctor.memory_rules import memory_limit
from scripts.doctor.readings import ENGINE_WORDS, Container
from scripts.doctor.verdict import Check, ok, warn

INITS = {"tini", "docker-init", "dumb-init", "catatonit", "podman-init", "s6-svscan", "systemd", "init", "krun"}
OURS = ("dynchunk serve", "dynchunk/launcher")


def first_process(name: str) -> Check:
    """Whether process 1 reaps children that nobody waits for."""
    label = "init in the container"
    if name in INITS:
        return ok(label, f"process 1 is {name}")
    return warn(
        label,
        f"process 1 is {name}, which does not reap what the engine's workers leave behind: after a day there are "
        "zombies, some of them busy",
        "init: true in the compose file, or docker run --init",
    )


def health_check(test: Sequence[str] | None) -> Check:
    """Whether the probe, which runs every few seconds during long prefills, loads the engine or waits for a token."""
    name = "health check of the container"
    if not test or test[0] == "NONE":
        return ok(name, "none")
    command = " ".join(test[1:])
    if "health_generate" in command:
        return warn(
            name,
            f"`{command}` waits for a generated token, which a long prefill holds up for minutes",
            "ask /health, as `dynchunk health` does",
        )
    if "import sglang" in command or ("python" in command and " -S" not in command):
        return warn(
            name,
            f"`{command}` starts a Python with site packages, so start hooks can pull the engine into it: 0.6 GB each "
            "time, just when memory is short",
            "python3 -S -E /opt/dynchunk/launcher/health.py, or curl",
        )
    return ok(name, f"`{command}`")


def inside(container: Container, *, unified: bool | None) -> list[Check]:
    """The checks for the container that this runs in."""
    return [first_process(container.first_process), memory_limit(container.limit_bytes, unified=unified)]


def runs_engine(inspected: Mapping[str, Any]) -> bool:
    """Whether a container's command is the engine's, or ours."""
    config = inspected.get("Config") or {}
    command = " ".join([*(config.get("Entrypoint") or []), *(config.get("Cmd") or []), str(config.get("Image"))])
    return any(word in command for word in (*ENGINE_WORDS, *OURS, "sglang", "dynchunk"))


def from_outside(inspected: Mapping[str, Any], *, unified: bool | None) -> list[Check]:
    """The checks for one running container, from `docker inspect`. Its name goes in front."""
    name = str(inspected.get("Name", "?")).lstrip("/")
    config, host = inspected.get("Config") or {}, inspected.get("HostConfig") or {}
    if host.get("Init"):
        init = ok("init in the container", "--init")
    else:
        words = [*(config.get("Entrypoint") or []), *(config.get("Cmd") or []), "?"]
        init = first_process(words[0].rpartition("/")[2])
    checks = [
        init,
        health_check((config.get("Healthcheck") or {}).get("Test")),
        memory_limit(host.get("Memory") or None, unified=unified),
    ]
    return [Check(f"{name}: {c.name}", c.level, c.reason, c.cure) for c in checks]
