"""The documents say what the code says."""

from __future__ import annotations

import re

import pytest

from dynchunk.settings import Settings, env_name, knob_fields
from launcher import environment
from scripts import render_docs
from tests.conftest import ROOT


def test_generated_parts_are_up_to_date() -> None:
    """README's tables and .env.example are what the declarations make of them."""
    assert render_docs.stale() == []


def test_env_example_loads() -> None:
    """With every line of .env.example uncommented and empty, everything is at its default."""
    lines = (ROOT / ".env.example").read_text().splitlines()
    names = [line[1:].rstrip("=") for line in lines if re.fullmatch(r"#[A-Z_]+=", line)]
    expected = [env_name(f) for f in knob_fields(Settings)]
    expected += [env_name(f, "") for f in knob_fields(environment.Launch)]
    assert names == expected
    launch, settings = environment.read(dict.fromkeys(names, "") | {"MODEL_PATH": "/m"})
    assert settings == Settings()
    assert launch == environment.Launch(model_path="/m")


@pytest.mark.parametrize("document", ["README.md", "ARCHITECTURE.md", "CHANGELOG.md"])
def test_files_that_documents_name_exist(document: str) -> None:
    """A path in backticks or in a link points at something in the checkout."""
    text = (ROOT / document).read_text()
    named = set(re.findall(r"\]\(([\w./-]+)\)", text))
    named |= set(re.findall(r"`(\.?/?(?:scripts|adapter|launcher|tests|docker-images|requirements)/[\w./-]*)`", text))
    for name in named:
        assert (ROOT / name).exists(), f"{document} names {name}"
