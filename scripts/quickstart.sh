#!/bin/sh
# From a fresh clone to a proof, on a machine with Python only (no GPU, no Docker): the real SGLang scheduler with a
# static chunk trips the memory guard; with DynChunk the same ramp passes. Safe to run again.
#   VENV=/some/where PYTHON=python3.12 scripts/quickstart.sh    an environment elsewhere, and the Python that makes it
set -eu
cd "$(dirname "$0")/.."
. scripts/lib.sh

make_venv requirements/engine.txt requirements/tools.txt
export PYTHONPATH="$PWD/adapter:$PWD"
# `./dynchunk serve` takes the Python on PATH where .venv has none.
export PATH="$VENV/bin:$PATH"
exec "$VENV/bin/python" -m scripts.quickstart "$@"
