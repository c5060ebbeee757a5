"""The profiles under docker-images/, as the tests of them see them."""

from __future__ import annotations

from pathlib import Path

from launcher import dotenv
from tests.conftest import ROOT

IMAGES = ROOT / "docker-images"
NAMES = sorted(path.parent.name for path in IMAGES.glob("*/env") if path.parent.name != "cpu-reference")
# What a host adds of its own.
HOST = {"MODEL_PATH": "/models/big", "NODE_RANK": "0", "DIST_INIT_ADDR": "10.0.0.1:5000"}


def file(name: str) -> Path:
    return IMAGES / name / "env"


def plain(name: str) -> dict[str, str]:
    """A profile as it is, on a host."""
    return HOST | dotenv.load(file(name), {})


def context_parallel(name: str) -> dict[str, str]:
    """A profile with its opt-in lines for context-parallel prefill."""
    _, _, opt_in = file(name).read_text().partition("# Context-parallel prefill, opt-in")
    lines = [line.removeprefix("#") for line in opt_in.splitlines() if line.startswith("#") and line[1:2].isupper()]
    return plain(name) | dotenv.parse("\n".join(lines), {})
