"""SGLang without a GPU, through its own extension points, for demonstrations and tests.

The two functions here are the entry points that SGLang calls in every process in which this folder is on
PYTHONPATH. On any other platform they must leave no trace, so this file imports nothing of SGLang: what does
is imported only after SGLANG_PLATFORM has named this platform.
"""

import os

NAME = "dynchunk_reference"
"""The value of SGLANG_PLATFORM, and the value of --attention-backend."""


def selected() -> bool:
    """Whether the environment asks for this platform by name; having it installed is not asking."""
    return os.environ.get("SGLANG_PLATFORM") == NAME


def activate() -> str | None:
    """Entry point `sglang.srt.platforms`: the platform class by name, or None to stay out of the way."""
    return f"{__name__}.platform:ReferencePlatform" if selected() else None


def register() -> None:
    """Entry point `sglang.srt.plugins`: make `--attention-backend dynchunk_reference` known to this process."""
    if not selected():
        return
    from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES, add_attention_backend_choices
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    from dynchunk_reference.older_engines import register_hooks

    if NAME in ATTENTION_BACKEND_CHOICES:
        return
    register_hooks()
    add_attention_backend_choices([NAME])
    register_attention_backend(NAME)(_create_backend)


def _create_backend(model_runner: object) -> object:
    """What the engine calls in a worker; late, because the other processes have no use for the backend."""
    from dynchunk_reference.attention import ReferenceAttentionBackend

    return ReferenceAttentionBackend(model_runner)
