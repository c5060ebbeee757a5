"""HOST, PORT, NODE_RANK and API_KEY: one reading for serve, status, budget, memguard and the health probe."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from dynchunk.settings import SettingsError
from launcher import address, environment

PORTS = [
    "30000",
    "1",
    "65535",
    "30K",
    "3e4",
    "30_000",
    " 8080 ",
    "+5",
    "08",
    "",
    "0",
    "65536",
    "-1",
    "x",
    "1.5",
    "٣",
    "9" * 400,
]
HOSTS = ["a.b", "10.0.0.1", "::1", "[::1]", "fe80::1%eth0", "my_host-1", "a.b.", "a b", "http://a", "a:1", "a/b", "-a"]
HOSTS += ["a..b", "", "a" * 254, "ü", "1::2::3", "[a]", "a%b", "@", "a\nb"]


def read_by_serve(name: str, text: str) -> object:
    """The value as `serve` reads it, or None where it refuses it."""
    try:
        launch, _ = environment.read({"MODEL_PATH": "/m", "NNODES": "4096", "DIST_INIT_ADDR": "a:1", name: text})
    except SettingsError:
        return None
    found: object = getattr(launch, name.lower())
    return found


def outcome(read: Callable[[Mapping[str, str]], object], name: str, text: str) -> object:
    """What a reader makes of a value: None where it refuses it, in a sentence that names the variable."""
    try:
        return read({name: text})
    except ValueError as error:
        message = str(error)
    assert message.startswith(f"{name}=")
    assert len(message) < 400
    return None


@pytest.mark.parametrize("text", PORTS, ids=lambda text: ascii(text)[:20])
@pytest.mark.parametrize(("name", "read"), [("PORT", address.port), ("NODE_RANK", address.node_rank)])
def test_a_number_is_read_as_serve_reads_it(name: str, read: Callable[[Mapping[str, str]], int], text: str) -> None:
    """Whatever spelling serve takes, everybody takes, for the same number; what serve refuses, everybody refuses."""
    assert outcome(read, name, text) == read_by_serve(name, text)


@pytest.mark.parametrize("text", HOSTS, ids=lambda text: ascii(text)[:20])
def test_a_host_is_read_as_serve_reads_it(text: str) -> None:
    """The same for HOST."""
    assert outcome(address.host, "HOST", text) == read_by_serve("HOST", text)


@pytest.mark.parametrize(
    ("environ", "url"),
    [
        ({}, "http://127.0.0.1:30000"),
        ({"HOST": "0.0.0.0", "PORT": "30K"}, "http://127.0.0.1:30000"),
        ({"HOST": "::", "PORT": "1"}, "http://[::1]:1"),
        ({"HOST": "[::]"}, "http://[::1]:30000"),
        ({"HOST": "fe80::1%eth0"}, "http://[fe80::1%25eth0]:30000"),
        ({"HOST": " head.local ", "PORT": " 8080 "}, "http://head.local:8080"),
    ],
)
def test_the_servers_url(environ: dict[str, str], url: str) -> None:
    """Where a client on this machine finds a server that listens so; IPv6 in brackets."""
    assert address.server_url(environ) == url


@pytest.mark.parametrize("text", ["schlüssel", "a b", "a\nb", "a\x7fb"])
def test_a_key_that_no_client_could_send(text: str) -> None:
    """Refused by all alike, and the key is not repeated."""
    assert read_by_serve("API_KEY", text) is None
    with pytest.raises(ValueError, match=r"^API_KEY=\*\*\*: ") as caught:
        address.api_key({"API_KEY": text})
    with pytest.raises(SettingsError) as serves:
        environment.read({"MODEL_PATH": "/m", "API_KEY": text})
    for message in (str(caught.value), str(serves.value)):
        assert text not in message
        assert repr(text) not in message


def test_blanks_around_a_key_are_none_of_it() -> None:
    """As serve reads it, so that client and server agree."""
    assert address.api_key({"API_KEY": " sk-1 \n"}) == "sk-1" == read_by_serve("API_KEY", " sk-1 \n")
    assert address.api_key({"API_KEY": " "}) is None


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://u:p@h:1/x", "http://***@h:1/x"),
        ("see redis://:pw@h and http://h/a@b", "see redis://***@h and http://h/a@b"),
        ("s3://bucket/name@rev", "s3://bucket/name@rev"),
        ("no url u:p@h", "no url u:p@h"),
    ],
)
def test_names_and_passwords_in_urls(text: str, shown: str) -> None:
    """Hidden wherever a URL is in a text; an @ behind the host is none."""
    assert address.without_user_info(text) == shown
