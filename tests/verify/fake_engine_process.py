"""A fake engine as a process of its own, to be signalled and launched: it serves, and computes nothing.

FAKE_ENGINE is JSON: fields of FakeEngine, and `deaf`: whether SIGTERM is ignored. PORT as for `serve`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path

from tests.verify.fake_engine import FakeEngine


def main() -> None:
    """Serve until SIGTERM."""
    fields = json.loads(os.environ.get("FAKE_ENGINE", "{}"))
    deaf = fields.pop("deaf", False)
    ended = threading.Event()
    signal.signal(signal.SIGTERM, signal.SIG_IGN if deaf else lambda *_: ended.set())
    folder = Path(fields.pop("folder"))
    folder.mkdir(exist_ok=True)
    engine = FakeEngine(folder, port=int(os.environ.get("PORT") or 0), **fields)
    print(f"fake engine {os.getpid()} at {engine.url}", flush=True)
    ended.wait()
    sys.exit(0)


if __name__ == "__main__":
    main()
