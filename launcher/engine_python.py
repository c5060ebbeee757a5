"""Which Python runs the engine: the tools may be installed in another one than SGLang is."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Mapping

# Looked up, not imported: that would take seconds and start DynChunk in the process that asks.
_ASK = (
    "import sys; from importlib.util import find_spec; from os.path import isfile, join; spec = find_spec('sglang')\n"
    "at = list(spec.submodule_search_locations or []) if spec else []\n"
    "sys.exit(not any(isfile(join(folder, 'launch_server.py')) for folder in at))"
)


def find(environ: Mapping[str, str]) -> tuple[str | None, list[str]]:
    """(the first Python that has SGLang or None, all that were asked): this one, then those on PATH.

    environ: the engine's, because its PYTHONPATH may be where the engine is.
    """
    asked: list[str] = []
    on_path = (shutil.which(name, path=environ.get("PATH")) for name in ("python3", "python"))
    for python in (sys.executable, *on_path):
        if python and python not in asked:
            asked.append(python)
            if _has_engine(python, environ):
                return python, asked
    return None, asked


def _has_engine(python: str, environ: Mapping[str, str]) -> bool:
    try:
        done = subprocess.run([python, "-c", _ASK], env=dict(environ), capture_output=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0
