"""The engine's own settings as environment variables, and the command line they make.

Names are those SGLang's users know from its flags, without a prefix. Read with the same rules as DynChunk's knobs.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dynchunk.settings import (
    PREFIX,
    Kind,
    Settings,
    SettingsError,
    decimal,
    env_name,
    from_env,
    knob,
    knob_fields,
    parse_knobs,
    text_value,
    whole,
)
from launcher import address
from launcher.flags import could_mean, name_of
from launcher.redaction import without_secrets

MOST_TOKENS = 10**9


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
    context_length: int = knob(
        512_000,
        whole(1, MOST_TOKENS, "tokens"),
        "The longest prompt and answer together.",
        "512000, or the model's own maximum where its config.json says less",
    )
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
    node_rank: int = knob(0, whole(0, address.MOST_NODE_RANK, "a host's number"), "This host's number, 0 is the head.")
    dist_init_addr: str | None = knob(
        None,
        text_value("host:port"),
        "Where the head waits for the other hosts. Required when NNODES is above 1.",
        "none",
    )
    host: str = knob(
        address.DEFAULT_HOST,
        Kind(address.host_name, "an address"),
        "The address to listen on. The image sets `0.0.0.0`.",
    )
    port: int = knob(address.DEFAULT_PORT, whole(1, address.MOST_PORT, "a port"), "The port to listen on.")
    api_key: str | None = knob(
        None,
        Kind(address.key, "a key", secret=True),
        "The key clients must send. DynChunk does not print it and keeps it out of the command line; the engine itself "
        "writes it to its log at start (`server_args=`).",
        "none",
    )
    extra_args: str | None = knob(
        None, text_value("flags as in a shell"), "More flags of the engine, quoted as in a shell.", "none"
    )
    # Which fields the operator set; the rest are defaults. Not a knob.
    explicit: frozenset[str] = field(default=frozenset(), compare=False)


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
ALIASES = {
    "--model": "--model-path",
    "--tensor-parallel-size": "--tp-size",
    "--pipeline-parallel-size": "--pp-size",
    "--nccl-init-addr": "--dist-init-addr",
}
VARIABLES = {flag: name.upper() for name, flag in FLAGS.items()}


@dataclass(frozen=True)
class Reading:
    """Both halves of the environment as far as they can be read, and every problem with them.

    unread: variables whose value is wrong; the fields behind them are at their defaults.
    """

    launch: Launch
    settings: Settings
    problems: list[str]
    unread: frozenset[str]


def read(environ: Mapping[str, str]) -> tuple[Launch, Settings]:
    """Both halves of the environment. Raises SettingsError with the problems of both."""
    reading = read_all(environ)
    if reading.problems:
        raise SettingsError(reading.problems)
    return reading.launch, reading.settings


def read_all(environ: Mapping[str, str]) -> Reading:
    """Both halves of the environment, wrong or not: so that what follows from them can be checked at the same time."""
    launched, problems = parse_knobs(Launch, environ, "")
    launch = Launch(**launched, explicit=frozenset(launched))
    ours, _ = parse_knobs(Settings, environ, PREFIX)
    settings = Settings(**ours, explicit=frozenset(ours))
    try:
        settings = from_env(environ)
    except SettingsError as error:
        problems += error.problems
    unread = frozenset(
        name
        for cls, prefix, values in ((Launch, "", launched), (Settings, PREFIX, ours))
        for name, field_name in ((env_name(f, prefix), f.name) for f in knob_fields(cls))
        if environ.get(name, "").strip() and field_name not in values
    )
    return Reading(launch, settings, problems + _contradictions(launch, unread), unread)


def _contradictions(launch: Launch, unread: frozenset[str]) -> list[str]:
    problems = []
    if launch.model_path is None:
        problems.append("MODEL_PATH is not set; name the folder of the model to serve")
    if launch.node_rank >= launch.nnodes and "NNODES" not in unread:
        hosts = f"NNODES={launch.nnodes}" if "nnodes" in launch.explicit else f"NNODES, {launch.nnodes} by default"
        problems.append(f"NODE_RANK={launch.node_rank} is not below {hosts}; hosts are numbered from 0")
    if launch.nnodes > 1 and launch.dist_init_addr is None:
        problems.append("NNODES is above 1, but DIST_INIT_ADDR is not set; give every host the head's host:port")
    try:
        words = extra_flags(launch)
    except ValueError as error:
        return [*problems, f"EXTRA_ARGS cannot be read as shell words: {error}"]
    # argparse would let the last one win, and the table that serve prints would be wrong.
    return problems + [taken for word in words if (taken := _taken(name_of(word)))]


def _taken(given: str) -> str | None:
    """Why this flag may not be in EXTRA_ARGS, or None."""
    meant = could_mean(given, [*VARIABLES, *ALIASES])
    if not meant:
        return None
    variables = sorted({VARIABLES[ALIASES.get(flag, flag)] for flag in meant})
    if len(variables) > 1:
        return f"EXTRA_ARGS contains {given}, which may be short for {' or '.join(meant)}; write the flag in full"
    short_for = "" if given in meant else f", which may be short for {meant[0]}"
    return f"EXTRA_ARGS contains {given}{short_for}; set {variables[0]} instead"


def extra_flags(launch: Launch) -> list[str]:
    """EXTRA_ARGS as words. Raises ValueError on unbalanced quotes."""
    return shlex.split(launch.extra_args or "")


def engine_flags(launch: Launch) -> list[str]:
    """The engine's flags: what is set, and what has a default of ours. Without the key: see serve.py."""
    flags: list[str] = []
    for name, flag in FLAGS.items():
        value: Any = None if name == "api_key" else getattr(launch, name)
        if isinstance(value, str) and value.startswith("-"):
            flags.append(f"{flag}={value}")  # as a word of its own it would be read as a flag
        elif value is not None:
            flags += [flag, str(value)]
    return flags + extra_flags(launch)


def rows(cls: type[Any], values: Any, prefix: str, origin: Callable[[str], str]) -> list[tuple[str, str, str]]:
    """(name, value in force, where it comes from) of every knob; secrets as `set`. origin: variable -> where from."""
    table = []
    for f in knob_fields(cls):
        name = env_name(f, prefix)
        value = getattr(values, f.name)
        if f.metadata["kind"].secret:
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
            shown = address.without_user_info(str(value))
        table.append((name, shown, origin(name)))
    return table
