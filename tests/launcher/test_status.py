"""`status` and `budget`: what the server reports, or why it could not be asked."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pytest_httpserver import HTTPServer

from launcher import status as reporting
from tests.launcher.conftest import dynchunk, within

STATE = {
    "version": "0.1.0",
    "engine": "0.5.23",
    "mode": "on",
    "pid": 7,
    "rank": "pp0tp0",
    "hooks": {
        "sizer": {"outcome": "applied", "detail": "d" * 300},
        "[/red]": {"outcome": "[bold]no", "detail": "\x1b[2J"},
    },
    "effective": {"summary": "budget 200,000,000 token^2", "budget": 200_000_000},
    "budget_in_force": 200_000_000,
    "empty_cache": {"calls": 3, "ms": 12.5},
}


def status(server: HTTPServer, **environ: str) -> subprocess.CompletedProcess[str]:
    return within("status", **{"HOST": "0.0.0.0", "PORT": str(server.port)} | environ)


def test_the_command_itself(httpserver: HTTPServer) -> None:
    """As it is called: the address and the key out of the environment."""
    httpserver.expect_request("/server_info", headers={"Authorization": "Bearer k"}).respond_with_json(
        {"internal_states": [{"dynchunk": STATE}]}
    )
    done = dynchunk("status", PORT=str(httpserver.port), API_KEY="k")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("DynChunk 0.1.0, mode on, sglang 0.5.23, rank pp0tp0, pid 7\n")


def test_an_active_server(httpserver: HTTPServer) -> None:
    """Hooks, the rule in force and the releases are shown; the key is sent."""
    httpserver.expect_request("/server_info", headers={"Authorization": "Bearer k"}).respond_with_json(
        {"internal_states": [{"dynchunk": STATE}]}
    )
    done = status(httpserver, API_KEY=" k ")
    assert done.returncode == 0, done.stderr
    for shown in ("0.5.23", "sizer", "applied", "budget 200,000,000 token^2", "released 3 times"):
        assert shown in done.stdout
    assert "changed since the start" not in done.stdout


def test_everything_is_shown_as_it_is(httpserver: HTTPServer) -> None:
    """In a pipe nothing is cut; what looks like markup stays, and what steers a terminal is written out."""
    httpserver.expect_request("/server_info").respond_with_json({"internal_states": [{"dynchunk": STATE}]})
    lines = [line.split() for line in status(httpserver).stdout.splitlines()]
    assert ["sizer", "applied", "d" * 300] in lines
    assert ["[/red]", "[bold]no", "\\x1b[2J"] in lines


def test_a_budget_that_was_changed_is_said(httpserver: HTTPServer) -> None:
    """The summary is of the start; what is in force now is what counts."""
    state = STATE | {"budget_in_force": 150_000_000}
    httpserver.expect_request("/server_info").respond_with_json({"internal_states": [{"dynchunk": state}]})
    assert "150,000,000 token^2 are in force" in status(httpserver).stdout


@pytest.mark.parametrize(
    "answer",
    [
        {"internal_states": [{}]},
        {"internal_states": None},
        {"internal_states": [None, 3, {"dynchunk": None}]},
        {"internal_states": {"dynchunk": STATE}},
        {},
    ],
)
def test_a_stock_server(httpserver: HTTPServer, answer: dict[str, Any]) -> None:
    """A server without DynChunk is said to be one, with exit code 1."""
    httpserver.expect_request("/server_info").respond_with_json(answer)
    done = status(httpserver)
    assert (done.returncode, done.stderr) == (1, "")
    assert "not active" in done.stdout


def test_another_version_of_dynchunk(httpserver: HTTPServer) -> None:
    """What a server does not report is a question mark, not a traceback."""
    httpserver.expect_request("/server_info").respond_with_json({"internal_states": [{"dynchunk": {"mode": "on"}}]})
    done = status(httpserver)
    assert (done.returncode, done.stderr) == (0, "")
    assert "DynChunk ?, mode on" in done.stdout


@pytest.mark.parametrize(
    ("released", "said"),
    [
        ({"calls": 3}, "released 3 times, ? ms in all"),
        ({"calls": None, "ms": None}, "released ? times, ? ms in all"),
        ({"calls": 3, "ms": "12"}, "released 3 times, ? ms in all"),
        ({"calls": 3, "ms": 10**400}, "released 3 times, ? ms in all"),
        ({"calls": 3, "ms": 1250.4}, "released 3 times, 1,250 ms in all"),
    ],
)
def test_releases_of_another_version(httpserver: HTTPServer, released: dict[str, Any], said: str) -> None:
    """What is no time is a question mark as well."""
    answer = {"internal_states": [{"dynchunk": STATE | {"empty_cache": released}}]}
    httpserver.expect_request("/server_info").respond_with_json(answer)
    done = status(httpserver)
    assert (done.returncode, done.stderr) == (0, "")
    assert said in done.stdout


@pytest.mark.parametrize("code", [401, 403])
def test_a_wrong_key(httpserver: HTTPServer, code: int) -> None:
    """Named for what it is."""
    httpserver.expect_request("/server_info").respond_with_data("", status=code)
    done = status(httpserver)
    assert done.returncode == 1
    assert "API_KEY" in done.stderr


@pytest.mark.parametrize("answer", ["hello", b"\xff\xfe", "[]", "null", "3"], ids=repr)
def test_something_else_on_the_port(httpserver: HTTPServer, answer: str | bytes) -> None:
    """A server that is not SGLang is said to be none, in one line."""
    httpserver.expect_request("/server_info").respond_with_data(answer)
    httpserver.expect_request("/set_internal_state").respond_with_data(answer)
    for command in (["status"], ["budget", "1e8"]):
        done = within(*command, PORT=str(httpserver.port))
        assert done.returncode == 1
        assert done.stderr.count("\n") <= 1
        assert "is this an SGLang server?" in done.stderr or answer == "[]"


def test_the_budget_is_changed(httpserver: HTTPServer) -> None:
    """`budget 1.5e8` sends the number to all ranks' stream; a server that refuses is said to."""
    httpserver.expect_ordered_request(
        "/set_internal_state", method="POST", json={"server_args": {"dynchunk_budget": 150_000_000}}
    ).respond_with_json([True])
    httpserver.expect_ordered_request("/set_internal_state").respond_with_json([True, False])
    httpserver.expect_ordered_request("/set_internal_state").respond_with_json([])
    port = str(httpserver.port)
    assert "150,000,000" in within("budget", "1.5e8", PORT=port).stdout
    assert within("budget", "1.5e8", PORT=port).returncode == 1
    assert within("budget", "1.5e8", PORT=port).returncode == 1


@pytest.mark.parametrize("text", ["lots", "", "  ", "0", "nan", "1e99"])
def test_a_budget_that_is_none_is_not_sent(httpserver: HTTPServer, text: str) -> None:
    """An empty one is not the default either."""
    done = within("budget", text, PORT=str(httpserver.port))
    assert done.returncode == 1
    assert f"{text!r}: " in done.stderr
    assert "accepted: token" in done.stderr
    assert httpserver.log == []


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"PORT": "http"}, "PORT='http': not a number"),
        ({"PORT": "65536"}, "PORT='65536': not from 1 to 65,535"),
        ({"HOST": "http://h"}, "HOST='http://h': not a host's name"),
        ({"HOST": "a" * 5000}, "longer than the 253"),
        ({"API_KEY": "schl\u00fcssel"}, "API_KEY=***: it is sent in an HTTP header"),
    ],
)
@pytest.mark.parametrize("command", [["status"], ["budget", "1e8"]])
def test_settings_that_are_wrong(command: list[str], environ: dict[str, str], said: str) -> None:
    """One line, no traceback, and no key in it."""
    done = within(*command, **environ)
    assert done.returncode == 1
    assert done.stderr.startswith(f"dynchunk {command[0]}: ")
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
    assert "schl" not in done.stderr


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "http://me:s3cret@127.0.0.1:1"])
def test_an_address_that_does_not_answer(url: str) -> None:
    """One line, without the name and password in it."""
    done = within("status", "--url", url)
    assert done.returncode == 1
    assert done.stderr.startswith("dynchunk status: no answer from http://")
    assert (done.stderr.count("\n"), len(done.stderr) < 400) == (1, True)
    assert "s3cret" not in done.stderr


@pytest.mark.parametrize(
    "url",
    [
        *(
            "http://me:s3/cret@127.0.0.1:1",
            "http://s3cret@[::",
            "s3cret@127.0.0.1:1",
            "me:s3/cret@host",
            "ftp://s3cret@h",
        ),
        *("http://[::", "foo", "http://127.0.0.1:x", "http://\u2603..x:1", "http://a\nb", "http://" + "a" * 300),
    ],
)
def test_what_is_no_address(url: str) -> None:
    """One line, and of a URL with a password in it not even a part of that."""
    done = within("status", "--url", url)
    assert done.returncode == 1
    assert done.stderr.endswith(" is not an address like http://127.0.0.1:30000\n")
    assert done.stderr.count("\n") == 1
    assert "s3" not in done.stderr
    assert "cret" not in done.stderr


@pytest.fixture
def proxy() -> Iterator[str]:
    """A port that a proxy might be at, where nobody answers."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"


@pytest.mark.parametrize("url", ["", "http://127.0.0.1:{}", "http://localhost:{}"])
def test_no_proxy_stands_before_a_server_here(httpserver: HTTPServer, proxy: str, url: str) -> None:
    """HOST and PORT, and loopback addresses, are asked directly, whatever http_proxy says."""
    httpserver.expect_request("/server_info").respond_with_json({"internal_states": [{"dynchunk": STATE}]})
    given = ["--url", url.format(httpserver.port)] if url else []
    done = within("status", *given, PORT=str(httpserver.port), http_proxy=proxy, HTTP_PROXY=proxy, ALL_PROXY=proxy)
    assert done.returncode == 0, done.stderr


def test_a_proxy_is_asked_for_a_server_elsewhere(httpserver: HTTPServer) -> None:
    """There it may be the only way."""
    httpserver.expect_request("/server_info").respond_with_json({"internal_states": [{"dynchunk": STATE}]})
    proxy = f"http://127.0.0.1:{httpserver.port}"
    done = within("status", "--url", "http://head.example", http_proxy=proxy)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("host", "near"),
    [
        *((host, True) for host in ("127.0.0.1", "127.1.2.3", "::1", "localhost", "a.localhost")),
        *((host, False) for host in ("10.0.0.1", "head", "localhost.example", "")),
    ],
)
def test_loopback(host: str, near: bool) -> None:
    """By address or by name."""
    assert reporting.is_loopback(host) is near


def test_ipv6(tmp_path: Path) -> None:
    """HOST=:: is asked at [::1]."""
    done = within("status", HOST="::", PORT="1")
    assert "no answer from http://[::1]:1: " in done.stderr


def test_settings_in_a_file(httpserver: HTTPServer, tmp_path: Path) -> None:
    """The server's address and key are in .env as for serve."""
    httpserver.expect_request("/server_info", headers={"Authorization": "Bearer k"}).respond_with_json(
        {"internal_states": [{"dynchunk": STATE}]}
    )
    (tmp_path / "env").write_text(f"export PORT={httpserver.port} # here\nAPI_KEY='k'\n")
    assert within("status", env_file=str(tmp_path / "env")).returncode == 0
