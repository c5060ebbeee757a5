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
    names = env_example_names()
    expected = [env_name(f) for f in knob_fields(Settings)]
    expected += [env_name(f, "") for f in knob_fields(environment.Launch)]
    assert names == expected + [name for name, _, _ in render_docs.SURROUNDINGS]
    launch, settings = environment.read(dict.fromkeys(names, "") | {"MODEL_PATH": "/m"})
    assert settings == Settings()
    assert launch == environment.Launch(model_path="/m")


def test_env_example_has_what_compose_reads() -> None:
    """Every variable of the Compose files is in .env.example, and nothing is there that neither they nor we read."""
    text = (ROOT / "compose.yaml").read_text() + (ROOT / "compose.node.yaml").read_text()
    # ${NAME...} and, in a mapping, NAME without a value; $${NAME} is the container's shell's.
    read = set(re.findall(r"(?<!\$)\$\{([A-Z_]+)", text)) | set(re.findall(r"^ +([A-Z_]+):$", text, re.MULTILINE))
    assert read <= set(env_example_names())
    assert {name for name, _, _ in render_docs.SURROUNDINGS} <= read


def env_example_names() -> list[str]:
    """The names that .env.example has a line for."""
    lines = (ROOT / ".env.example").read_text().splitlines()
    return [line[1:].rstrip("=") for line in lines if re.fullmatch(r"#[A-Z_]+=", line)]


DOCUMENTS = sorted(
    str(path.relative_to(ROOT))
    for pattern in ("*.md", "docs/*.md", "docker-images/**/*.md")
    for path in ROOT.glob(pattern)
)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_files_that_documents_name_exist(document: str) -> None:
    """A path in backticks or in a link points at something in the checkout."""
    text = (ROOT / document).read_text()
    for name in set(re.findall(r"\]\(([\w./-]+)\)", text)):
        assert (ROOT / document).parent.joinpath(name).exists(), f"{document} links to {name}"
    named = set(re.findall(r"`(\.?/?(?:scripts|adapter|launcher|tests|docker-images|requirements)/[\w./-]*)`", text))
    for name in named:
        assert (ROOT / name).exists(), f"{document} names {name}"
