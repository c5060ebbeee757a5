# shellcheck shell=sh
# Shared by quickstart.sh and test.sh, which read it in the checkout's root: a virtual environment with what is asked for.
# After `. scripts/lib.sh`, $VENV is the environment's folder, a full path; once make_venv has been called, "$VENV/bin/python"
# is the Python to use. Two variables choose another one:
#   VENV=/some/where     the folder, made there if absent, in place of .venv (a relative one is in the checkout)
#   PYTHON=python3.12    the Python that makes it, in place of the first that fits

VENV=${VENV:-.venv}
case $VENV in
    /*) ;;
    *) VENV=$PWD/$VENV ;;
esac

say() { printf '\n==> %s\n' "$*"; }

die() {
    printf 'dynchunk: %s\n' "$*" >&2
    exit 1
}

# The engine needs 3.11 or later.
fits='import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))'
version='import sys; print("%d.%d" % sys.version_info[:2])'

# The first Python that the engine runs on, or the one that PYTHON names. Being found is not enough: a shim of a version
# that is not selected, or a Debian Python without python3-venv, is there and fails.
find_python() {
    if [ -n "${PYTHON:-}" ]; then
        set -- "$PYTHON"
    else
        set -- python3 python3.12 python3.11 python3.13
    fi
    for candidate; do
        if command -v "$candidate" >/dev/null 2>&1 && "$candidate" -c "import venv, ensurepip; $fits" 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    if [ -n "${PYTHON:-}" ]; then
        die "PYTHON=$PYTHON is no Python from 3.11 to 3.13 with venv; SGLang 0.5.23 needs one"
    fi
    die "no Python from 3.11 to 3.13 with venv found; SGLang 0.5.23 needs one (Debian, Ubuntu: apt-get install python3-venv)"
}

# make_venv FILE...: a $VENV that holds these requirements files. Quick when it already does. One that was left half made
# (Ctrl-C while it was being made) is made again, but only if it is ours: each of ours holds the file dynchunk-venv.
make_venv() {
    if [ -e "$VENV" ] && ! "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then
        if [ -f "$VENV/dynchunk-venv" ]; then
            say "emptying $VENV, which was left incomplete"
            # All but the mark: one that is cut short here is still known as ours.
            find "$VENV/" -mindepth 1 -maxdepth 1 ! -name dynchunk-venv -exec rm -rf {} +
        elif [ -n "$(ls -A "$VENV")" ]; then
            die "$VENV has no working pip and was not made by this script; move it away, then start again"
        fi
    fi
    if [ ! -e "$VENV/bin/python" ]; then
        python=$(find_python) || exit 1
        say "making $VENV with $python"
        mkdir -p "$VENV"
        : >"$VENV/dynchunk-venv"
        "$python" -m venv "$(cd "$VENV" && pwd -P)" # venv refuses a link
    fi
    "$VENV/bin/python" -c "$fits" || die "$VENV is of no Python from 3.11 to 3.13; name another folder: VENV=/some/where"
    if [ -n "${PYTHON:-}" ] && [ "$("$PYTHON" -c "$version")" != "$("$VENV/bin/python" -c "$version")" ]; then
        die "$VENV is of another Python than PYTHON=$PYTHON; name another folder: VENV=/some/where"
    fi
    # One stamp a set of requirements, so that a second run does not ask the package index again.
    stamp=$VENV/dynchunk-$(echo "$@" | cat - requirements/*.txt | cksum | cut -d' ' -f1)
    if [ ! -e "$stamp" ]; then
        say "installing $* into $VENV"
        case " $* " in *" requirements/engine.txt "*) echo "The engine is about 11 GB." ;; esac
        wanted=
        for file in "$@"; do wanted="$wanted -r $file"; done
        # shellcheck disable=SC2086  # our own file names, without spaces
        "$VENV/bin/python" -P scripts/pip_install.py $wanted
        : >"$stamp"
    fi
}
