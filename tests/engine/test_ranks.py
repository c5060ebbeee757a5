"""Ranks on two hosts (here two engines on loopback): they serve together, or none of them starts."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from scripts import reference
from tests.engine import traffic
from tests.engine.traffic import Ask

pytestmark = pytest.mark.engine

BUDGET = 8_000_000


@contextmanager
def two_hosts(folder: Path, *environs: dict[str, str]) -> Iterator[list[reference.Server]]:
    """Two engines, `--nnodes 2`, one rank each, with an environment of their own; not waited for."""
    meeting = reference.free_port()
    model = reference.make_model()
    with ExitStack() as stack:
        servers = []
        for number, environ in enumerate(environs):
            home = folder / f"host{number}"
            home.mkdir()
            port = reference.free_port()
            command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model), "--port", str(port)]
            nodes = ["--tp", "2", "--nnodes", "2", "--node-rank", str(number)]
            path = f"{reference.BOOT}:{reference.PLUGIN}"
            trace = home / "trace.jsonl"
            settings = reference.outer_environ() | reference.platform_environ() | {"PYTHONPATH": path} | environ
            log = (home / "server.log").open("wb")
            process = subprocess.Popen(
                [*command, *reference.FLAGS, *nodes, "--dist-init-addr", f"127.0.0.1:{meeting}"],
                env=settings | {"DYNCHUNK_TRACE": str(trace)},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            log.close()
            stack.callback(reference.stop, process)
            server = reference.Server(f"http://127.0.0.1:{port}", process, home / "server.log", trace)
            stack.callback(server.client.close)
            servers.append(server)
        yield servers


def test_two_hosts_serve_together(tmp_path: Path) -> None:
    """With the same settings on both hosts a long prompt is served, and both ran the same batches."""
    same = {"DYNCHUNK_BUDGET": str(BUDGET), "SGLANG_ENABLE_RANK_CONSENSUS_CHECKER": "1"}
    with two_hosts(tmp_path, same, same) as (head, other):
        reference.wait_until_healthy(head)
        ask = Ask.of("r", 12_000, 1)
        made = {"r": traffic.answer(head, ask)}
        batches = head.batches()
        traffic.assert_every_batch_keeps_the_budget(batches, BUDGET, 256)
        traffic.assert_chunks_follow_each_other(batches, made)
        # On the other host the first rank is not the entry rank, so its trace says which it is.
        [ranks_trace] = other.trace.parent.glob("trace.jsonl.*")
        assert [b["reqs"] for b in head.batches(ranks_trace)] == [b["reqs"] for b in batches]
        assert "2 ranks run under the same settings" in str(head.state()["hooks"]["agreement"])


def test_different_settings_stop_every_rank(tmp_path: Path) -> None:
    """Two hosts with different .env files: both end within 10 s of each other, naming rank, knob and values."""
    with two_hosts(tmp_path, {"DYNCHUNK_BUDGET": "8M"}, {"DYNCHUNK_BUDGET": "9M"}) as servers:
        deadline = time.monotonic() + reference.START_TIMEOUT_S
        said_at: dict[int, float] = {}
        while len(said_at) < 2:
            assert time.monotonic() < deadline, "no rank refused"
            for number, server in enumerate(servers):
                if number not in said_at and "refuses to start" in server.log.read_text():
                    said_at[number] = time.monotonic()
            time.sleep(0.1)
        assert abs(said_at[0] - said_at[1]) < 10
        for server in servers:
            server.process.wait(timeout=60)
            said = re.sub(r"\s+", " ", server.log.read_text())
            assert "DYNCHUNK_BUDGET: 8000000 on rank 0 (pp0tp0), 9000000 on rank 1 (pp0tp1)" in said


FAULTS = Path(__file__).parent / "faults"
BROKEN = {"DYNCHUNK_BUDGET": str(BUDGET), "SGLANG_ENABLE_RANK_CONSENSUS_CHECKER": "1"}


@pytest.mark.parametrize("layout", ["--tp", "--pp-size"])
def test_a_fault_in_a_decision_makes_every_rank_fall_back_alike(tmp_path: Path, layout: str) -> None:
    """An exception in our arithmetic: the engine's own sizes from that chunk on, on all ranks, and nobody is lost."""
    with reference.serving(tmp_path, layout, "2", engine_path=(FAULTS,), FAULT="decision", **BROKEN) as server:
        made = {"long": traffic.answer(server, Ask.of("long", 16_000, 1))}
        made |= traffic.answer_all(server, [Ask.of("next", 9_000, 2), Ask.of("short", 300, 3)])
        batches = server.batches()
        traffic.assert_chunks_follow_each_other(batches, made)
        assert max(tokens for _, tokens in server.chunks("next")[1:]) > BUDGET // 4096, "still cut to the budget"
        assert server.state()["degraded"]
        assert server.log.read_text().count("the engine's own chunk sizes count from now on") == 2, "not once a rank"
        [ranks_trace] = tmp_path.glob("trace.jsonl.*")
        assert [b["reqs"] for b in server.batches(ranks_trace)] == [b["reqs"] for b in batches]


def test_a_fault_beside_the_decisions_changes_none(tmp_path: Path) -> None:
    """An exception while one rank writes its trace: that hook takes itself out, the budget and the answers stand."""
    with reference.serving(tmp_path, "--tp", "2", engine_path=(FAULTS,), FAULT="forward", **BROKEN) as server:
        made = {"long": traffic.answer(server, Ask.of("long", 16_000, 1))}
        batches = server.batches()
        traffic.assert_every_batch_keeps_the_budget(batches, BUDGET, 256)
        traffic.assert_chunks_follow_each_other(batches, made)
        assert not server.state()["degraded"]
        assert server.log.read_text().count("broken by the test") == 1
        [ranks_trace] = tmp_path.glob("trace.jsonl.*")
        assert len(server.batches(ranks_trace)) == 4
