"""The engine that this Python would start: found, supported, as our contracts know it; and one that runs already."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from dynchunk.patches import check, contracts
from launcher import engine_python, serve, status
from scripts.doctor.verdict import Check, fail, not_checked, ok, warn

MOST_NAMED = 3
_WHERE = "from importlib.util import find_spec; print(find_spec('sglang').submodule_search_locations[0])"


def checks(environ: Mapping[str, str], *, in_container: bool) -> list[Check]:
    """Package metadata and source text only: nothing of the engine is imported. environ: that of `serve`."""
    python, asked = engine_python.find(serve.engine_environ(environ))
    if python is None:
        missing = f"SGLang is in none of the Pythons here: {', '.join(asked)}"
        cure = "start from an SGLang image, or pip install -r requirements/engine.txt"
        if in_container:
            return [fail("engine", missing, cure)]
        return [
            warn("engine", f"{missing}; that is right where it runs in a container", f"run doctor there, or {cure}")
        ]
    folder = engine_folder(python)
    return [version(check.engine_version(folder)), _contracts(check.problems_of(folder)), *_companions(folder)]


def engine_folder(python: str) -> Path:
    """Where a Python that has SGLang finds it: the folder that holds `sglang/`."""
    if python == sys.executable:
        return check.engine_folder()
    done = subprocess.run([python, "-c", _WHERE], capture_output=True, text=True, timeout=60, check=True)
    return Path(done.stdout.splitlines()[-1]).parent


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


def _companions(folder: Path) -> list[Check]:
    wanted = ("torch", "triton", "flashinfer-python")
    found = [f"{n} {found.version}" for n in wanted for found in metadata.distributions(name=n, path=[str(folder)])]
    return [ok("versions", ", ".join(found))] if found else []


def running(url: str, api_key: str | None) -> list[Check]:
    """What a server that runs at `url` says of its hooks; one line where none does."""
    name = "running server"
    try:
        info = status.fetch(url, api_key, ours=True)
    except status.StatusError as error:
        return [not_checked(name, str(error))]
    states = status.dynchunk_states(info)
    if not states:
        return [
            fail(
                name,
                f"{status.shown(url)} runs the stock engine: DynChunk is not in it",
                "start it with ./dynchunk serve, or with adapter/boot on PYTHONPATH; check SGLANG_PLUGINS",
            )
        ]
    return [_running(url, state) for state in states]


def _running(url: str, state: dict[str, Any]) -> Check:
    name = "running server"
    named, hooks = status.shown(url), state.get("hooks", {})
    refused = [f"{hook}: {entry['detail']}" for hook, entry in hooks.items() if entry["outcome"] == "refused"]
    if state.get("degraded") or refused:
        reason = "; ".join(refused) or "its own sizes count"
        return fail(name, f"{named}, rank {state['rank']}: {reason}", "the server's log says why; start it again")
    applied = sum(entry["outcome"] == "applied" for entry in hooks.values())
    return ok(name, f"{named}, rank {state['rank']}, mode {state['mode']}: {applied} hooks applied, none refused")
