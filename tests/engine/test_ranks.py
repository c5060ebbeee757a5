"""Ranks on two hosts (here two engines on loopback): they serve together, or none of them starts. And ranks of one host
when one of our parts breaks.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from scripts import reference
from tests.engine import asks, traffic, warm
from tests.engine.asks import BUDGET, LONG
from tests.engine.traffic import Ask
from tests.engine.warm import serving

pytestmark = pytest.mark.engine

ENVIRON = {"DYNCHUNK_BUDGET": str(BUDGET), "SGLANG_ENABLE_RANK_CONSENSUS_CHECKER": "1"}
FAULTS = Path(__file__).parent / "faults"


def two_hosts(folder: Path, *environs: dict[str, str]) -> list[reference.Start]:
    """Two engines, `--nnodes 2`, one rank each, with an environment of their own."""
    nodes = ("--tp", "2", "--nnodes", "2", "--dist-init-addr", f"127.0.0.1:{reference.free_port()}", "--node-rank")
    return [
        reference.engine(folder / f"host{number}", *asks.STATIC, *nodes, str(number), **environ)
        for number, environ in enumerate(environs)
    ]


@contextmanager
def started(hosts: list[reference.Start]) -> Iterator[list[reference.Server]]:
    """Each of them started; not waited for."""
    with ExitStack() as stack:
        servers = []
        for command, environ, log, trace, port in hosts:
            trace.unlink(missing_ok=True)
            with log.open("wb") as output:
                process = warm.start(command, env=environ, cwd=reference.ROOT, stdout=output)
            stack.callback(warm.kill, process)
            server = reference.Server(f"http://127.0.0.1:{port}", process, log, trace)
            stack.callback(server.client.close)
            servers.append(server)
        yield servers


@pytest.mark.xdist_group("two hosts")
def test_two_hosts_serve_together(tmp_path: Path) -> None:
    """With the same settings on both hosts a long prompt is served, and both ran the same batches.

    Where one dies in a prefill the other ends, and both serve after a restart at the same addresses.
    """
    hosts = two_hosts(tmp_path, ENVIRON, ENVIRON)
    with started(hosts) as (head, other):
        reference.wait_until_healthy(head)
        made = {"long": traffic.answer(head, LONG)}
        batches = head.batches()
        traffic.assert_every_batch_keeps_the_budget(batches, BUDGET, 256)
        traffic.assert_chunks_follow_each_other(batches, made)
        # On the other host the first rank is not the entry rank, so its trace says which it is.
        [ranks_trace] = traffic.ranks_traces(other)
        traffic.wait_until(lambda: [b["reqs"] for b in head.batches(ranks_trace)] == [b["reqs"] for b in batches])
        assert "2 ranks run under the same settings" in str(head.state()["hooks"]["agreement"])
        failures: list[Exception] = []

        def long_prompt() -> None:
            try:
                head.generate(traffic.prompt(60_000, 4), rid="dies")
            except httpx.HTTPError as error:
                failures.append(error)

        client = threading.Thread(target=long_prompt)
        client.start()
        traffic.wait_until(lambda: len(head.chunks("dies")) >= 3)
        warm.kill(other.process)
        assert head.process.wait(timeout=reference.START_TIMEOUT_S) != 0
        client.join()
        assert len(failures) == 1, "the client was not told"
    with started(hosts) as (head, _):
        reference.wait_until_healthy(head)
        traffic.assert_same(traffic.answer(head, LONG), made["long"])


@pytest.mark.xdist_group("two hosts")
def test_different_settings_stop_every_rank(tmp_path: Path) -> None:
    """Two hosts with different .env files: both end by themselves, naming rank, knob and values."""
    with started(two_hosts(tmp_path, {"DYNCHUNK_BUDGET": "8M"}, {"DYNCHUNK_BUDGET": "9M"})) as servers:
        for server in servers:
            server.process.wait(timeout=reference.START_TIMEOUT_S)
            said = re.sub(r"\s+", " ", server.log.read_text())
            assert "refuses to start" in said
            assert "DYNCHUNK_BUDGET: 8000000 on rank 0 (pp0tp0), 9000000 on rank 1 (pp0tp1)" in said


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param("--tp", marks=pytest.mark.xdist_group("broken tp")),
        pytest.param("--pp-size", marks=pytest.mark.xdist_group("broken pp")),
    ],
)
def test_a_fault_in_a_decision_makes_every_rank_fall_back_alike(tmp_path: Path, layout: str) -> None:
    """An exception in our arithmetic: the engine's own sizes from that chunk on, on all ranks, and nobody is lost."""
    flags = (*asks.STATIC, layout, "2")
    with serving(tmp_path, *flags, engine_path=(FAULTS,), FAULT="decision", **ENVIRON) as server:
        made = {"long": traffic.answer(server, LONG)}
        made |= traffic.answer_all(server, [Ask.of("next", 6_000, 2), Ask.of("short", 300, 3)])
        batches = server.batches()
        traffic.assert_chunks_follow_each_other(batches, made)
        assert max(tokens for prefix, tokens in server.chunks("next") if prefix > 4_000) > BUDGET // 4_000, "still cut"
        assert server.state()["degraded"]
        said = "the engine's own chunk sizes count from now on"
        traffic.wait_until(lambda: server.log.read_text().count(said) >= 2)
        assert server.log.read_text().count(said) == 2, "not once a rank"
        traffic.assert_ranks_agree(server)
