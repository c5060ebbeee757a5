#!/bin/sh
# From a fresh clone to a proof, on a machine with Python only (no GPU, no Docker): the real SGLang scheduler with a
# static chunk trips the memory guard; with DynChunk the same ramp passes. Safe to run again.
set -eu
cd "$(dirname "$0")/.."
. scripts/lib.sh

make_venv requirements/engine.txt requirements/tools.txt
export PYTHONPATH="$PWD/adapter:$PWD"
exec .venv/bin/python -m scripts.quickstart "$@"
