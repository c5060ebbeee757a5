"""Where the server is, seen from here: what memguard can watch and signal depends on it."""

from __future__ import annotations

import socket
from pathlib import Path

import httpx
import psutil

from scripts.verify.engine_process import EngineProcess, find

SIGNALS_OFF = "signals are off (--no-signals)"
_DEFAULT_PORTS = {"http": 80, "https": 443}


def in_container() -> bool:
    """A container has addresses of its own and the host's /proc/meminfo: the server's address says nothing there."""
    return Path("/.dockerenv").exists() or Path("/run/.containerenv").exists()


def is_here(host: str) -> bool:
    """Whether a host's name or address is one of this machine's."""
    try:
        addresses = {str(info[4][0]) for info in socket.getaddrinfo(host, None)}
    except OSError:
        return True  # nobody will answer there, and that is said elsewhere
    own = {address.address for addresses in psutil.net_if_addrs().values() for address in addresses}
    return any(a in own or a.startswith("127.") or a in ("::1", "0.0.0.0", "::") for a in addresses)  # noqa: S104


def engine_process(url: str) -> EngineProcess | str:
    """The process on this machine that serves at `url`, or with the head that does; or why none may be signalled."""
    address = httpx.URL(url)
    port = address.port or _DEFAULT_PORTS.get(address.scheme, 0)
    return find(port, here=None if in_container() else is_here(address.host))


def reach(engine: EngineProcess | str) -> str:
    """For the report: whether the guard could signal the engine."""
    return engine if isinstance(engine, str) else f"could reach {engine.what}"
