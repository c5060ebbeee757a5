"""Prove that every fresh Python of this image loads the adapter, and that none does with DYNCHUNK_MODE=off.

`python3 prove_adapter.py`: exit code 1 and one line for each thing that is wrong. The image build ends with it. The
proof needs children: Python's flags (-I, -E, -S), another sitecustomize or a changed PYTHONPATH keep the adapter out
without a word, so it is looked for where it must be and never assumed. Standard library only.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

PYTHON = "python3"
ADAPTER_MODULE = "dynchunk.import_watch"
# What a process that only starts must not pay for.
HEAVY = ("torch", "sglang", "numpy")
PROBE = f"""
import json, sys
print(json.dumps({{
    "watches": any(type(finder).__module__ == {ADAPTER_MODULE!r} for finder in sys.meta_path),
    "heavy": [name for name in {HEAVY!r} if name in sys.modules],
}}))
"""


def fresh_python(mode: str | None) -> tuple[bool, list[str], str]:
    """(the import watch stands, heavy modules loaded, what was said on stderr) of a new process in `mode`."""
    environ = {name: value for name, value in os.environ.items() if name != "DYNCHUNK_MODE"}
    if mode is not None:
        environ["DYNCHUNK_MODE"] = mode
    # By name, as the engine and the tools are started, and not as sys.executable: what is on PATH may be a wrapper.
    child = subprocess.run([PYTHON, "-c", PROBE], env=environ, capture_output=True, text=True, timeout=60, check=True)
    # The last line: a sitecustomize of the base may print.
    seen = json.loads(child.stdout.splitlines()[-1])
    return seen["watches"], seen["heavy"], child.stderr.strip()


def problems() -> list[str]:
    """One sentence for each thing that is not as it must be."""
    found = []
    where = f"{PYTHON} ({shutil.which(PYTHON)}) with PYTHONPATH={os.environ.get('PYTHONPATH', '')}"
    watches, heavy, said = fresh_python(None)
    if not watches:
        found.append(f"the adapter is not loaded by {where}" + (f"; it said: {said}" if said else ""))
    if heavy:
        found.append(f"starting {where} imports {', '.join(heavy)}; the adapter must not")
    watches, _, _ = fresh_python("off")
    if watches:
        found.append(f"DYNCHUNK_MODE=off does not keep the adapter out of {where}")
    return found


def main() -> int:
    """Print what is wrong; 0 if nothing is."""
    try:
        found = problems()
    except subprocess.CalledProcessError as error:
        found = [f"{PYTHON} ({shutil.which(PYTHON)}) does not start: {error.stderr.strip()}"]
    for problem in found:
        print(f"dynchunk: image: {problem}")
    if not found:
        print(f"dynchunk: {shutil.which(PYTHON)} loads the adapter, and does not with DYNCHUNK_MODE=off")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
