"""The health probe: right answers, and small."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler
from http.server import HTTPServer as PlainServer
from pathlib import Path

import pytest
from pytest_httpserver import HTTPServer

from tests.conftest import ROOT, clean_environ
from tests.launcher.conftest import dynchunk

PROBE = ROOT / "launcher" / "health.py"


def probe(**environ: str) -> subprocess.CompletedProcess[str]:
    return dynchunk("health", cwd=None, env_file="", **environ)


@pytest.mark.parametrize(("status", "code"), [(200, 0), (503, 1), (500, 1)])
def test_it_says_what_the_engine_says(httpserver: HTTPServer, status: int, code: int) -> None:
    """Healthy on 200 only; an engine that is still loading answers 503."""
    httpserver.expect_request("/health").respond_with_data("", status=status)
    done = probe(HOST="0.0.0.0", PORT=str(httpserver.port))
    assert done.returncode == code
    assert str(status) in done.stdout


def test_nobody_there() -> None:
    """A refused connection is unhealthy, in one line."""
    done = probe(PORT="1")
    assert done.returncode == 1
    assert done.stdout.count("\n") == 1
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"PORT": "http"}, "PORT='http': not a number; accepted: a port, 1 to 65,535"),
        ({"PORT": "9" * 5000}, "PORT='9"),
        ({"NODE_RANK": "head"}, "NODE_RANK='head': not a number"),
        ({"HOST": "a" * 5000}, "HOST='aaa"),
        ({"HOST": "a..b"}, "HOST='a..b': not a host's name or address"),
        ({"HOST": "http://a"}, "HOST='http://a': not a host's name"),
        ({"HOST": "\u2603"}, "HOST='\u2603': not a host's name"),
        ({"HOST": "a" * 64}, "http://aaaa"),
        ({"HOST": "1::2::3"}, "HOST='1::2::3': "),
    ],
    ids=repr,
)
def test_settings_it_cannot_read(environ: dict[str, str], said: str) -> None:
    """A probe that crashes would look like an unhealthy engine without a reason: one line of a sensible length."""
    done = probe(**environ)
    assert done.returncode == 1
    assert done.stdout.startswith("unhealthy: " + said)
    assert (done.stdout.count("\n"), done.stderr) == (1, "")
    assert len(done.stdout) < 400


def test_it_reads_a_port_as_serve_does() -> None:
    """30K is 30000 here too."""
    assert "http://127.0.0.1:30000/health" in probe(PORT="30K").stdout


@pytest.mark.skipif(not socket.has_ipv6 or not Path("/proc/net/if_inet6").exists(), reason="no IPv6 here")
@pytest.mark.parametrize("host", ["::", "::1", "[::1]"])
def test_ipv6(host: str) -> None:
    """A server that listens on IPv6 is found, and named as a URL names it."""

    class Fine(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    class SixServer(PlainServer):
        address_family = socket.AF_INET6

    with SixServer(("::1", 0), Fine) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        done = probe(HOST=host, PORT=str(server.server_port))
        thread.join()
    assert (done.returncode, done.stdout) == (0, f"healthy: http://[::1]:{server.server_port}/health: 200\n")


def engine(tmp_path: Path) -> subprocess.Popen[bytes]:
    """A process that looks like one of the engine's, until it is written to."""
    name = f"sglang::stands_for_a_scheduler_{tmp_path.name}"
    return subprocess.Popen([sys.executable, "-c", "input()", name], stdin=subprocess.PIPE)


def test_on_other_hosts_it_looks_for_the_process(tmp_path: Path) -> None:
    """Hosts other than the head serve no HTTP: healthy while an engine process lives."""
    with engine(tmp_path) as process:
        done = probe(NODE_RANK="1")
        assert done.returncode == 0, done.stdout
        process.communicate(b"\n")


def test_a_zombie_is_no_engine(tmp_path: Path) -> None:
    """An engine that has ended and that nobody waited for has a process id, and serves nothing."""
    process = engine(tmp_path)
    assert process.stdin is not None
    process.stdin.write(b"\n")
    process.stdin.close()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it has ended; it stays a zombie
    state = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]
    done = probe(NODE_RANK="1")
    process.wait()
    assert state == "Z"
    assert f"engine process {process.pid}" not in done.stdout
    assert done.returncode == 1 or "engine process" in done.stdout  # another test's engine may live beside this one


def test_it_stays_small(httpserver: HTTPServer) -> None:
    """Under 30 MB at its peak, with neither the start hook nor torch, the engine or the settings in it."""
    httpserver.expect_request("/health").respond_with_data("")
    code = (
        "import runpy, sys\n"
        "try: runpy.run_path(sys.argv[1], run_name='__main__')\n"
        "except SystemExit as e: print(e.code)\n"
        # Not ru_maxrss: a child inherits the peak of the process that started it.
        "print([l.split()[1] for l in open('/proc/self/status') if l.startswith('VmHWM')][0])\n"
        "print([m for m in sys.modules if m.partition('.')[0] in "
        "('torch', 'sglang', 'dynchunk', 'sitecustomize', 'dataclasses')])"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-E", "-c", code, PROBE],
        env=clean_environ(PORT=str(httpserver.port), PYTHONPATH=str(ROOT / "adapter" / "boot")),
        capture_output=True,
        text=True,
        check=True,
    )
    _, exit_code, peak_kib, loaded = done.stdout.splitlines()
    assert exit_code == "0"
    assert int(peak_kib) * 1024 < 30_000_000
    assert loaded == "[]"
