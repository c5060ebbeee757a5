"""The container's health probe: small and quick, because it runs every few seconds during long prefills.

Run as `python3 -S -E launcher/health.py`: without site packages, so that neither DynChunk's start hook nor anybody
else's can pull the engine into the probe. Prints one line; exit code 0 if healthy. Standard library only.
"""

from __future__ import annotations

import http.client
import os
import sys

if not __package__:  # run as a file: nothing has put the launcher on the path
    _ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    sys.path[0:0] = [_ROOT, os.path.join(_ROOT, "adapter")]

from launcher import address

# The engine answers within 20 s while it works on a long chunk (its own SGLANG_HEALTH_CHECK_TIMEOUT).
TIMEOUT_S = 30
ENGINE_WORDS = (b"sglang.launch_server", b"sglang::")


def main() -> int:
    """Probe as the environment says (HOST, PORT, NODE_RANK); 0 if healthy."""
    try:
        node_rank = address.node_rank(os.environ)
        host, port = address.host(os.environ), address.port(os.environ)
    except ValueError as error:
        return _say(healthy=False, what=str(error))
    if node_rank > 0:
        # Hosts other than the head serve no HTTP: what can be seen is whether the engine's processes live.
        pid = _engine_process()
        return _say(healthy=pid is not None, what=f"engine process {pid}" if pid else "no engine process on this host")
    url = address.url_of(host, port) + "/health"
    try:
        connection = http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)
        connection.request("GET", "/health")
        status = connection.getresponse().status
    except (OSError, http.client.HTTPException, ValueError) as error:  # ValueError: a name that IDNA cannot write
        return _say(healthy=False, what=f"{url}: {str(error) or type(error).__name__}")
    return _say(healthy=status == http.client.OK, what=f"{url}: {status}")


def _engine_process() -> int | None:
    """The id of a running engine process, or None."""
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        try:
            with open(f"/proc/{entry}/cmdline", "rb") as file:
                words = file.read()  # of a zombie: nothing
        except OSError:
            continue  # it ended while we looked
        if any(word in words for word in ENGINE_WORDS):
            return int(entry)
    return None


def _say(*, healthy: bool, what: str) -> int:
    print(("healthy: " if healthy else "unhealthy: ") + what)
    return 0 if healthy else 1


if __name__ == "__main__":
    sys.exit(main())
