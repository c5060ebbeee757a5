"""The engine's own settings as environment variables, and the command line they make.

Names are those SGLang's users know from its flags, without a prefix. Read with the same rules as DynChunk's knobs.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dynchunk.settings import (
    Settings,
    SettingsError,
    decimal,
    from_env,
    knob,
    knob_fields,
    parse_knobs,
    text_value,
    whole,
)

MOST_TOKENS = 10**9
SECRET_ENDINGS = ("-key", "-password", "-secret", "-token")


@dataclass(frozen=True)
class Launch:
    """What `serve` turns into the engine's flags."""

    model_path: str | None = knob(
        None, text_value("a folder or a model name"), "The model to serve. Required.", "none, required"
    )
    served_model_name: str | None = knob(None, text_value("a name"), "The name clients ask for.", "the model path")
    chunked_prefill_size: int = knob(
        2048,
        whole(-1, MOST_TOKENS, "tokens"),
        "The engine's chunk size: DynChunk's largest chunk. `-1` turns chunking off, which DynChunk refuses.",
    )
    context_length: int = knob(512_000, whole(1, MOST_TOKENS, "tokens"), "The longest prompt and answer together.")
    mem_fraction_static: float | None = knob(
        None, decimal(0.01, 0.99, "a share"), "Share of the GPU memory for weights and KV cache.", "the engine decides"
    )
    max_total_tokens: int | None = knob(
        None, whole(1, MOST_TOKENS, "tokens"), "Size of the KV cache.", "the engine decides"
    )
    max_running_requests: int | None = knob(
        None, whole(1, 10**6, "requests"), "Requests served at once.", "the engine decides"
    )
    page_size: int | None = knob(None, whole(1, 65_536, "tokens"), "The engine's KV page.", "the engine decides")
    tp_size: int = knob(1, whole(1, 4096, "ranks"), "Tensor parallelism.")
    pp_size: int = knob(1, whole(1, 4096, "ranks"), "Pipeline parallelism.")
    nnodes: int = knob(1, whole(1, 4096, "hosts"), "Hosts that serve this model together.")
    node_rank: int = knob(0, whole(0, 4095, "a host's number"), "This host's number, 0 is the head.")
    dist_init_addr: str | None = knob(
        None,
        text_value("host:port"),
        "Where the head waits for the other hosts. Required when NNODES is above 1.",
        "none",
    )
    host: str = knob("127.0.0.1", text_value("an address"), "The address to listen on. The image sets `0.0.0.0`.")
    port: int = knob(30_000, whole(1, 65_535, "a port"), "The port to listen on.")
    api_key: str | None = knob(None, text_value("a key"), "The key clients must send. Never printed.", "none")
    extra_args: str | None = knob(
        None, text_value("flags as in a shell"), "More flags of the engine, quoted as in a shell.", "none"
    )


# Field -> flag, in the order of the command line.
FLAGS = {
    "model_path": "--model-path",
    "served_model_name": "--served-model-name",
    "chunked_prefill_size": "--chunked-prefill-size",
    "context_length": "--context-length",
    "mem_fraction_static": "--mem-fraction-static",
    "max_total_tokens": "--max-total-tokens",
    "max_running_requests": "--max-running-requests",
    "page_size": "--page-size",
    "tp_size": "--tp-size",
    "pp_size": "--pp-size",
    "nnodes": "--nnodes",
    "node_rank": "--node-rank",
    "dist_init_addr": "--dist-init-addr",
    "host": "--host",
    "port": "--port",
    "api_key": "--api-key",
}
# Other spellings that SGLang accepts for flags we set.
ALIASES = {"--model": "--model-path", "--tensor-parallel-size": "--tp-size", "--tp": "--tp-size"} | {
    "--pipeline-parallel-size": "--pp-size",
    "--pp": "--pp-size",
}


def read(environ: Mapping[str, str]) -> tuple[Launch, Settings]:
    """Both halves of the environment. Raises SettingsError with the problems of both."""
    values, problems = parse_knobs(Launch, environ, "")
    launch = Launch(**values)
    try:
        settings = from_env(environ)
    except SettingsError as error:
        problems += error.problems
    problems += _contradictions(launch)
    if problems:
        raise SettingsError(problems)
    return launch, settings


def _contradictions(launch: Launch) -> list[str]:
    problems = []
    if launch.model_path is None:
        problems.append("MODEL_PATH is not set; name the folder of the model to serve")
    if launch.node_rank >= launch.nnodes:
        problems.append(f"NODE_RANK={launch.node_rank} is not below NNODES={launch.nnodes}; hosts are numbered from 0")
    if launch.nnodes > 1 and launch.dist_init_addr is None:
        problems.append("NNODES is above 1, but DIST_INIT_ADDR is not set; give every host the head's host:port")
    try:
        words = extra_flags(launch)
    except ValueError as error:
        return [*problems, f"EXTRA_ARGS cannot be read as shell words: {error}"]
    given = [word.partition("=")[0] for word in words]
    settable = {flag: name.upper() for name, flag in FLAGS.items()}
    # argparse would let the last one win, and the table that serve prints would be wrong.
    return problems + [
        f"EXTRA_ARGS contains {flag}; set {settable[ALIASES.get(flag, flag)]} instead"
        for flag in given
        if ALIASES.get(flag, flag) in settable
    ]


def extra_flags(launch: Launch) -> list[str]:
    """EXTRA_ARGS as words. Raises ValueError on unbalanced quotes."""
    return shlex.split(launch.extra_args or "")


def engine_flags(launch: Launch) -> list[str]:
    """The engine's flags: what is set, and what has a default of ours."""
    flags: list[str] = []
    for name, flag in FLAGS.items():
        value: Any = getattr(launch, name)
        if value is not None:
            flags += [flag, str(value)]
    return flags + extra_flags(launch)


def without_secrets(words: Sequence[str]) -> list[str]:
    """A command line that may be shown."""
    shown: list[str] = []
    hide_next = False
    for word in words:
        flag, separator, _ = word.partition("=")
        secret = flag.startswith("--") and flag.endswith(SECRET_ENDINGS)
        if hide_next:
            shown.append("***")
        else:
            shown.append(f"{flag}=***" if secret and separator else word)
        hide_next = secret and not separator and not hide_next
    return shown


def rows(cls: type[Any], values: Any, environ: Mapping[str, str], prefix: str) -> list[tuple[str, str, str]]:
    """(name, value in force, where it comes from) of every knob; secrets as `set`."""
    table = []
    for f in knob_fields(cls):
        name = prefix + f.name.upper()
        given = bool(environ.get(name, "").strip())
        value = getattr(values, f.name)
        if f.name == "api_key":
            shown = "not set" if value is None else "set, not shown"
        elif value is None:
            shown = str(f.metadata["shown_default"])
        elif f.name == "extra_args":
            shown = shlex.join(without_secrets(shlex.split(value)))
        elif isinstance(value, bool):
            shown = str(int(value))
        elif isinstance(value, int) and f.name != "port":
            shown = f"{value:,}"
        else:
            shown = str(value)
        table.append((name, shown, "environment" if given else "default"))
    return table
