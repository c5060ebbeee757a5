"""requirements/*.txt: a clone that nobody has changed installs what its checks were clean with."""

from __future__ import annotations

import re
from importlib import metadata

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.conftest import ROOT

FILES = sorted((ROOT / "requirements").glob("*.txt"))
LEFT_OUT = {"certifi"}  # constraints.txt says why


def lines(name: str) -> list[str]:
    """What a requirements file asks for, without its comments."""
    text = (ROOT / "requirements" / name).read_text(encoding="utf-8")
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def pinned(name: str) -> set[str]:
    """The packages that a requirements file has a version for."""
    return {canonicalize_name(line.partition("==")[0]) for line in lines(name) if not line.startswith("-")}


@pytest.mark.parametrize("name", [file.name for file in FILES])
def test_every_line_is_pinned(name: str) -> None:
    """A package has one exact version; other lines name another of these files."""
    known = "|".join(re.escape(file.name) for file in FILES)
    for line in lines(name):
        assert re.fullmatch(rf"[\w.-]+==\d[\w.]*|-[cr] ({known})", line), line


@pytest.mark.parametrize("name", ["test.txt", "tools.txt"])
def test_the_constraints_are_in_force(name: str) -> None:
    """Whichever of the files is installed, what it brings along is held too."""
    assert "-c constraints.txt" in lines(name)


def test_what_comes_along_is_pinned() -> None:
    """All that the named packages require, and these again, as this environment has it, is in constraints.txt."""
    named = pinned("test.txt") | pinned("tools.txt")
    todo = [(name, "") for name in named]
    found = set()
    while todo:
        name, extra = todo.pop()
        if (name, extra) in found:
            continue
        found.add((name, extra))
        for text in metadata.requires(name) or ():
            wanted = Requirement(text)
            if wanted.marker is None or wanted.marker.evaluate({"extra": extra}):
                todo += [(canonicalize_name(wanted.name), more) for more in ("", *wanted.extras)]
    assert {name for name, _ in found} - named - LEFT_OUT == pinned("constraints.txt")
