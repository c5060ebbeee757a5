# shellcheck shell=sh
# Shared by quickstart.sh and test.sh: a virtual environment in .venv with what is asked for.

say() { printf '\n==> %s\n' "$*"; }

die() {
    printf 'dynchunk: %s\n' "$*" >&2
    exit 1
}

# The first Python that the engine runs on (it needs 3.11 or later).
find_python() {
    for candidate in python3 python3.12 python3.11 python3.13; do
        if command -v "$candidate" >/dev/null 2>&1 &&
            "$candidate" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    die "no Python from 3.11 to 3.13 with venv found; SGLang 0.5.23 needs one (Debian, Ubuntu: apt-get install python3-venv)"
}

# make_venv FILE...: a .venv that holds these requirements files. Quick when it already does. One that was left half made
# (Ctrl-C while it was being made) is made again, but only if it is ours: each of ours holds a file dynchunk-*.
make_venv() {
    if [ -e .venv ] && ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
        for mark in .venv/dynchunk-*; do
            [ -e "$mark" ] || die "$PWD/.venv has no working pip and was not made by this script; move it away, then start again"
        done
        say "removing .venv, which was left incomplete"
        mkdir -p .cache
        mv .venv .cache/venv # at once: a half removed one would no longer be known as ours
    fi
    rm -rf .cache/venv
    if [ ! -e .venv ]; then
        python=$(find_python) || exit 1
        say "making .venv with $python"
        mkdir -p .cache/venv
        : >.cache/venv/dynchunk-venv
        mv .cache/venv .venv
        "$python" -m venv .venv
    fi
    # One stamp a set of requirements, so that a second run does not ask the package index again.
    stamp=.venv/dynchunk-$(echo "$@" | cat - requirements/*.txt | cksum | cut -d' ' -f1)
    if [ ! -e "$stamp" ]; then
        say "installing $* into .venv (the engine is about 11 GB)"
        wanted=
        for file in "$@"; do wanted="$wanted -r $file"; done
        # shellcheck disable=SC2086  # our own file names, without spaces
        .venv/bin/python -m pip install --quiet --disable-pip-version-check $wanted
        : >"$stamp"
    fi
}
