#!/bin/sh
# All tests: lint, types, unit, property, contract, engine (a real server), image (a real Docker engine).
#   scripts/test.sh          everything; installs what it needs into .venv
#   scripts/test.sh --fast   without engine, image and slow ones: under a minute once installed, on idle cores
# Further arguments go to pytest.
set -eu
cd "$(dirname "$0")/.."
. scripts/lib.sh

fast=
if [ "${1:-}" = --fast ]; then
    fast=yes
    shift
fi
if [ -n "$fast" ]; then
    make_venv requirements/test.txt
else
    make_venv requirements/engine.txt requirements/test.txt requirements/image-test.txt
fi
export PYTHONPATH="$PWD/adapter:$PWD"

say "lint and types"
.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/mypy adapter/dynchunk launcher scripts docker-images/cpu-reference/plugin/dynchunk_reference
.venv/bin/lint-imports --no-logo
.venv/bin/shellcheck -x dynchunk scripts/*.sh tests/image/*.sh .ci/run
.venv/bin/python -m scripts.render_docs --check

status=0
# run_tests MARKERS ARGUMENTS...: also where nothing is selected; a failure is told in the end.
run_tests() {
    markers=$1
    shift
    .venv/bin/python -m pytest -m "$markers" "$@" || { code=$? && [ "$code" = 5 ] || status=$code; }
}

say "tests"
if [ -z "$fast" ]; then
    # Once, before two want it.
    .venv/bin/python -c 'from scripts import reference; reference.make_model()'
fi
# Two at a time, but those of one file together (they share servers): most of an engine's start is one core's work.
run_tests "not image${fast:+ and not engine and not slow}" -n 2 --dist loadfile "$@"
if [ -z "$fast" ]; then
    say "tests of the image"
    run_tests image "$@"
fi
exit "$status"
