"""The model's own longest context, from its config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from launcher import model_context

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}


@pytest.mark.parametrize(
    ("config", "tokens"),
    [
        ({"max_position_embeddings": 32_768}, 32_768),
        ({"text_config": {"max_position_embeddings": 128_000}, "max_position_embeddings": 1}, 128_000),
        ({"thinker_config": {"text_config": {"max_position_embeddings": 9}}, "text_config": {}}, 9),
        ({"max_position_embeddings": 4096, "seq_length": 8192}, 8192),
        ({"max_position_embeddings": 131_072, "rope_scaling": YARN}, 131_072),
        ({"max_position_embeddings": 32_768, "rope_scaling": {"type": "yarn", "factor": 4.0}}, 32_768),
        ({"max_position_embeddings": 4096, "rope_scaling": {"type": "linear", "factor": 2.0}}, 8192),
        ({"max_position_embeddings": 4096, "rope_parameters": {"rope_type": "dynamic", "factor": 2}}, 8192),
        ({"max_position_embeddings": 131_072, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 131_072),
        ({"max_position_embeddings": 4096, "rope_scaling": {"type": "linear", "factor": 0}}, 4096),
        ({"max_position_embeddings": 4096, "rope_scaling": {"type": "linear", "factor": 1e-9}}, 4096),
        ({"max_position_embeddings": 4096, "rope_scaling": None}, 4096),
        ({}, None),
        ({"max_position_embeddings": "many"}, None),
        ({"max_position_embeddings": float("inf")}, None),
        ({"max_position_embeddings": float("nan")}, None),
        ({"max_position_embeddings": 10**400}, None),
        ({"max_position_embeddings": -1}, None),
        ({"max_position_embeddings": 4096, "rope_scaling": {"type": "linear", "factor": float("inf")}}, None),
        ({"max_position_embeddings": 4096, "rope_scaling": {"type": ["linear"], "factor": 2}}, 4096),
        ({"text_config": 5, "max_position_embeddings": 4096}, 4096),
        ({"max_position_embeddings": 4096, "rope_scaling": "odd"}, None),
        ([], None),
    ],
)
def test_what_a_config_says(tmp_path: Path, config: Any, tokens: int | None) -> None:
    """As the engine reads it, each value compared with what its own code made of the same file."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert model_context.own_maximum(str(tmp_path), [], {}) == tokens


def test_overrides_on_the_command_line(tmp_path: Path) -> None:
    """The engine puts them over the file, so we do; what is no JSON is the engine's to refuse."""
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 4096}')
    words = ["--json-model-override", '{"max_position_embeddings": 65536}']
    assert model_context.own_maximum(str(tmp_path), words, {}) == 65_536
    assert model_context.own_maximum(str(tmp_path), ["--json-model-override-args={"], {}) is None


@pytest.mark.parametrize("content", [None, b"{", b"\xff", b"[" * 100_000])
def test_a_config_that_cannot_be_read(tmp_path: Path, content: bytes | None) -> None:
    """Nothing is known then, and nothing is said."""
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    assert model_context.own_maximum(str(tmp_path), [], {}) is None


@pytest.mark.parametrize(
    ("variables", "folder"),
    [
        ({"HF_HUB_CACHE": "{}/c"}, "c"),
        ({"HF_HOME": "{}/h"}, "h/hub"),
        ({"XDG_CACHE_HOME": "{}/x"}, "x/huggingface/hub"),
    ],
)
def test_a_name_whose_model_is_in_the_cache(tmp_path: Path, variables: dict[str, str], folder: str) -> None:
    """A model that was downloaded before is read where the hub's client keeps it, at the revision asked for."""
    cache = tmp_path / folder / "models--org--name"
    for commit, tokens in (("abc", 1000), ("def", 2000)):
        (cache / "snapshots" / commit).mkdir(parents=True)
        (cache / "snapshots" / commit / "config.json").write_text(json.dumps({"max_position_embeddings": tokens}))
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("abc\n")
    environ = {name: value.format(tmp_path) for name, value in variables.items()}
    assert model_context.own_maximum("org/name", [], environ) == 1000
    assert model_context.own_maximum("org/name", ["--revision", "def"], environ) == 2000
    assert model_context.own_maximum("org/other", [], environ) is None


@pytest.mark.parametrize(
    ("path", "name"), [("org/name", True), ("/m/x", False), ("./m", False), ("~/m", False), ("s3://b/m", False)]
)
def test_names_and_paths(path: str, name: bool) -> None:
    """Only a name is looked up in the cache."""
    assert model_context.is_a_name(path) is name
