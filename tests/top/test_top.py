"""`./dynchunk top` against a real HTTP server that serves what a real engine's /metrics said."""

from __future__ import annotations

import contextlib
import os
import pty
import select
import signal
import subprocess
import time
from pathlib import Path

import pytest
from pytest_httpserver import HTTPServer

from scripts.top import scrape
from tests.conftest import ROOT, clean_environ, no_dotenv

pytestmark = pytest.mark.slow

RECORDED = (Path(__file__).parent / "metrics-0.5.23.txt").read_text()
HEAD = 'model_name="m",pp_rank="0",tp_rank="0"'


def command(server: HTTPServer | None, *arguments: str, **environ: str) -> tuple[list[str], dict[str, str]]:
    port = "1" if server is None else str(server.port)
    return [str(ROOT / "dynchunk"), "top", *no_dotenv(arguments), *arguments], clean_environ(PORT=port, **environ)


def once(server: HTTPServer | None, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    argv, env = command(server, "--once", *words, **environ)
    return subprocess.run(argv, env=env, capture_output=True, text=True, check=False)


def serve(server: HTTPServer, text: str) -> None:
    server.clear()
    server.expect_request("/metrics").respond_with_data(text, content_type="text/plain")


def test_what_a_real_engine_said(httpserver: HTTPServer) -> None:
    """Progress, chunk, budget, memory and requests of the recorded moment, with the key that was asked for."""
    httpserver.expect_request("/metrics", headers={"Authorization": "Bearer k"}).respond_with_data(RECORDED)
    done = once(httpserver, API_KEY="k")
    assert done.returncode == 0, done.stderr
    [replica] = scrape.parse(RECORDED).replicas.values()
    total, finished = replica.get("dynchunk_prefill_total_tokens"), replica.get("dynchunk_prefill_done_tokens")
    assert total > finished > 0
    for shown in (
        f"{finished:,.0f} of {total:,.0f} tokens",
        f"{replica.get('dynchunk_chunk_tokens'):,.0f} tokens of",
        f"{replica.get('dynchunk_budget_utilisation'):.0%} of {replica.get('dynchunk_budget_tokens_squared'):,.0f}",
        "GiB available",
        f"{replica.get(scrape.RUNNING):,.0f} running",
        "latency model off",
    ):
        assert shown in done.stdout
    assert "not in place" not in done.stdout


def test_replicas_stages_and_broken_hooks() -> None:
    """One replica for each data-parallel rank, seen by its first pipeline stage; hooks at 0 are named."""
    text = "\n".join(
        [
            f'dynchunk_chunk_tokens{{dp_rank="{dp}",pp_rank="{pp}",tp_rank="0"}} {100 * dp + pp}'
            for dp in range(2)
            for pp in range(2)
        ]
        + [
            'dynchunk_hook_applied{hook="sizer",rank="pp0tp0"} 1',
            'dynchunk_hook_applied{hook="sizer",rank="pp0tp1"} 0',
            'sglang:num_queue_reqs{dp_rank="1",pp_rank="0",tp_rank="0",priority=""} 5',
            'sglang:num_queue_reqs{dp_rank="1",pp_rank="0",tp_rank="0",priority="3"} 4',
        ]
    )
    reading = scrape.parse(text + "\n")
    assert {dp: replica.get("dynchunk_chunk_tokens") for dp, replica in reading.replicas.items()} == {"0": 0, "1": 100}
    assert reading.replicas["1"].get(scrape.QUEUED) == 5
    assert reading.broken == ["sizer on pp0tp1"]


def test_metrics_without_their_labels() -> None:
    """Another version's, or another program's: what is known is shown."""
    reading = scrape.parse("dynchunk_model_state 1\ndynchunk_floor_chunks_total 3\ndynchunk_hook_applied 0\n")
    assert reading.replicas["0"].state == ""
    assert reading.replicas["0"].floors == {"?": 3}
    assert reading.broken == ["? on ?"]


def test_nothing_in_flight(httpserver: HTTPServer) -> None:
    """A server at rest, and one without DynChunk, are said to be so."""
    serve(httpserver, f"dynchunk_prefill_total_tokens{{{HEAD}}} 0\n")
    assert "no long prompt in flight" in once(httpserver).stdout
    serve(httpserver, f"sglang:num_running_reqs{{{HEAD}}} 2\n")
    shown = once(httpserver).stdout
    assert "the stock engine" in shown
    assert "2 running" in shown
    serve(httpserver, "")
    assert "no metrics yet" in once(httpserver).stdout


@pytest.mark.parametrize(
    ("status", "text", "said"),
    [(404, "", "--enable-metrics"), (401, "", "API_KEY"), (500, "", "500"), (200, "<html>{{{", "SGLang server")],
)
def test_servers_that_cannot_be_read(httpserver: HTTPServer, status: int, text: str, said: str) -> None:
    """Each in one line with the cure, exit code 1."""
    httpserver.expect_request("/metrics").respond_with_data(text, status=status)
    done = once(httpserver)
    assert done.returncode == 1
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_nobody_there() -> None:
    """A refused connection is one line as well."""
    done = once(None)
    assert done.returncode == 1
    assert "is the server up?" in done.stderr


@pytest.mark.parametrize("url", ["foo", "ftp://me:s3cret@h", "me:s3cret@127.0.0.1:1", "http://me:s3cret@[::"])
def test_what_is_no_address(url: str) -> None:
    """It is said so, as status does, and without a part of the password."""
    done = once(None, "--url", url)
    assert done.returncode == 1
    assert done.stderr.endswith(" is not an address like http://127.0.0.1:30000\n")
    assert "s3cret" not in done.stderr


def test_a_password_in_the_address(httpserver: HTTPServer) -> None:
    """It is sent, and shown nowhere: neither in a panel's title nor where the server does not answer."""
    done = once(None, "--url", "http://me:s3cret@127.0.0.1:1")
    assert done.stderr.startswith("dynchunk top: no answer from http://***@127.0.0.1:1: ")
    assert "s3cret" not in done.stderr
    for text, shown in (("", "no metrics yet"), ("sglang:num_running_reqs 2\n", "2 running")):
        httpserver.clear()
        httpserver.expect_request("/metrics", headers={"Authorization": "Basic bWU6czNjcmV0"}).respond_with_data(text)
        done = once(None, "--url", f"http://me:s3cret@localhost:{httpserver.port}")
        assert (done.returncode, shown in done.stdout) == (0, True), done.stderr
        assert f"http://***@localhost:{httpserver.port}" in done.stdout
        assert "s3cret" not in done.stdout


def test_live_on_a_terminal(httpserver: HTTPServer) -> None:
    """It redraws as the figures change, waits while the server does not answer, and ends with Ctrl-C."""
    serve(httpserver, f"dynchunk_chunk_tokens{{{HEAD}}} 1111\n")
    argv, env = command(httpserver, "--interval", "0.1", TERM="xterm")
    terminal, end = pty.openpty()
    with subprocess.Popen(argv, env=env, stdin=end, stdout=end, stderr=end, start_new_session=True) as process:
        os.close(end)
        try:
            read_until(terminal, "1,111")
            httpserver.clear()  # 500 from now on
            read_until(terminal, "answered 500")
            serve(httpserver, f"dynchunk_chunk_tokens{{{HEAD}}} 2222\n")
            read_until(terminal, "2,222")
            process.send_signal(signal.SIGINT)
            assert drained(terminal, process) == 0
        finally:
            process.kill()
            os.close(terminal)


def drained(terminal: int, process: subprocess.Popen[bytes], timeout_s: float = 120) -> int | None:
    """The exit code, the terminal being read all the while: a program whose output nobody takes cannot end."""
    deadline = time.monotonic() + timeout_s
    while process.poll() is None and time.monotonic() < deadline:
        if select.select([terminal], [], [], 0.2)[0]:
            with contextlib.suppress(OSError):  # the other end is closed
                os.read(terminal, 65_536)
    return process.poll()


def read_until(terminal: int, wanted: str, timeout_s: float = 120) -> None:
    seen = ""
    deadline = time.monotonic() + timeout_s
    while wanted not in seen:
        assert time.monotonic() < deadline, seen[-2000:]
        if select.select([terminal], [], [], 1)[0]:
            seen += os.read(terminal, 65_536).decode(errors="replace")
