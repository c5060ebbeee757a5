"""The longest context that a model on this machine is made for, read from its config.json as the engine reads it.

The engine refuses to start with a longer one, so it is worth knowing before. A model that is only a name may not be
here yet; then nothing is known, and nothing is fetched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dynchunk import values
from launcher import environment
from launcher.environment import Launch
from launcher.flags import value_of

MAY_BE_LONGER = "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"
LONGEST_CONTEXT = 10**12  # what says more is a mistake, or no number at all: JSON takes 1e999
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
        config = values.parsed((folder / "config.json").read_text(encoding="utf-8"))
        override = values.parsed(value_of(words, "--json-model-override-args") or "{}")
    except (OSError, ValueError):
        return None
    if not isinstance(config, dict) or not isinstance(override, dict):
        return None
    return _maximum(config | override)


def fitted(launch: Launch, environ: Mapping[str, str], origins: dict[str, str]) -> tuple[Launch, list[str]]:
    """The default context made to fit the model; a warning where the engine will not take what is asked for."""
    asked, chosen = launch.context_length, "context_length" in launch.explicit
    try:
        words = environment.extra_flags(launch)
    except ValueError:  # reported where they are read
        words = []
    model = launch.model_path or ""
    longest = own_maximum(model, words, environ) if model else asked
    if longest is None and not chosen and is_a_name(model):
        warning = (
            f"what {model} is made for is not known before it is downloaded; where that is less than the default "
            f"CONTEXT_LENGTH of {asked:,}, the engine says so and ends: set CONTEXT_LENGTH to what it says then"
        )
        return launch, [warning]
    if longest is None or asked <= longest:
        return launch, []
    if not chosen:
        origins["CONTEXT_LENGTH"] = "the model's config.json"
        return replace(launch, context_length=longest), []
    if environ.get(MAY_BE_LONGER, "").strip().lower() in {"1", "true", "yes", "y"}:
        return launch, []
    warning = (
        f"CONTEXT_LENGTH={asked:,} is above the {longest:,} that the model's config.json says, and the engine refuses "
        f"that; lower it or leave it unset, or set {MAY_BE_LONGER}=1 if you know that the model can do it"
    )
    return launch, [warning]


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
    if not isinstance(scaling, dict):
        return None
    # Only these stretch what the file says. The others say the stretched length, or are told what it was before.
    stretches = _kind(scaling) in ("linear", "dynamic") and "original_max_position_embeddings" not in scaling
    try:
        tokens = values.number(length, 1, LONGEST_CONTEXT)
        factor = values.number(scaling.get("factor", 1), 0, LONGEST_CONTEXT) if stretches else 1
    except ValueError:
        return None
    return int(tokens * factor) or int(tokens)  # a factor that leaves no token stretches nothing


def _kind(scaling: dict[str, Any]) -> object:
    return scaling.get("rope_type") or scaling.get("type")


def _language_model(config: dict[str, Any]) -> dict[str, Any]:
    for name in LANGUAGE_MODELS:
        part = config.get(name)
        if isinstance(part, dict):
            return _language_model(part) if name == "thinker_config" else part
    return config
