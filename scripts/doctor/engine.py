"""The engine that this Python would start: found, supported, as our contracts know it; and one that runs already."""

from __future__ import annotations

import json
from importlib import metadata
from typing import Any

from dynchunk.patches import check, contracts
from launcher import status
from scripts.doctor.verdict import Check, fail, not_checked, ok, warn

MOST_NAMED = 3


def checks(*, in_container: bool) -> list[Check]:
    """Package metadata and source text only: nothing of the engine is imported."""
    try:
        folder = check.engine_folder()
    except LookupError as error:
        cure = "start from an SGLang image, or pip install -r requirements/engine.txt"
        if in_container:
            return [fail("engine", str(error), cure)]
        return [warn("engine", f"{error}; that is right where it runs in a container", f"run doctor there, or {cure}")]
    found = check.engine_version(folder)
    return [version(found), _contracts(check.problems_of(folder)), *_companions()]


def version(found: str) -> Check:
    """Whether this engine version is known to us."""
    name = "engine"
    if found in contracts.REFUSED_VERSIONS:
        cure = f"use one of {', '.join(contracts.TESTED_VERSIONS)}"
        return fail(name, f"sglang {found} is not supported: {contracts.REFUSED_VERSIONS[found]}", cure)
    if found in contracts.TESTED_VERSIONS:
        return ok(name, f"sglang {found}")
    return warn(
        name,
        f"sglang {found} is none of the tested {', '.join(contracts.TESTED_VERSIONS)}; the contracts below decide",
        "compare answers and run memguard before users do",
    )


def _contracts(problems: list[str]) -> Check:
    total = sum(len(each) for each in contracts.CONTRACTS.values())
    if not problems:
        return ok("contracts", f"{total} of {total} functions that DynChunk relies on are as it knows them")
    more = f" and {len(problems) - MOST_NAMED} more" if len(problems) > MOST_NAMED else ""
    return fail(
        "contracts",
        "; ".join(problems[:MOST_NAMED]) + more,
        "a tested engine version, or DYNCHUNK_MODE=off; python -m dynchunk.patches.check lists all",
    )


def _companions() -> list[Check]:
    wanted = ("torch", "triton", "flashinfer-python")
    found = [f"{name} {found.version}" for name in wanted for found in metadata.distributions(name=name)]
    return [ok("versions", ", ".join(found))] if found else []


def running(url: str, api_key: str | None) -> list[Check]:
    """What a server that runs at `url` says of its hooks; one line where none does."""
    name = "running server"
    try:
        info = status.fetch(url, api_key)
    except (status.StatusError, json.JSONDecodeError) as error:
        return [not_checked(name, str(error))]
    states = status.dynchunk_states(info)
    if not states:
        return [
            fail(
                name,
                f"{url} runs the stock engine: DynChunk is not in it",
                "start it with ./dynchunk serve, or with adapter/boot on PYTHONPATH; check SGLANG_PLUGINS",
            )
        ]
    return [_running(url, state) for state in states]


def _running(url: str, state: dict[str, Any]) -> Check:
    name = "running server"
    hooks = state.get("hooks", {})
    refused = [f"{hook}: {entry['detail']}" for hook, entry in hooks.items() if entry["outcome"] == "refused"]
    if state.get("degraded") or refused:
        reason = "; ".join(refused) or "its own sizes count"
        return fail(name, f"{url}, rank {state['rank']}: {reason}", "the server's log says why; start it again")
    applied = sum(entry["outcome"] == "applied" for entry in hooks.values())
    return ok(name, f"{url}, rank {state['rank']}, mode {state['mode']}: {applied} hooks applied, none refused")
