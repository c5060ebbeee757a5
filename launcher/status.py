"""What the running server reports of DynChunk."""

from __future__ import annotations

import ipaddress
import re
from typing import Any

import httpx

from dynchunk import values
from dynchunk.shortened import shortened
from launcher import tables

TIMEOUT_S = 30
MOST_MS = 10**12  # thirty years; beyond it, it is no time
_LOGIN = re.compile(r"^(\w+://)?.*@", re.DOTALL)


class StatusError(Exception):
    """The server could not be asked. The message says why and what to do."""


def fetch(url: str, api_key: str | None, *, ours: bool = False) -> dict[str, Any]:
    """GET /server_info. ours: as for `_ask`. Raises StatusError."""
    answer = _ask("GET", url, "/server_info", api_key, ours=ours)
    if not isinstance(answer, dict):
        raise StatusError(f"{shown(url)}/server_info: not SGLang's answer; is this an SGLang server?")
    return answer


def change_budget(url: str, api_key: str | None, budget: int, *, ours: bool = False) -> bool:
    """POST /set_internal_state. False if the server refuses the value; its log says why. Raises StatusError."""
    body = {"server_args": {"dynchunk_budget": budget}}
    answer = _ask("POST", url, "/set_internal_state", api_key, body, ours=ours)
    if not isinstance(answer, list):
        raise StatusError(f"{shown(url)}/set_internal_state: not SGLang's answer; is this an SGLang server?")
    return bool(answer) and all(answer)


def shown(url: str) -> str:
    """A server's URL without the name and password in it."""
    return tables.printable(shortened(_LOGIN.sub(r"\1***@", url)))


def _ask(method: str, url: str, path: str, api_key: str | None, body: Any = None, *, ours: bool) -> Any:
    """One request to the server, its answer read as JSON. ours: as for `answer`. Raises StatusError."""
    named = shown(url)
    response = answer(method, url, path, api_key, body, ours=ours)
    if response.status_code != httpx.codes.OK:
        raise StatusError(f"{named}{path} answered {response.status_code}")
    try:
        return response.json()
    except ValueError as error:
        raise StatusError(f"{named}{path} did not answer in JSON; is this an SGLang server?") from error


def answer(
    method: str,
    url: str,
    path: str,
    api_key: str | None,
    body: Any = None,
    *,
    ours: bool,
    timeout_s: float = TIMEOUT_S,
    follow_redirects: bool = False,
) -> httpx.Response:
    """The server's answer, whatever its status, but for a key that it refuses. Raises StatusError.

    ours: the address is HOST and PORT of our own settings. There and at loopback addresses no proxy of the environment
    is asked: it would answer in the place of a server that it cannot reach.
    """
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    named = shown(url)
    try:
        whole = httpx.URL(url + path)
        response = httpx.request(
            method,
            whole,
            headers=headers,
            json=body,
            timeout=timeout_s,
            trust_env=not (ours or is_loopback(whole.host)),
            follow_redirects=follow_redirects,
        )
    except (httpx.InvalidURL, httpx.UnsupportedProtocol, ValueError) as error:
        # Without the library's own words, which quote parts of it.
        raise StatusError(f"{named} is not an address like http://127.0.0.1:30000") from error
    except httpx.HTTPError as error:
        why = tables.printable(error) or type(error).__name__
        raise StatusError(f"no answer from {named}: {why}; is the server up?") from error
    if response.status_code in (401, 403):
        raise StatusError(f"{named} refused the key; set API_KEY to the server's key")
    return response


def is_loopback(host: str) -> bool:
    """Whether a URL's host is this machine by its loopback address or name."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def dynchunk_states(server_info: dict[str, Any]) -> list[dict[str, Any]]:
    """DynChunk's own part of the answer, one for each data-parallel replica; empty where it is not active."""
    states = server_info.get("internal_states")
    found = [state.get("dynchunk") for state in states if isinstance(state, dict)] if isinstance(states, list) else []
    return [state for state in found if isinstance(state, dict)]


def show(server_info: dict[str, Any]) -> bool:
    """Print the report; False if DynChunk is not active in the server."""
    states = dynchunk_states(server_info)
    if not states:
        print(
            "DynChunk is not active in this server: it runs the stock engine. Either DYNCHUNK_MODE is off, or report "
            "(its log then says what would be done); or it was started without DynChunk's boot folder on PYTHONPATH, "
            "and without the plugin too, which SGLANG_PLUGINS leaves out where it is set and does not name dynchunk"
        )
        return False
    for state in states:
        print(
            tables.printable(
                f"DynChunk {_of(state, 'version')}, mode {_of(state, 'mode')}, sglang {_of(state, 'engine')}, "
                f"rank {_of(state, 'rank')}, pid {_of(state, 'pid')}"
            )
        )
        effective = _members(state, "effective")
        print(tables.printable(effective.get("summary", "no scheduler yet")))
        in_force = state.get("budget_in_force")
        if isinstance(in_force, int) and in_force != effective.get("budget", in_force):
            print(f"the budget was changed since the start: {in_force:,} token^2 are in force")
        hooks = _members(state, "hooks")
        rows = [
            (name, str(_of(_members(hooks, name), "outcome")), str(_of(_members(hooks, name), "detail")))
            for name in hooks
        ]
        if rows:
            tables.show(("hook", "outcome", "detail"), [rows])
        released = _members(state, "empty_cache")
        if released:
            print(tables.printable(f"cache released {_of(released, 'calls')} times, {_ms(released)} ms in all"))
        latency = _members(state, "latency")
        if latency.get("mode", "off") != "off":
            said = latency.get("reason") or f"{_of(latency, 'long_requests')} long requests so far"
            print(tables.printable(f"latency: {_of(latency, 'mode')}, {_of(latency, 'state')}: {said}"))
        if coefficient := _members(state, "coefficient"):
            print(tables.printable(f"memory: {_of(coefficient, 'in_words')}"))
    return True


def _members(state: dict[str, Any], name: str) -> dict[str, Any]:
    found = state.get(name)
    return found if isinstance(found, dict) else {}


def _of(state: dict[str, Any], name: str) -> Any:
    """One member; the server may run another version of DynChunk than this command."""
    found = state.get(name)
    return "?" if found is None else found


def _ms(released: dict[str, Any]) -> str:
    try:
        return f"{values.number(released.get('ms'), 0, MOST_MS):,.0f}"
    except ValueError:
        return "?"
