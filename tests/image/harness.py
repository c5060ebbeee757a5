"""A real Docker engine for the tests: the machine's own where one answers, else one of our own for as long as they run.

Everything here runs real programs and waits for real answers; nothing is mocked.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts import reference

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
REQUIREMENTS = ROOT / "requirements" / "image-test.txt"
PROGRAMS = ("docker-compose", "hadolint")
# The first part of every name that is given here.
NAME = "dynchunk-test"
# What the image is made of, and what makes it.
PROJECT_FILES = (
    *("LICENSE", "dynchunk", "adapter", "docker-images", "launcher", "scripts"),
    *("Dockerfile", ".dockerignore", "compose.yaml", "compose.node.yaml"),
)

# How long anything may take. Nothing is late on a machine that has other things to do as well; this ends what hangs.
PATIENCE_S = 900

Finished = subprocess.CompletedProcess[str]


class NoEngineError(Exception):
    """No Docker engine can be had on this machine. The message says why."""


def clean_environ(**extra: str) -> dict[str, str]:
    """What Docker's programs need of this environment, and nothing that Compose would hand to a container."""
    kept = ("PATH", "HOME", "LANG", "TMPDIR", "DOCKER_HOST", "DOCKER_CONTEXT", "DOCKER_TLS_VERIFY", "DOCKER_CERT_PATH")
    return {name: os.environ[name] for name in kept if name in os.environ} | extra


def run(
    *command: str, environ: dict[str, str], check: bool = True, said: str = "", cwd: Path | None = None
) -> Finished:
    """Run a program. `said`: its standard input. With `check`, what it says is in the error."""
    done = subprocess.run(
        command,
        env=environ,
        cwd=cwd,
        input=said,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    if check and done.returncode:
        raise AssertionError(f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}")
    return done


def programs() -> Path:
    """A folder with PROGRAMS: this environment's, or one that is made once for each state of the requirements."""
    here = Path(sys.prefix) / "bin"
    if all((here / name).is_file() for name in PROGRAMS):
        return here
    key = hashlib.sha256(REQUIREMENTS.read_bytes()).hexdigest()[:12]
    folder = ROOT / ".cache" / f"image-test-{key}"
    folder.parent.mkdir(exist_ok=True)
    # Two workers may want it at once.
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "complete").is_file():
            shutil.rmtree(folder, ignore_errors=True)
            run(sys.executable, "-m", "venv", str(folder), environ=dict(os.environ))
            pip = (str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "-r", str(REQUIREMENTS))
            run(*pip, environ=dict(os.environ))
            (folder / "complete").touch()
    return folder / "bin"


@dataclass(frozen=True)
class Engine:
    """A Docker engine, and how to reach what it publishes."""

    docker: str
    environ: dict[str, str]
    # A command in front of a client, which brings it where published ports are.
    enter: tuple[str, ...]
    version: str
    own: bool

    def run(self, *arguments: str, environ: Mapping[str, str] | None = None, check: bool = True) -> Finished:
        """`docker ARGUMENTS`."""
        return run(self.docker, *arguments, environ=self.environ | dict(environ or {}), check=check)

    def port(self, wanted: int) -> int:
        """A port that stays ours: any in a network of our own, where nobody else is."""
        return wanted if self.own else reference.free_port()

    def http(self, url: str, body: dict[str, Any] | None = None) -> Any:
        """The JSON that a published port answers, or its text where it is no JSON."""
        client = (
            "import sys, urllib.request as r\n"
            "ask = r.Request(sys.argv[1], sys.stdin.read().encode() or None, {'Content-Type': 'application/json'})\n"
            "sys.stdout.write(r.build_opener(r.ProxyHandler({})).open(ask).read().decode())\n"
        )
        answer = run(
            *(*self.enter, sys.executable, "-S", "-E", "-c", client, url),
            environ=self.environ,
            said=json.dumps(body) if body else "",
        ).stdout
        try:
            return json.loads(answer)
        except json.JSONDecodeError:
            return answer


@contextlib.contextmanager
def engine(config: Path) -> Iterator[Engine]:
    """An engine that answers. `config`: an empty folder for the clients' own files. Raises NoEngineError."""
    # Clients write to this folder; the operator's log-ins and contexts are not ours to use.
    environ = clean_environ(DOCKER_CONFIG=str(config))
    docker = shutil.which("docker")
    version = _version(docker, environ) if docker else ""
    if docker and version:
        yield Engine(docker, environ, (), version, own=False)
        return
    _install()
    with _private_engine() as (socket_url, pid):
        environ |= {"DOCKER_HOST": socket_url}
        docker = shutil.which("docker") or "docker"
        yield Engine(
            docker, environ, ("nsenter", "--target", str(pid), "--net"), _version(docker, environ) or "", own=True
        )


def _version(docker: str, environ: dict[str, str]) -> str:
    asked = run(docker, "version", "--format", "{{.Server.Version}}", environ=environ, check=False)
    return asked.stdout.strip() if asked.returncode == 0 else ""


def _install() -> None:
    """Make sure that dockerd and what private_engine.sh calls are installed. Raises NoEngineError."""
    if os.geteuid() != 0:
        raise NoEngineError("no Docker engine answers, and only root can start one")
    # The last one: Debian 13 has the client in a package of its own; in Debian 12 it comes with the engine.
    wanted = (("dockerd", "docker.io"), ("ip", "iproute2"), ("iptables", "iptables"), ("docker", "docker-cli"))
    updated = False
    for program, package in wanted:
        if shutil.which(program):
            continue
        if not shutil.which("apt-get"):
            raise NoEngineError(f"no Docker engine answers, and there is no apt-get to install {package}")
        if not updated:
            _apt_get("update")
            updated = True
        done = _apt_get("install", "--yes", "--no-install-recommends", package)
        if done.returncode:
            raise NoEngineError(f"no Docker engine answers, and {package} cannot be installed: {done.stderr.strip()}")


def _apt_get(*arguments: str) -> Finished:
    environ = dict(os.environ) | {"DEBIAN_FRONTEND": "noninteractive"}
    return run("apt-get", "--quiet", *arguments, environ=environ, check=False)


@contextlib.contextmanager
def _private_engine() -> Iterator[tuple[str, int]]:
    """private_engine.sh, ready. -> (the engine's address, a process in its network namespace)."""
    # On disk, and short: a socket's path has at most 107 bytes.
    folder = Path(f"/var/tmp/dynchunk-docker-{os.getpid()}")
    # A session of its own: Ctrl-C at the tests must not reach the engine before its containers are gone.
    script = subprocess.Popen(
        ["bash", str(HERE / "private_engine.sh"), str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        said = script.stdout.readline().split() if script.stdout else []
        if said[:1] != ["ready"]:
            raise AssertionError(script.stderr.read() if script.stderr else "private_engine.sh said nothing")
        yield f"unix://{folder}/s", int(said[1])
    finally:
        script.communicate(timeout=PATIENCE_S)


class Project:
    """A copy of the files that a user has, with Compose in it, under a project name of its own."""

    def __init__(self, folder: Path, compose: Path, engine: Engine | None, **environ: str) -> None:
        self.folder = folder
        self.compose_program = compose
        self.environ = (engine.environ if engine else clean_environ()) | environ

    @staticmethod
    def copy_to(folder: Path) -> None:
        """Lay the project's files out in `folder`."""
        for name in PROJECT_FILES:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy2(source, folder / name)
        (folder / "logs").mkdir()

    def compose(
        self,
        *arguments: str,
        files: tuple[str, ...] = (),
        environ: Mapping[str, str] | None = None,
        check: bool = True,
    ) -> Finished:
        """`docker compose ARGUMENTS`, with `files` instead of compose.yaml."""
        chosen = [word for name in files for word in ("--file", name)]
        return run(
            str(self.compose_program),
            *chosen,
            *arguments,
            environ=self.environ | dict(environ or {}),
            check=check,
            cwd=self.folder,
        )

    def config(self, environ: Mapping[str, str] | None = None, files: tuple[str, ...] = ()) -> dict[str, Any]:
        """What Compose makes of the files, all profiles included."""
        done = self.compose("--profile", "*", "config", "--format", "json", files=files, environ=environ)
        loaded: dict[str, Any] = json.loads(done.stdout)
        return loaded


def wait_until(condition: Any, timeout_s: float = PATIENCE_S, every_s: float = 0.3) -> Any:
    """The first true answer of `condition()`, or its last one."""
    deadline_s = time.monotonic() + timeout_s
    while not (answer := condition()) and time.monotonic() < deadline_s:
        time.sleep(every_s)
    return answer
