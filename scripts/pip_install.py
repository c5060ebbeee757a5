"""`pip install` for lib.sh, with a sign of life every ten seconds and each kind of warning once.

pip says nothing for the minutes that the engine takes; and where an index is configured that is not there, it says the
same hundreds of times over. Run by the Python of the environment that is being filled: the standard library only.
"""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable

EVERY_S = 10.0
# What differs between two warnings of a kind: what is quoted, and words with a number or a path in them.
DIFFERS = re.compile(r"'[^']*'|\"[^\"]*\"|\S*[\d/]\S*")


def relay(lines: Iterable[str], seen: Counter[str]) -> None:
    """Pass on what pip says on stderr, of each kind of warning the first. All else, errors above all, stays whole."""
    for line in lines:
        if line.startswith(("WARNING:", "DEPRECATION:")):
            kind = DIFFERS.sub("...", line.strip())
            seen[kind] += 1
            if seen[kind] > 1:
                continue
        with contextlib.suppress(OSError):  # nobody reads it any more: pip must not wait for that
            print(line, end="", file=sys.stderr, flush=True)


def held(folder: str) -> str:
    """What is in the folder by now, or nothing where that cannot be told."""
    with contextlib.suppress(OSError, IndexError):
        du = subprocess.run(["du", "-sk", folder], capture_output=True, text=True, check=False)
        return f", {int(du.stdout.split()[0]) * 1024 / 1e9:.1f} GB in {folder}"
    return ""


def main() -> int:
    """Run pip with our arguments -> its exit status, as a shell counts it."""
    began_s = time.monotonic()
    # Ctrl-C reaches pip as well, and pip takes its time to clean up: it is waited for.
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, lambda *_: None)
    seen: Counter[str] = Counter()
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *sys.argv[1:]]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, errors="replace") as pip:
        # To be ended from outside means that pip ends too.
        signal.signal(signal.SIGTERM, lambda *_: pip.send_signal(signal.SIGINT))
        assert pip.stderr is not None
        reader = threading.Thread(target=relay, args=(pip.stderr, seen), daemon=True)
        reader.start()
        while pip.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                pip.wait(timeout=EVERY_S)
                break
            size = held(sys.prefix)
            if pip.poll() is None:
                print(f"... {time.monotonic() - began_s:.0f} s{size}", flush=True)
        reader.join()
    for kind, count in seen.items():
        if count > 1:
            print(f"pip said {count} times: {kind}", file=sys.stderr)
    return pip.returncode if pip.returncode >= 0 else 128 - pip.returncode


if __name__ == "__main__":
    sys.exit(main())
