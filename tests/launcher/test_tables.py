"""Tables show every text as it is, whole."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys

import pytest

from launcher import tables
from tests.conftest import ROOT, clean_environ

ODD = ["[/red]", "[bold]x[/bold]", ":smile:", "a" * 500, "[link=x]y", "\\[x]"]
CODE = (
    "import sys; from launcher import tables; "
    "tables.show(('one', 'two'), [[(word, 'end')] for word in sys.argv[1:]], 'Title')"
)


def test_in_a_pipe_each_row_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is cut, folded, or read as markup."""
    tables.show(("one", "two"), [[(odd, "end")] for odd in ODD], "Title")
    title, _, *lines = capsys.readouterr().out.splitlines()
    assert title == "Title"
    assert [line.split() for line in lines] == [[*odd.split(), "end"] for odd in ODD]


def test_a_long_value_does_not_push_the_others_away(capsys: pytest.CaptureFixture[str]) -> None:
    """The rest of its column stays together."""
    tables.show(("one", "two"), [[("a" * 500, "x"), ("b", "y")]])
    assert capsys.readouterr().out.splitlines()[-1] == "b    y"


def test_on_a_terminal_long_values_are_folded_and_whole() -> None:
    """In a table as wide as the terminal, markup shown as text."""
    master, slave = pty.openpty()
    environ = clean_environ(PYTHONPATH=f"{ROOT / 'adapter'}:{ROOT}", COLUMNS="60", TERM="xterm")
    with subprocess.Popen([sys.executable, "-c", CODE, *ODD], env=environ, stdout=slave) as process:
        os.close(slave)
        shown = b""
        try:
            while part := os.read(master, 4096):
                shown += part
        except OSError:  # the other end was closed
            pass
    assert process.returncode == 0
    os.close(master)
    lines = re.sub(r"\x1b\[[\d;]*m", "", shown.decode()).splitlines()
    assert max(map(len, lines)) <= 60
    assert shown.count(b"a") >= 500
    for odd in (o for o in ODD if len(o) < 50):
        assert any(odd in line for line in lines), odd


def test_control_characters_are_written_out() -> None:
    """A server's answer cannot steer the terminal, and a row stays a row."""
    assert tables.printable("a\x1b[2J\r\nb\u202e") == "a\\x1b[2J\\r\\nb\\u202e"
