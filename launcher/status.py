"""What the running server reports of DynChunk."""

from __future__ import annotations

import json
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table


class StatusError(Exception):
    """The server could not be asked. The message says why and what to do."""


def fetch(url: str, api_key: str | None) -> dict[str, Any]:
    """GET /server_info. Raises StatusError."""
    answer: dict[str, Any] = _ask("GET", url, "/server_info", api_key)
    return answer


def change_budget(url: str, api_key: str | None, budget: int) -> bool:
    """POST /set_internal_state. False if the server refuses the value; its log says why. Raises StatusError."""
    body = {"server_args": {"dynchunk_budget": budget}}
    return all(_ask("POST", url, "/set_internal_state", api_key, body))


def _ask(method: str, url: str, path: str, api_key: str | None, body: Any = None) -> Any:
    """One request to the server, its answer read as JSON. Raises StatusError."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        response = httpx.request(method, url + path, headers=headers, json=body, timeout=30)
    except httpx.HTTPError as error:
        raise StatusError(f"no answer from {url}: {error or type(error).__name__}; is the server up?") from error
    if response.status_code in (401, 403):
        raise StatusError(f"{url} refused the key; set API_KEY to the server's key")
    if response.status_code != httpx.codes.OK:
        raise StatusError(f"{url}{path} answered {response.status_code}")
    try:
        return response.json()
    except json.JSONDecodeError as error:
        raise StatusError(f"{url}{path} did not answer in JSON; is this an SGLang server?") from error


def dynchunk_states(server_info: dict[str, Any]) -> list[dict[str, Any]]:
    """DynChunk's own part of the answer, one for each data-parallel replica; empty where it is not active."""
    states = server_info.get("internal_states") or []
    return [state["dynchunk"] for state in states if "dynchunk" in state]


def show(server_info: dict[str, Any], console: Console) -> bool:
    """Print the report; False if DynChunk is not active in the server."""
    states = dynchunk_states(server_info)
    if not states:
        console.print(
            "DynChunk is not active in this server: it runs the stock engine (DYNCHUNK_MODE=off), or was started "
            "without DynChunk's boot folder on PYTHONPATH"
        )
        return False
    for state in states:
        effective = state.get("effective", {})
        console.print(
            f"DynChunk {state['version']}, mode {state['mode']}, sglang {state['engine']}, "
            f"rank {state['rank']}, pid {state['pid']}",
            markup=False,
        )
        console.print(str(effective.get("summary", "no scheduler yet")), markup=False, soft_wrap=True)
        table = Table()
        for heading in ("hook", "outcome", "detail"):
            table.add_column(heading, overflow="fold")
        for name, entry in state.get("hooks", {}).items():
            table.add_row(name, entry["outcome"], entry["detail"])
        console.print(table)
        released = state.get("empty_cache")
        if released:
            console.print(f"cache released {released['calls']} times, {released['ms']:,.0f} ms in all")
    return True
