"""Where the server is, and with which key: one reading of HOST, PORT, NODE_RANK and API_KEY for every command.

Light on purpose: the health probe imports this without site packages every few seconds, so a plainly written number is
read here, and the settings' own parser is loaded only for other spellings (`30K`, `3e4`) and for wrong ones.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 30_000
MOST_PORT = 65_535
MOST_NODE_RANK = 4095
# What a server listens on, and where a client on the same machine finds it then.
ANY_ADDRESS = {"0.0.0.0": DEFAULT_HOST, "::": "::1"}  # noqa: S104 - compared, not bound
LONGEST_HOST = 253

_HOST_NAME = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*\.?")
_USER_INFO = re.compile(r"(?<=://)[^/?#\s'\"]*@")


def host(environ: Mapping[str, str]) -> str:
    """HOST as a client on this machine reaches it. Raises ValueError: variable, value and what is wrong with it."""
    given = environ.get("HOST", "").strip()
    try:
        wanted = host_name(given) if given else DEFAULT_HOST
    except ValueError as error:
        from dynchunk.shortened import shortened

        raise ValueError(f"HOST={shortened(repr(given))}: {error}") from None
    return ANY_ADDRESS.get(wanted, wanted)


def port(environ: Mapping[str, str]) -> int:
    """PORT. Raises ValueError as `host` does."""
    return _number("PORT", environ, DEFAULT_PORT, 1, MOST_PORT)


def node_rank(environ: Mapping[str, str]) -> int:
    """NODE_RANK, 0 for the head. Raises ValueError as `host` does."""
    return _number("NODE_RANK", environ, 0, 0, MOST_NODE_RANK)


def api_key(environ: Mapping[str, str]) -> str | None:
    """API_KEY without the blanks around it. Raises ValueError, without the key, for one that no client could send."""
    given = environ.get("API_KEY", "").strip()
    try:
        return key(given) if given else None
    except ValueError as error:
        raise ValueError(f"API_KEY=***: {error}") from None


def server_url(environ: Mapping[str, str]) -> str:
    """http://HOST:PORT as a client on this machine reaches it. Raises ValueError as `host` does."""
    return url_of(host(environ), port(environ))


def url_of(name: str, port_number: int) -> str:
    """The URL of a server. An IPv6 address goes into brackets, and the % before its zone is written %25."""
    if ":" in name:
        name = "[" + name.replace("%", "%25") + "]"
    return f"http://{name}:{port_number}"


def host_name(text: str) -> str:
    """A host's name or address, an IPv6 one without its brackets. Raises ValueError that says what is wrong."""
    inner = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    if "/" in inner:
        raise ValueError("not a host's name or address but a URL or a path; leave the rest out, PORT says the port")
    if inner.count(":") == 1:
        raise ValueError("a host and a port; set PORT beside HOST")
    if len(inner) > LONGEST_HOST:
        raise ValueError(f"longer than the {LONGEST_HOST} characters that a host's name can have")
    if ":" in inner:
        from ipaddress import IPv6Address  # 5 ms that few need

        IPv6Address(inner)  # AddressValueError is a ValueError
    elif not _HOST_NAME.fullmatch(inner):
        raise ValueError("not a host's name or address")
    return inner


def key(text: str) -> str:
    """A key that a client can send in an HTTP header. Raises ValueError; its message does not repeat the key."""
    if not text.isascii() or not text.isprintable() or " " in text:
        raise ValueError("it is sent in an HTTP header, so it has to be of ASCII characters without blanks among them")
    return text


def without_user_info(text: str) -> str:
    """Any text with *** for the name and password that a URL in it has before its @."""
    return _USER_INFO.sub("***@", text)


def _number(name: str, environ: Mapping[str, str], default: int, low: int, high: int) -> int:
    given = environ.get(name, "").strip()
    if not given:
        return default
    if given.isascii() and given.isdigit() and len(given) <= len(str(high)) and low <= int(given) <= high:
        return int(given)
    # Loaded only now: 20 ms and 5 MB that a probe does not need for `30000`.
    from dynchunk.settings import parse_knobs
    from dynchunk.shortened import shortened
    from launcher.environment import Launch

    values, problems = parse_knobs(Launch, {name: shortened(given)}, "")
    if problems:
        raise ValueError(problems[0])
    number: int = values[name.lower()]
    return number
