"""`docker compose up` of the reference platform, for real: health, answers, memguard, the end.

One stack for all tests here. Whoever finds it stopped starts it again, so that their order does not matter.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.image import harness
from tests.image.conftest import NAME

pytestmark = [pytest.mark.image, pytest.mark.xdist_group("docker"), pytest.mark.timeout(2400)]

FILES = ("compose.yaml", str(harness.HERE / "compose.test.yaml"))
PROBE_LIMIT_BYTES = 30_000_000
# An owner of ./logs who is neither root nor anybody here.
OWNER = (12345, 23456)


class Stack:
    """The running services of one Compose project."""

    def __init__(self, engine: harness.Engine, project: harness.Project, port: int) -> None:
        self.engine = engine
        self.project = project
        self.url = f"http://127.0.0.1:{port}"
        self.is_up = False

    def up(self) -> None:
        """Start the server if it does not run, and wait until Compose says that it is healthy."""
        if not self.is_up:
            up = self.compose("up", "--detach", "--wait", "cpu", check=False)
            if up.returncode:
                raise AssertionError(f"{up.stderr}\n{self.compose('logs', 'cpu').stdout}")
            self.is_up = True

    def compose(self, *arguments: str, **options: Any) -> harness.Finished:
        """`docker compose` over this stack."""
        return self.project.compose(*arguments, files=FILES, **options)

    def inside(self, *command: str, check: bool = True) -> harness.Finished:
        """Run a command in the server's container."""
        return self.compose("exec", "-T", "cpu", *command, check=check)

    def state(self) -> dict[str, Any]:
        """What the engine says of the server's container."""
        name = self.compose("ps", "--all", "--quiet", "cpu").stdout.strip()
        (found,) = json.loads(self.engine.run("inspect", name).stdout)
        return dict(found)


@pytest.fixture(scope="module")
def one_stack(engine: harness.Engine, image: str, files: Path, programs: Path) -> Iterator[Stack]:
    """The reference platform; nothing of it runs when the tests end."""
    port = engine.port(30_100)
    project = harness.Project(
        files,
        programs / "docker-compose",
        engine,
        COMPOSE_PROJECT_NAME=f"{NAME}-cpu",
        TEST_IMAGE=image,
        TEST_ENVIRONMENT=sys.prefix,
        PORT=str(port),
        # What the tests look for inside: neither is a default.
        DYNCHUNK_BUDGET="1e8",
        CHUNKED_PREFILL_SIZE="1024",
        CONTEXT_LENGTH="20000",
        # Memory that others use is none of these tests' business.
        GUARD_GIB="0.25",
    )
    running = Stack(engine, project, port)
    try:
        yield running
    finally:
        running.compose("--profile", "*", "down", "--volumes", "--timeout", "0", check=False)


@pytest.fixture
def stack(one_stack: Stack) -> Stack:
    """The reference platform, healthy."""
    one_stack.up()
    return one_stack


def test_health_goes_healthy(stack: Stack) -> None:
    """Compose waited for the image's own health check, which saw the engine's /health answer 200."""

    def healthy() -> bool:
        health = stack.state()["State"]["Health"]
        said = health["Log"][-1]["Output"].strip()
        return health["Status"] == "healthy" and said.startswith("healthy: ") and said.endswith("/health: 200")

    assert harness.wait_until(healthy), stack.state()["State"]["Health"]


def test_generate_answers(stack: Stack) -> None:
    """A prompt longer than a chunk gets its tokens through the published port."""
    body = {"input_ids": [7 + n % 900 for n in range(3000)], "sampling_params": {"max_new_tokens": 4, "temperature": 0}}
    answer = stack.engine.http(f"{stack.url}/generate", body)
    assert answer["meta_info"]["prompt_tokens"] == 3000
    assert answer["meta_info"]["completion_tokens"] == 4


def test_server_info_shows_dynchunk(stack: Stack) -> None:
    """The real engine's modules came out of their import with our hooks on them, and the scheduler reports DynChunk
    active, with the settings that Compose handed through.
    """
    info = stack.engine.http(f"{stack.url}/server_info")
    state = info["internal_states"][0]["dynchunk"]
    assert state["mode"] == "on"
    assert state["effective"]["budget"] == 100_000_000
    assert state["effective"]["static"] == 1024
    for hook in ("scheduler", "admission", "sizer"):
        assert state["hooks"][hook]["outcome"] == "applied"
    assert info["context_length"] == 20_000


def test_status_inside_shows_it_too(stack: Stack) -> None:
    """`dynchunk status` in the container finds the server by itself."""
    done = stack.inside("dynchunk", "status")
    assert "budget 100,000,000" in done.stdout


def test_top_inside_shows_the_server(stack: Stack) -> None:
    """`dynchunk top` works on the reference service as it is."""
    done = stack.inside("dynchunk", "top", "--once")
    assert "GiB available" in done.stdout
    assert "of 100,000,000 token^2" in done.stdout


def test_the_port_is_this_machines_only(stack: Stack) -> None:
    """Unless HOST says otherwise nobody else can reach the server."""
    (published,) = filter(None, stack.state()["NetworkSettings"]["Ports"].values())
    assert [binding["HostIp"] for binding in published] == ["127.0.0.1"]


def test_the_probe_stays_small(stack: Stack) -> None:
    """The health check's process stays under 30 MB, although the image starts DynChunk in every Python."""
    # A small parent: a child's highest memory counts from the fork, when it still is its parent.
    measure = (
        "import resource, subprocess\n"
        "done = subprocess.run(['python3', '-S', '-E', '/opt/dynchunk/launcher/health.py'])\n"
        "print(done.returncode, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024)\n"
    )
    code, peak_bytes = stack.inside("python3", "-S", "-E", "-c", measure).stdout.splitlines()[-1].split()
    assert code == "0"
    assert int(peak_bytes) < PROBE_LIMIT_BYTES


def test_the_engine_is_the_inits_child(stack: Stack) -> None:
    """No shell stands between: the init that reaps and forwards signals is the engine's parent."""
    script = "cat /proc/1/comm; ps -o ppid=,args= -C python3 | grep 'sglang.launch_server'"
    init, *engines = stack.inside("sh", "-c", script).stdout.splitlines()
    assert init in ("docker-init", "tini")
    assert [line.split()[0] for line in engines] == ["1"]


def test_no_zombies_stay(stack: Stack) -> None:
    """A process whose parent is gone does not stay defunct when it ends."""
    # `ps -p` shows a process that has ended as well, until somebody takes note of its end.
    script = (
        "orphans=$( (sleep 0.2 >/dev/null & echo $!); (sh -c 'exit 3' >/dev/null & echo $!) )\n"
        "for orphan in $orphans; do while ps -p $orphan >/dev/null; do sleep 0.1; done; echo gone; done\n"
        "while ps -e -o stat= | grep Z >/dev/null; do sleep 0.1; done; echo none\n"
    )
    done = stack.inside("timeout", str(harness.PATIENCE_S // 2), "sh", "-c", script, check=False)
    assert done.stdout.split() == ["gone", "gone", "none"]


def test_memguard_writes_a_report(stack: Stack) -> None:
    """`docker compose run --rm memguard` ramps against the server; the report in ./logs is its owner's, not root's."""
    logs = stack.project.folder / "logs"
    owner = OWNER if os.geteuid() == 0 else (os.getuid(), os.getgid())
    os.chown(logs, *owner)
    done = stack.compose("run", "--rm", "-T", "memguard", "--sizes", "2k,4k", check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (report,) = logs.glob("profile-*/REPORT.md")
    text = report.read_text(encoding="utf-8")
    assert "2,000" in text
    assert "4,000" in text
    for path in (report.parent, *report.parent.iterdir()):
        assert (path.stat().st_uid, path.stat().st_gid) == owner
    run = json.loads((report.parent / "run.json").read_text())
    assert run["chunk_source"] == "DynChunk's trace"
    assert run["locked_in_memory"]
    again = ("--append", f"logs/{report.parent.name}", "--sizes", "1k")
    done = stack.compose("run", "--rm", "-T", "memguard", *again, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (report.parent / "run-2.json").is_file()


def test_the_watch_holds_the_engine(stack: Stack) -> None:
    """`docker compose up watch`: it finds the engine in the other container, may signal it, is locked in memory, and
    ends quietly.
    """
    stack.compose("up", "--detach", "watch")

    def says(text: str) -> bool:
        return harness.wait_until(lambda: text in stack.compose("logs", "watch").stdout)

    try:
        assert says("signals to the engine: could reach the engine (process"), stack.compose("logs", "watch").stdout
        assert says("; locked in memory")
        stack.compose("stop", "--timeout", str(harness.PATIENCE_S // 2), "watch")
        assert says("ended; the guard has tripped 0 times")
    finally:
        stack.compose("rm", "--force", "--stop", "watch")


def test_wrong_settings_end_the_service(stack: Stack) -> None:
    """A wrong budget in the shell ends the container with the message and exit code 2."""
    done = stack.compose("run", "--rm", "-T", "cpu", check=False, environ={"DYNCHUNK_BUDGET": "-1"})
    assert done.returncode == 2
    assert "DYNCHUNK_BUDGET='-1': not from 1 to" in done.stderr


def test_the_gpu_service_wants_a_model(stack: Stack) -> None:
    """The default service without MODEL_PATH says so, by the image's own command."""
    done = stack.compose("run", "--rm", "-T", "server", check=False)
    assert done.returncode == 2
    assert "MODEL_PATH is not set" in done.stderr


def test_stop_lets_it_end_by_itself(stack: Stack) -> None:
    """The signal of `docker compose stop` ends the engine: there is nothing left to kill after the grace period."""
    stack.is_up = False
    stack.compose("stop", "--timeout", str(harness.PATIENCE_S // 2), "cpu")
    state = stack.state()["State"]
    assert state["Status"] == "exited"
    assert state["ExitCode"] != 137
    assert harness.wait_until(lambda: "Application shutdown complete" in stack.compose("logs", "cpu").stdout)
