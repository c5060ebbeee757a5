"""`status`: what the server reports, or why it could not be asked."""

from __future__ import annotations

import subprocess

from pytest_httpserver import HTTPServer

from tests.conftest import ROOT, clean_environ

STATE = {
    "version": "0.1.0",
    "engine": "0.5.23",
    "mode": "on",
    "pid": 7,
    "rank": "pp0tp0",
    "hooks": {"sizer": {"outcome": "applied", "detail": ""}},
    "effective": {"summary": "budget 200,000,000 token^2"},
    "empty_cache": {"calls": 3, "ms": 12.5},
}


def status(server: HTTPServer, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [ROOT / "dynchunk", "status"],
        env=clean_environ(HOST="0.0.0.0", PORT=str(server.port), **environ),
        capture_output=True,
        text=True,
        check=False,
    )


def test_an_active_server(httpserver: HTTPServer) -> None:
    """Hooks, the rule in force and the releases are shown; the key is sent."""
    httpserver.expect_request("/server_info", headers={"Authorization": "Bearer k"}).respond_with_json(
        {"internal_states": [{"dynchunk": STATE}]}
    )
    done = status(httpserver, API_KEY="k")
    assert done.returncode == 0, done.stderr
    for shown in ("0.5.23", "sizer", "applied", "budget 200,000,000 token^2", "released 3 times"):
        assert shown in done.stdout


def test_a_stock_server(httpserver: HTTPServer) -> None:
    """A server without DynChunk is said to be one, with exit code 1."""
    httpserver.expect_request("/server_info").respond_with_json({"internal_states": [{}]})
    done = status(httpserver)
    assert done.returncode == 1
    assert "not active" in done.stdout


def test_a_wrong_key(httpserver: HTTPServer) -> None:
    """401 is named for what it is."""
    httpserver.expect_request("/server_info").respond_with_data("", status=401)
    done = status(httpserver)
    assert done.returncode == 1
    assert "API_KEY" in done.stderr


def test_the_budget_is_changed(httpserver: HTTPServer) -> None:
    """`budget 1.5e8` sends the number to all ranks' stream; a server that refuses is said to; nonsense is not sent."""
    httpserver.expect_ordered_request(
        "/set_internal_state", method="POST", json={"server_args": {"dynchunk_budget": 150_000_000}}
    ).respond_with_json([True])
    httpserver.expect_ordered_request("/set_internal_state").respond_with_json([False])

    def budget(text: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [ROOT / "dynchunk", "budget", text],
            env=clean_environ(PORT=str(httpserver.port)),
            capture_output=True,
            text=True,
            check=False,
        )

    assert "150,000,000" in budget("1.5e8").stdout
    assert budget("1.5e8").returncode == 1
    nonsense = budget("lots")
    assert nonsense.returncode == 1
    assert "not a number" in nonsense.stderr


def test_something_else_on_the_port(httpserver: HTTPServer) -> None:
    """A server that is not SGLang does not produce a traceback."""
    httpserver.expect_request("/server_info").respond_with_data("hello")
    done = status(httpserver)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
