"""The engine's flags as argparse reads them: shortened, with `=`, under other names; and never with a secret."""

from __future__ import annotations

import argparse
import shlex

import pytest

from launcher import flags, redaction

SECRETS = [
    *("--api-key s3cret", "--api-key=s3cret", "--api-k s3cret", "--api-k=s3cret", "--ap s3cret", "--api=s3cret"),
    *("--admin-api-key s3cret", "--admin-api-k s3cret", "--admin=s3cret", "--ssl-keyfile-password=s3cret"),
    *("--ssl-keyfile-p s3cret", "--some-token s3cret", "--some-secret=s3cret", "--a s3cret"),
    *("--url http://u:s3cret@h/", "--url=http://s3cret@h", '--model-loader-extra-config \'{"aws_secret": "s3cret"}\''),
    *('--x=\'{"a": 1, "API_KEY" : "s3\\"cret"}\'', "--api-key s3cret --port 1"),
    *("env HF_TOKEN=s3cret sh", "MY_PASSWORD='s3cret s3cret' x", "sh -c 'HF_TOKEN=s3cret x --api-key s3cret'"),
    *(
        "curl -H 'X-API-Key: s3cret' x",
        '--j \'{"accessKey": ["s3cret"]}\'',
        "--env=DB_PASS='s3cret s3cret'",
        "-token s3cret",
    ),
]


@pytest.mark.parametrize("line", SECRETS)
def test_no_secret_is_shown(line: str) -> None:
    """Whichever way it is written, the value is hidden and the rest stays."""
    shown = " ".join(redaction.without_secrets(["--first", *shlex.split(line), "--last"]))
    assert "cret" not in shown.replace("-secret", "").replace("_secret", "")
    assert "***" in shown
    assert shown.startswith("--first ")
    assert shown.endswith(" --last")


def test_which_secrets_a_line_holds() -> None:
    """The values alone, each of a list by itself."""
    line = """env A_TOKEN=s1 --api-key s2 --j '{"auth": ["s3", {"x": 4}], "n": "no"}' --admin-api-key=s5 --port 1"""
    assert redaction.secrets_in(shlex.split(line)) == {"s1", "s2", "s3", "4", "s5"}


@pytest.mark.parametrize(
    "line",
    [
        "--model-path /m --port 1",
        '--json \'{"a": "b"}\'',
        "-- --x",
        "--tokenizer-path /t",
        "env A=b x",
        "--max-per-token 4",
    ],
)
def test_what_is_no_secret_is_shown(line: str) -> None:
    """Hiding everything would be easy."""
    assert redaction.without_secrets(shlex.split(line)) == shlex.split(line)


def test_the_last_of_a_row_of_secrets() -> None:
    """A flag that came without its value does not uncover the next one's."""
    assert redaction.without_secrets(["--api-key", "--api-key", "--x", "y"]) == ["--api-key", "***", "--x", "y"]
    assert redaction.without_secrets(["--api-key"]) == ["--api-key"]


@pytest.mark.parametrize(
    "given", ["--max-total-tokens", "--max-total", "--max-t", "--host", "--ho", "--max", "--z", "--m"]
)
def test_abbreviations_are_argparses(given: str) -> None:
    """Where argparse knows just our flags, it takes a beginning for exactly those that we say."""
    names = ["--max-total-tokens", "--max-running-requests", "--host", "--host-list"]
    parser = argparse.ArgumentParser(exit_on_error=False)
    for name in names:
        parser.add_argument(name)
    meant = flags.could_mean(given, names)
    try:
        parsed, rest = parser.parse_known_args([given, "v"])
    except (argparse.ArgumentError, SystemExit):  # ambiguous; which of the two depends on Python
        assert len(meant) > 1
    else:
        taken = [name for name in names if getattr(parsed, name[2:].replace("-", "_")) == "v"]
        assert (meant, bool(rest)) == (taken, not taken)


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("--revision x", "x"),
        ("--revision=x", "x"),
        ("--rev x --revision y", "y"),
        ("--other x", None),
        ("--revision", ""),
    ],
)
def test_the_value_of_a_flag(line: str, value: str | None) -> None:
    """The last one counts, as in argparse."""
    assert flags.value_of(line.split(), "--revision") == value
