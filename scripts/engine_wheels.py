"""The engine's published wheels, unpacked under .cache/engines/ for contract tests and version studies.

Read as text, or imported from there in front of an installed 0.5.23. `python -m scripts.engine_wheels` fetches all.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

CACHE = Path(__file__).resolve().parent.parent / ".cache" / "engines"
VERSIONS = ("0.5.20", "0.5.21", "0.5.22", "0.5.23")


def unpacked(version: str) -> Path:
    """The folder that holds this version's `sglang/`; fetched with pip and unpacked at the first call.

    Raises RuntimeError with pip's own words when it cannot be fetched.
    """
    folder = CACHE / version
    if folder.is_dir():
        return folder
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
        done = subprocess.run(
            [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--dest", scratch, f"sglang=={version}"],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"sglang=={version} could not be fetched: {done.stderr.strip()[-2000:]}")
        [wheel] = Path(scratch).glob("*.whl")
        whole = Path(scratch) / "unpacked"
        zipfile.ZipFile(wheel).extractall(whole)
        # In one step, so that a folder that exists is a whole one; another process may have been first.
        try:
            whole.rename(folder)
        except OSError:
            shutil.rmtree(whole)
    return folder


if __name__ == "__main__":
    for wanted in VERSIONS:
        print(unpacked(wanted))
