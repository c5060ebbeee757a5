"""The container's health probe: small and quick, because it runs every few seconds during long prefills.

Run as `python3 -S -E launcher/health.py`: without site packages, so that neither DynChunk's start hook nor anybody
else's can pull the engine into the probe. Prints one line; exit code 0 if healthy. Standard library only.
"""

from __future__ import annotations

import http.client
import os
import sys

# The engine answers within 20 s while it works on a long chunk (its own SGLANG_HEALTH_CHECK_TIMEOUT).
TIMEOUT_S = 30
ENGINE_WORDS = (b"sglang.launch_server", b"sglang::")
ANY_ADDRESS = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - where a client finds it


def main() -> int:
    """Probe as the environment says (HOST, PORT, NODE_RANK); 0 if healthy."""
    try:
        node_rank = int(os.environ.get("NODE_RANK", "").strip() or 0)
        port = int(os.environ.get("PORT", "").strip() or 30_000)
    except ValueError as error:
        return _say(healthy=False, what=f"NODE_RANK or PORT: {error}")
    if node_rank > 0:
        # Hosts other than the head serve no HTTP: what can be seen is whether the engine's processes live.
        pid = _engine_process()
        return _say(healthy=pid is not None, what=f"engine process {pid}" if pid else "no engine process on this host")
    host = os.environ.get("HOST", "").strip()
    host = ANY_ADDRESS.get(host, host)
    try:
        connection = http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)
        connection.request("GET", "/health")
        status = connection.getresponse().status
    except (OSError, http.client.HTTPException) as error:
        return _say(healthy=False, what=f"http://{host}:{port}/health: {error or type(error).__name__}")
    return _say(healthy=status == http.client.OK, what=f"http://{host}:{port}/health: {status}")


def _engine_process() -> int | None:
    """The id of a running engine process, or None."""
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        try:
            with open(f"/proc/{entry}/cmdline", "rb") as file:
                words = file.read()
            with open(f"/proc/{entry}/stat", "rb") as file:
                state = file.read().rpartition(b")")[2].split()[0]
        except OSError:
            continue  # it ended while we looked
        if state != b"Z" and any(word in words for word in ENGINE_WORDS):
            return int(entry)
    return None


def _say(*, healthy: bool, what: str) -> int:
    print(("healthy: " if healthy else "unhealthy: ") + what)
    return 0 if healthy else 1


if __name__ == "__main__":
    sys.exit(main())
