#!/bin/sh
# All tests: lint, types, unit, property, contract, engine (a real server), image (a real Docker engine).
#   scripts/test.sh          everything; installs what it needs into .venv
#   scripts/test.sh --fast   without engine, image and slow ones: under a minute once installed, on idle cores
#   scripts/test.sh --all    everything, and more configurations of the same
# Further arguments go to pytest. VENV and PYTHON: scripts/lib.sh.
set -eu
cd "$(dirname "$0")/.."
. scripts/lib.sh

markers=
if [ "${1:-}" = --fast ]; then
    markers="not engine and not image and not slow"
    shift
    make_venv requirements/test.txt requirements/image-test.txt
else
    make_venv requirements/engine.txt requirements/test.txt requirements/image-test.txt
fi
export PYTHONPATH="$PWD/adapter:$PWD"

say "lint and types"
"$VENV/bin/ruff" check .
"$VENV/bin/ruff" format --check .
"$VENV/bin/mypy" adapter/dynchunk launcher scripts docker-images/cpu-reference/plugin/dynchunk_reference
"$VENV/bin/lint-imports" --no-logo
"$VENV/bin/shellcheck" -x dynchunk scripts/*.sh tests/image/*.sh .ci/run
"$VENV/bin/python" -m scripts.render_docs --check

say "tests"
if [ -z "$markers" ]; then
    # Once, before two want it.
    "$VENV/bin/python" -c 'from scripts import reference; reference.make_model()'
fi
# Two at a time. Those that share a server are one group, and stay together; what takes long begins first.
exec "$VENV/bin/python" -m pytest -m "$markers" -n 2 --dist loadgroup --no-loadscope-reorder "$@"
