"""The longest context that a model on this machine is made for, read from its config.json as the engine reads it.

The engine refuses to start with a longer one, so it is worth knowing before. A model that is only a name may not be
here yet; then nothing is known, and nothing is fetched.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from launcher.flags import value_of

# The engine takes the first of these that is there.
LENGTHS = ("max_sequence_length", "seq_length", "max_seq_len", "model_max_length", "max_position_embeddings")
# Where a model of several parts keeps its language model, the first one that is there.
LANGUAGE_MODELS = ("thinker_config", "llm_config", "language_config", "text_config")


def own_maximum(model_path: str, words: Sequence[str], environ: Mapping[str, str]) -> int | None:
    """Tokens, or None where it is not known: no such file here, or nothing in it that says.

    words: the engine's further flags; `--json-model-override-args` changes what the file says.
    """
    folder = _folder(model_path, words, environ)
    if folder is None:
        return None
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        override = json.loads(value_of(words, "--json-model-override-args") or "{}")
    except (OSError, ValueError):
        return None
    if not isinstance(config, dict) or not isinstance(override, dict):
        return None
    return _maximum(config | override)


def is_a_name(model_path: str) -> bool:
    """Whether this is a model's name on a hub (`org/name`) rather than a folder's path."""
    return not Path(model_path).exists() and not model_path.startswith((".", "/", "~")) and "://" not in model_path


def _folder(model_path: str, words: Sequence[str], environ: Mapping[str, str]) -> Path | None:
    """The model's folder: itself, or where the hub's cache keeps the model of that name."""
    if not is_a_name(model_path):
        return Path(model_path)
    cache = _hub_cache(environ) / ("models--" + model_path.replace("/", "--"))
    revision = value_of(words, "--revision") or "main"
    try:
        commit = (cache / "refs" / revision).read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        commit = revision
    return cache / "snapshots" / commit


def _hub_cache(environ: Mapping[str, str]) -> Path:
    """Where the hub's client keeps models; the same variables in the same order."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if environ.get(name):
            return Path(environ[name]).expanduser()
    home = environ.get("HF_HOME") or str(Path(environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface")
    return Path(home).expanduser() / "hub"


def _maximum(config: dict[str, Any]) -> int | None:
    text = _language_model(config)
    scaling = text.get("rope_scaling") or text.get("rope_parameters") or {}
    length = next((text[name] for name in LENGTHS if text.get(name) is not None), None)
    if not isinstance(scaling, dict) or not isinstance(length, int | float):
        return None
    factor = scaling.get("factor", 1)
    # Only these stretch what the file says. The others say the stretched length, or are told what it was before.
    stretches = _kind(scaling) in {"linear", "dynamic"} and "original_max_position_embeddings" not in scaling
    return int(length * factor) if stretches and isinstance(factor, int | float) else int(length)


def _kind(scaling: dict[str, Any]) -> object:
    return scaling.get("rope_type") or scaling.get("type")


def _language_model(config: dict[str, Any]) -> dict[str, Any]:
    for name in LANGUAGE_MODELS:
        part = config.get(name)
        if isinstance(part, dict):
            return _language_model(part) if name == "thinker_config" else part
    return config
