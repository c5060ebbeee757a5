"""scripts/lib.sh: the virtual environment that quickstart and test make, also after a first try that was cut short.

But for one test the environments are real and their pip is a stand-in, which does what FAKE_PIP says.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.conftest import ROOT, clean_environ

pytestmark = pytest.mark.slow

MAKE = ". scripts/lib.sh; make_venv requirements/none.txt; echo made"
PIP = 'import os, sys\nif sys.argv[1:] != ["--version"]: exec(os.environ.get("FAKE_PIP", ""))\n'
# A Python whose environments have the stand-in.
MAKER = f"""#!/bin/sh -e
if [ "$1 $2" != "-m venv" ]; then exec "{sys.executable}" "$@"; fi
"{sys.executable}" -m venv --without-pip "$3"
{{HANGS}}
cd "$3"/lib/python3*/site-packages
mkdir pip
cp "{{PIP}}" pip/__main__.py
"""
WAITS = """
import pathlib, time
pathlib.Path("started").touch()
ends_s = time.monotonic() + 60
while not os.path.exists("go") and time.monotonic() < ends_s: time.sleep(0.01)
"""
LINE = re.compile(r"\.\.\. \d+ s, \d+\.\d GB in (.*)")


def written(path: Path, text: str) -> Path:
    """A program."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with lib.sh and requirements that need no package index; a sign of life is due all the time."""
    folder = tmp_path / "checkout"
    (folder / "scripts").mkdir(parents=True)
    (folder / "requirements").mkdir()
    (folder / "requirements" / "none.txt").write_text("# nothing\n")
    shutil.copy(ROOT / "scripts" / "lib.sh", folder / "scripts")
    text = (ROOT / "scripts" / "pip_install.py").read_text(encoding="utf-8")
    (folder / "scripts" / "pip_install.py").write_text(text.replace("EVERY_S = 10.0", "EVERY_S = 0.01"))
    return folder


def maker(checkout: Path, *, hangs: bool = False) -> str:
    """A Python whose environments have the stand-in; with `hangs` it is cut short before pip is there."""
    pip = written(checkout.parent / "tools" / "pip.py", PIP)
    text = MAKER.replace("{PIP}", str(pip)).replace("{HANGS}", "touch started; exec sleep 60" if hangs else "")
    return str(written(checkout.parent / "tools" / ("hangs" if hangs else "maker"), text))


def environ(**env: str) -> dict[str, str]:
    """Nothing of what these tests were started with: that environment is in use."""
    return {name: value for name, value in clean_environ().items() if name != "VENV"} | env


def sh(checkout: Path, script: str = MAKE, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", "-euc", script], cwd=checkout, env=environ(**env), capture_output=True, text=True, check=False
    )


def started(checkout: Path, **env: str) -> subprocess.Popen[str]:
    """One that waits: in the stand-in for pip, or in a Python that hangs."""
    process = subprocess.Popen(
        ["sh", "-euc", MAKE],
        cwd=checkout,
        env=environ(**env),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    until((checkout / "started").exists)
    return process


def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 60
    while not condition() and time.monotonic() < deadline_s:
        time.sleep(0.005)
    assert condition()


def stamps(venv: Path) -> int:
    """How many sets of requirements it is known to have."""
    return len([path for path in venv.glob("dynchunk-*") if path.name != "dynchunk-venv"])


def test_a_venv_that_was_cut_short_is_made_again(checkout: Path) -> None:
    """Ctrl-C while .venv is being made leaves one without pip; the next run makes it whole, the one after is quick."""
    process = started(checkout, PYTHON=maker(checkout, hangs=True))
    os.killpg(process.pid, signal.SIGINT)
    said, _ = process.communicate(timeout=30)
    assert process.returncode != 0
    assert "made\n" not in said
    done = sh(checkout)  # the real pip
    assert "left incomplete" in done.stdout
    assert done.stdout.endswith("made\n"), done.stderr
    python = checkout / ".venv" / "bin" / "python"
    assert subprocess.run([python, "-m", "pip", "--version"], capture_output=True, check=False).returncode == 0
    assert sh(checkout).stdout == "made\n"
    assert {path.name for path in checkout.iterdir()} == {".venv", "requirements", "scripts", "started"}


def test_a_venv_of_somebody_else_is_left_alone(checkout: Path) -> None:
    """A folder without a pip that this script did not make is named and not touched, whatever else is in it."""
    mine = checkout / ".venv" / "mine"
    mine.parent.mkdir()
    mine.write_text("precious")
    (checkout / ".venv" / "dynchunk-main").mkdir()  # a clone
    done = sh(checkout)
    assert done.returncode == 1
    assert f"{checkout}/.venv has no working pip and was not made by this script" in done.stderr
    assert mine.read_text() == "precious"


def test_no_python_ends_the_script(checkout: Path) -> None:
    """Without a Python that fits, the message is the end: nothing is made and nothing runs after it."""
    tools = checkout / "tools"
    tools.mkdir()
    (tools / "sh").symlink_to(str(shutil.which("sh")))
    done = sh(checkout, PATH=str(tools))
    assert done.returncode == 1
    assert done.stderr.startswith("dynchunk: no Python from 3.11 to 3.13 with venv found")
    assert "made" not in done.stdout
    assert not (checkout / ".venv").exists()


def test_a_python_that_only_fails_is_passed_over(checkout: Path) -> None:
    """A shim of a version that is not selected is on PATH and runs nothing: the next that works makes it."""
    tools = Path(maker(checkout)).parent
    for name in ("python3", "python3.12"):
        written(tools / name, "#!/bin/sh\necho no such version >&2\nexit 127\n")
    (tools / "maker").rename(tools / "python3.11")
    done = sh(checkout, PATH=f"{tools}{os.pathsep}{os.environ['PATH']}")
    assert f"making {checkout}/.venv with {tools}/python3.11\n" in done.stdout
    assert done.stdout.endswith("made\n"), done.stderr


def test_a_python_that_is_named_must_be_one(checkout: Path) -> None:
    """What PYTHON names is used or refused; no other one takes its place, nor an environment of another version."""
    refused = sh(checkout, PYTHON="no-python")
    assert refused.returncode == 1
    assert refused.stderr.startswith("dynchunk: PYTHON=no-python is no Python from 3.11 to 3.13")
    assert not (checkout / ".venv").exists()
    assert sh(checkout, PYTHON=maker(checkout)).stdout.endswith("made\n")
    other = written(checkout.parent / "tools" / "other", "#!/bin/sh\necho 3.99\n")
    refused = sh(checkout, PYTHON=str(other))
    assert refused.returncode == 1
    assert refused.stderr.startswith(f"dynchunk: {checkout}/.venv is of another Python than PYTHON={other}")


def test_an_environment_elsewhere(checkout: Path) -> None:
    """VENV names the folder, in place of .venv: absent or empty it is made, quick when nothing has changed."""
    elsewhere = checkout.parent / "some where"
    script = f'{MAKE}; "$VENV/bin/python" -c "import sys; print(sys.prefix)"'
    done = sh(checkout, script, VENV=str(elsewhere), PYTHON=maker(checkout))
    assert done.stdout.endswith(f"made\n{elsewhere}\n"), done.stderr
    assert sh(checkout, script, VENV=str(elsewhere)).stdout == f"made\n{elsewhere}\n"
    assert not (checkout / ".venv").exists()
    (checkout / "empty").mkdir()
    done = sh(checkout, script, VENV="empty", PYTHON=maker(checkout))
    assert done.stdout.endswith(f"made\n{checkout}/empty\n"), done.stderr


def test_one_elsewhere_that_broke_is_made_again(checkout: Path) -> None:
    """Ours is emptied, also behind a link; what lies beside it and the link stay."""
    kept, link = checkout.parent / "disk" / "venv", checkout.parent / "link"
    kept.mkdir(parents=True)
    link.symlink_to(kept)
    (kept.parent / "beside").touch()
    made = {"VENV": str(link), "PYTHON": maker(checkout)}
    assert sh(checkout, **made).stdout.endswith("made\n")
    (link / "bin" / "python").unlink()
    (link / "old").touch()
    done = sh(checkout, **made)
    assert f"emptying {link}, which was left incomplete" in done.stdout
    assert done.stdout.endswith("made\n"), done.stderr
    assert link.is_symlink()
    assert (kept.parent / "beside").exists()
    assert not (kept / "old").exists()
    assert stamps(kept) == 1


def test_other_requirements_are_installed_once(checkout: Path) -> None:
    """A file that has changed makes pip run again, a failure of it too."""
    ran = {"PYTHON": maker(checkout), "FAKE_PIP": "print(*sys.argv[1:])"}
    words = "install --quiet --disable-pip-version-check -r requirements/none.txt"
    assert words in sh(checkout, **ran).stdout.splitlines()
    assert sh(checkout, **ran).stdout == "made\n"
    (checkout / "requirements" / "none.txt").write_text("# nothing else\n")
    assert sh(checkout, **ran | {"FAKE_PIP": "sys.exit(1)"}).returncode == 1
    assert words in sh(checkout, **ran).stdout.splitlines()
    assert sh(checkout, **ran).stdout == "made\n"


@pytest.mark.parametrize(
    ("does", "code"), [("sys.exit(7)", 7), ("os.kill(os.getpid(), 9)", 137)], ids=["fails", "killed"]
)
def test_the_exit_status_is_that_of_pip(checkout: Path, does: str, code: int) -> None:
    """Its end is the script's, and what it was to install does not count as installed."""
    done = sh(checkout, PYTHON=maker(checkout), FAKE_PIP=does)
    assert done.returncode == code
    assert "made\n" not in done.stdout
    assert stamps(checkout / ".venv") == 0


def test_each_kind_of_warning_once(checkout: Path) -> None:
    """Paths, names in quotes and numbers make no new kind; how many there were is said, and errors are all there."""
    says = """
for i in range(200):
    print(f"WARNING: Location 'file:///none/{i}/' is ignored: it is neither a file nor a directory.", file=sys.stderr)
    if i == 100: print("WARNING: something else\\nERROR: once\\n  its second line\\nERROR: once", file=sys.stderr)
"""
    done = sh(checkout, PYTHON=maker(checkout), FAKE_PIP=says)
    assert done.stderr.splitlines() == [
        "WARNING: Location 'file:///none/0/' is ignored: it is neither a file nor a directory.",
        "WARNING: something else",
        "ERROR: once",
        "  its second line",
        "ERROR: once",
        "pip said 200 times: WARNING: Location ... is ignored: it is neither a file nor a directory.",
    ]
    assert done.stdout.endswith("made\n")


def test_signs_of_life_while_pip_works(checkout: Path) -> None:
    """Lines with the time and the size, until pip ends; none after it."""
    with started(checkout, PYTHON=maker(checkout), FAKE_PIP=WAITS + "print('pip ends', flush=True)") as process:
        assert process.stdout is not None
        said = next(line for line in process.stdout if line.startswith("..."))
        found = LINE.fullmatch(said.strip())
        assert found, said
        assert found[1] == str(checkout / ".venv")
        (checkout / "go").touch()
        *_, end = process.stdout.read().partition("pip ends\n")
    assert process.returncode == 0
    assert [line for line in end.splitlines() if not LINE.fullmatch(line)] == ["made"]
    assert end.endswith("made\n")


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_nothing_is_left_when_it_is_ended(checkout: Path, sent: signal.Signals) -> None:
    """Ctrl-C, or an end from outside: pip is given the time to clean up, then all are gone, and it was no install."""
    cleans = (
        f"try:\n    exec({WAITS!r})\nexcept KeyboardInterrupt:\n"
        "    open('cleaned', 'w').close(); sys.exit('ERROR: Operation cancelled by user')"
    )
    process = started(checkout, PYTHON=maker(checkout), FAKE_PIP=cleans)
    assert process.stdout is not None
    assert any(line.startswith("...") for line in process.stdout)  # it is in its loop
    if sent is signal.SIGINT:
        os.killpg(process.pid, sent)  # as a terminal sends it
    else:
        [installer] = psutil.Process(process.pid).children()
        installer.send_signal(sent)
    said, errors = process.communicate(timeout=30)  # returns when nobody holds the other end
    assert process.returncode != 0
    assert "made\n" not in said
    assert errors == "ERROR: Operation cancelled by user\n"
    assert (checkout / "cleaned").exists()
    assert stamps(checkout / ".venv") == 0
