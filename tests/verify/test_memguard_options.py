"""What memguard takes, what it refuses, and what it shows of it."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from scripts.verify import memguard
from scripts.verify.errors import MemguardError
from scripts.verify.memguard import DEFAULT_SIZES, parse_sizes
from scripts.verify.redact import redacted_command, without_password
from tests.conftest import ROOT, clean_environ
from tests.verify.engine_programs import AT_MOST_S

KEY = "s3cret-key"


def program(*arguments: str, module: str = "memguard", **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", f"scripts.verify.{module}", *arguments],
        cwd=ROOT,
        env=clean_environ(COLUMNS="200", PYTHONPATH=f"{ROOT}/adapter:{ROOT}", **env),
        capture_output=True,
        text=True,
        timeout=AT_MOST_S,
        check=False,
    )


def test_sizes_are_read_as_people_write_them() -> None:
    """A k is a thousand; order and repetition do not matter."""
    assert parse_sizes("128k, 64k,64000,1_500,0.5m") == (1_500, 64_000, 128_000, 500_000)


def test_the_default_ramp() -> None:
    """64k to 500k in nine steps that are no doublings."""
    sizes = parse_sizes(DEFAULT_SIZES)
    assert sizes == (64_000, 96_000, 128_000, 160_000, 200_000, 256_000, 320_000, 400_000, 500_000)


@pytest.mark.parametrize("text", ["", " , ", "64q", "0", "-5", "64k,zero", "1001m", "9" * 400, "9" * 400 + "k"])
def test_wrong_sizes_are_named(text: str) -> None:
    """A size that is none is named, with an example of a right one."""
    with pytest.raises(MemguardError, match="from 1 to 1,000,000,000; write 64k,96k,128000") as refused:
        parse_sizes(text)
    assert len(str(refused.value)) < 600


@pytest.mark.parametrize("unfit", [(), ("--guard-gib", "2")])
def test_a_flag_wins_over_the_guard_of_the_environment(unfit: tuple[str, ...]) -> None:
    """GUARD_GIB may stand in .env for good; two flags that are typed contradict each other as before."""
    done = program("--headroom-gib", "1", *unfit, "--url", "http://127.0.0.1:9", GUARD_GIB="1.5")
    assert done.returncode == 1
    both = "--guard-gib and --headroom-gib: give one of them"
    assert (both if unfit else "no server answers at http://127.0.0.1:9") in " ".join(done.stderr.split())


@pytest.mark.parametrize(
    "arguments",
    [["--api-key", KEY], [f"--api-key={KEY}"], ["--label", f"x{KEY}x"], ["--api-key", KEY, "--sizes", "64k"]],
)
def test_the_key_is_not_in_the_command(arguments: list[str]) -> None:
    """However the key is given, the recorded command has stars in its place."""
    command = redacted_command("memguard", arguments, KEY)
    assert KEY not in command
    assert "***" in command


def test_other_arguments_are_recorded_as_typed() -> None:
    """The command can be pasted into a shell."""
    assert (
        redacted_command("memguard", ["--label", "a b", "--sizes", "64k"], None) == "memguard --label 'a b' --sizes 64k"
    )


def test_a_password_in_the_address_is_hidden() -> None:
    """Everything before the @ of an address is hidden, nothing else is."""
    assert without_password("http://me:word@host:30000/x") == "http://***@host:30000/x"
    assert without_password("http://host:30000") == "http://host:30000"
    assert "word" not in redacted_command("memguard", ["--url", "http://me:word@host"], None)


def test_help_says_how_it_ends() -> None:
    """The exit codes are in --help, and the key of the environment is not."""
    done = program("--help", API_KEY=KEY)
    assert done.returncode == 0
    codes = "Exit codes: 0 all sizes passed, or quiet; 2 the guard tripped, or a size would have crossed it; 1 an error"
    assert codes in " ".join(done.stdout.split())
    assert KEY not in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--guard"], "No such option"),
        (["--guard-gib", "much"], "should be a valid number"),
        (["--guard-gib", "1", "--headroom-gib", "2"], "--guard-gib and --headroom-gib: give one of them"),
        (["--out", "a", "--append", "b"], "--out and --append: give one of them"),
        (["--sizes", "big"], "big is no number of tokens"),
        (["--url", "here"], "'here' is not an address like http://127.0.0.1:30000"),
        (["--url", "http://127.0.0.1:9"], "no server answers at http://127.0.0.1:9"),
        (["--url", "http://:::30000"], "'http://:::30000' is not an address like"),
        (["--url", "http://[::1"], "is not an address like"),
        (["--url", "http://127.0.0.1:99999"], "is not an address like"),
        (["--url", "ftp://127.0.0.1"], "is not an address like"),
        (["--url", "http://"], "is not an address like"),
        (["--guard-gib", "inf"], "--guard-gib inf: not a number"),
        (["--guard-gib", "1e300"], "--guard-gib 1e+300: not a number from 0 to 1,000,000"),
        (["--start-guard-gib", "1e300"], "--start-guard-gib 1e+300: not a number"),
        (["--timeout", "1e300"], "--timeout 1e+300: not a number from 0 to 10,000,000"),
        (["--guard-gib", "nan"], "greater than or equal to 0"),
        (["--headroom-gib", "nan"], "greater than or equal to 0"),
        (["--timeout", "inf"], "--timeout inf: not a number"),
        (["--api-key", "schlüssel"], "sent in an HTTP header"),
        (["--api-key", "two\nlines"], "sent in an HTTP header"),
        (["--trace", "/dev"], "--trace /dev: not a file"),
        (["--server-log", "/dev/null"], "--server-log /dev/null: not a file"),
        (
            ["--own-memory"],
            "--own-memory is for a rehearsal, and a host that serves is judged by what it has left; give",
        ),
        (["--own-memory", "--guard-gib", "2"], "give --headroom-gib"),
        (["--own-memory", "--attach"], "--own-memory is for a ramp, which rehearses; leave it out"),
        (["--own-memory", "--replay", "x"], "--own-memory is for a ramp"),
        (["--own-memory", "--headroom-gib", "1", "--compare", "x", "y"], "--own-memory is for a ramp"),
    ],
)
def test_a_mistake_ends_with_1(
    arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2 belongs to the guard: a mistyped option, whatever it is, ends with 1 and one clear sentence."""
    monkeypatch.setattr(sys, "argv", ["memguard", *arguments])
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(memguard._UsageSeen, "accepted", False)
    monkeypatch.delenv("DYNCHUNK_TRACE", raising=False)
    with pytest.raises(SystemExit) as ended:
        memguard.main()
    assert ended.value.code == 1
    assert said in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    "url", ["http://me:wo%40rd@127.0.0.1:9", "http://me:word@127.0.0.1:bad", "http://me:word@:::30000"]
)
def test_a_password_in_the_address_is_never_said(url: str) -> None:
    """Whatever is wrong with the address, the message has stars for name and password."""
    done = program("--url", url)
    assert done.returncode == 1
    assert "***@" in done.stderr
    assert "word" not in done.stdout + done.stderr
    assert "wo%40rd" not in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"HOST": "::", "PORT": "9"}, "no server answers at http://[::1]:9"),
        ({"HOST": "0.0.0.0", "PORT": "9"}, "no server answers at http://127.0.0.1:9"),
        ({"HOST": "127.0.0.2", "PORT": "9"}, "no server answers at http://127.0.0.2:9"),
        ({"HOST": "http://x"}, "HOST"),
        ({"PORT": "many"}, "PORT"),
        ({"API_KEY": "schlüssel"}, "API_KEY"),
    ],
)
def test_the_environment_says_where_the_server_is(environ: dict[str, str], said: str) -> None:
    """HOST, PORT and API_KEY are those of `serve`; a wrong one ends with its name and no traceback."""
    done = program(**environ)
    assert done.returncode == 1
    assert said in " ".join(done.stderr.split())
    assert "schlüssel" not in done.stderr
    assert "Traceback" not in done.stderr


def test_a_mistyped_option_names_the_program_as_people_call_it() -> None:
    """The usage line can be typed."""
    assert "dynchunk memguard --help" in program("--wrong").stderr


def test_plots_alone() -> None:
    """`plots` says how it is called, and what is wrong with a folder."""
    assert program("--help", module="plots").returncode == 0
    assert program(module="plots").returncode == 1
    done = program("/nonexistent", module="plots")
    assert done.returncode == 1
    assert "holds no run.json" in done.stderr
