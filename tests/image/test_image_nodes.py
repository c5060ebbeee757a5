"""Two hosts that serve one model, as two containers on loopback: one is killed in the middle of a prefill."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts import reference
from tests.image import harness
from tests.image.conftest import NAME

pytestmark = [pytest.mark.image, pytest.mark.xdist_group("docker"), pytest.mark.timeout(2400)]

FILES = (
    "compose.yaml",
    "compose.node.yaml",
    *(str(harness.HERE / f"compose.{name}.yaml") for name in ("test", "nodes")),
)
# What the engine says when it ends because of its watchdog, and not because it has noticed by itself.
WATCHDOG_SAYS = "watchdog timeout"
# Far from its end, on any machine, when the first chunks of it have been seen.
PROMPT = [10 + n % 89 for n in range(120_000)]


class Hosts:
    """The containers of both hosts, each a Compose project of its own, as on machines of their own."""

    def __init__(self, engine: harness.Engine, projects: list[harness.Project], url: str) -> None:
        self.engine = engine
        self.projects = projects
        self.url = url

    def compose(self, host: int, *arguments: str, check: bool = True) -> harness.Finished:
        return self.projects[host].compose(*arguments, files=FILES, check=check)

    def up(self, host: int) -> None:
        self.compose(host, "up", "--detach", "server")

    def wait_until_serving(self) -> None:
        def serving() -> bool:
            states = self.states()
            assert "exited" not in states, self.logs()
            return set(states) == {"healthy"}

        assert harness.wait_until(serving, every_s=1), self.logs()

    def states(self) -> list[str]:
        """Of each host: `healthy` or another state of health while it runs, else `exited`."""
        form = "{{if .State.Running}}{{.State.Health.Status}}{{else}}exited{{end}}"
        names = [self.container(host) for host in range(len(self.projects))]
        return self.engine.run("inspect", "--format", form, *names).stdout.split()

    def container(self, host: int) -> str:
        return f"{self.projects[host].environ['COMPOSE_PROJECT_NAME']}-server-1"

    def log(self, host: int) -> str:
        done = self.engine.run("logs", self.container(host))
        return done.stdout + done.stderr

    def logs(self) -> str:
        """The end of each host's log."""
        return "\n".join(self.log(host)[-4000:] for host in range(len(self.projects)))

    def ask(self, prompt: list[int], tokens: int) -> int:
        """Tokens of an answer."""
        sampling = {"max_new_tokens": tokens, "temperature": 0}
        answer = self.engine.http(f"{self.url}/generate", {"input_ids": prompt, "sampling_params": sampling})
        return int(answer["meta_info"]["completion_tokens"])


@pytest.fixture
def hosts(engine: harness.Engine, image: str, files: Path, programs: Path) -> Iterator[Hosts]:
    """Both hosts, serving."""
    port = engine.port(20_000)
    shared = {
        "NNODES": "2",
        "TP_SIZE": "2",
        "DIST_INIT_ADDR": f"127.0.0.1:{engine.port(21_000)}",
        "CHUNKED_PREFILL_SIZE": "256",
        "CONTEXT_LENGTH": "131072",
        "TEST_IMAGE": image,
        "TEST_ENVIRONMENT": sys.prefix,
        "TEST_MODEL": str(reference.make_model()),
    }
    projects = []
    for rank in range(2):
        own = {"COMPOSE_PROJECT_NAME": f"{NAME}-node{rank}", "NODE_RANK": str(rank)}
        # Hosts of their own could listen on the same port.
        own["PORT"] = str(port + rank)
        projects.append(harness.Project(files, programs / "docker-compose", engine, **shared, **own))
    both = Hosts(engine, projects, f"http://127.0.0.1:{port}")
    try:
        for rank in range(2):
            both.up(rank)
        both.wait_until_serving()
        yield both
    finally:
        for rank in range(2):
            both.compose(rank, "down", "--volumes", "--timeout", "0", check=False)


def test_a_host_that_dies_in_a_prefill_is_reported(hosts: Hosts) -> None:
    """The other host ends with an error before its watchdog does, and its client is told.

    That both serve after a restart is in tests/engine/test_ranks.py, where they start in a fifth of the time.
    """
    assert hosts.ask(PROMPT[:2000], 4) == 4
    assert harness.wait_until(lambda: "2 ranks run under the same settings" in hosts.log(0))
    failures: list[BaseException] = []

    def long_prompt() -> None:
        try:
            hosts.ask(PROMPT, 1)
        except AssertionError as error:
            failures.append(error)

    client = threading.Thread(target=long_prompt)
    before = hosts.log(0).count("Prefill batch")
    client.start()
    # More than the first prompt can have added late.
    assert harness.wait_until(lambda: hosts.log(0).count("Prefill batch") >= before + 12), hosts.log(0)[-3000:]
    hosts.compose(1, "kill", "server")
    assert harness.wait_until(lambda: hosts.states()[0] == "exited"), "the other host has not noticed"
    # A read or a write that failed, reset or closed: it depends on how much of what was sent had been read.
    error = re.compile(r"RuntimeError: \[\S*gloo/transport/tcp/pair\.cc")
    assert harness.wait_until(lambda: error.search(hosts.log(0))), hosts.log(0)[-5000:]
    assert WATCHDOG_SAYS not in hosts.log(0)
    client.join(harness.PATIENCE_S)
    assert len(failures) == 1, "the client was not told"
