"""One look at /metrics, as figures for each replica of the model."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import httpx
from prometheus_client.parser import text_string_to_metric_families

from launcher import status

WAIT_S = 5
NO_METRICS = "/metrics is not there; start the engine with --enable-metrics (EXTRA_ARGS=--enable-metrics)"
# SGLang's own names, of 0.5.20 to 0.5.23.
RUNNING, QUEUED, CACHE_USE = "sglang:num_running_reqs", "sglang:num_queue_reqs", "sglang:token_usage"


class ScrapeError(Exception):
    """The server's metrics could not be read. The message says why and what to do."""


@dataclass
class Replica:
    """One data-parallel replica, as its first pipeline stage sees it. values: metric -> value; the rest by label."""

    values: dict[str, float] = field(default_factory=dict)
    floors: dict[str, float] = field(default_factory=dict)
    state: str = ""

    def get(self, name: str) -> float:
        """A value; 0 where the server does not show it (yet)."""
        return self.values.get(name, 0.0)


@dataclass
class Reading:
    """All replicas by their number, and the hooks that are not in place, by `hook on rank`."""

    replicas: dict[str, Replica]
    broken: list[str]
    model: str = ""

    @property
    def has_dynchunk(self) -> bool:
        """Whether DynChunk's metrics are among them."""
        return any(name.startswith("dynchunk_") for replica in self.replicas.values() for name in replica.values)


def fetch(url: str, api_key: str | None) -> str:
    """The text of /metrics. Raises ScrapeError."""
    named = status.shown(url)
    try:
        response = status.answer("GET", url, "/metrics", api_key, ours=True, timeout_s=WAIT_S, follow_redirects=True)
    except status.StatusError as error:
        raise ScrapeError(str(error)) from error
    if response.status_code == httpx.codes.NOT_FOUND:
        raise ScrapeError(f"{named}{NO_METRICS}")
    if response.is_error:
        raise ScrapeError(f"{named}/metrics answered {response.status_code}")
    return response.text


def parse(text: str) -> Reading:
    """Raises ScrapeError where this is no Prometheus text."""
    replicas: dict[str, Replica] = defaultdict(Replica)
    broken = []
    model = ""
    try:
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    except ValueError as error:
        raise ScrapeError(f"/metrics is not Prometheus text ({error}); is this an SGLang server?") from error
    for sample in samples:
        name, labels, value = sample.name, sample.labels, sample.value
        if name == "dynchunk_hook_applied":
            if not value:
                broken.append(f"{labels.get('hook', '?')} on {labels.get('rank', '?')}")
            continue
        # One scheduler stands for its replica, and totals are under an empty priority.
        if not name.startswith(("dynchunk_", "sglang:")) or labels.get("pp_rank", "0") != "0" or labels.get("priority"):
            continue
        if labels.get("tp_rank", "0") != "0" and not name.startswith("dynchunk_"):
            continue
        replica = replicas[labels.get("dp_rank", "0")]
        model = labels.get("model_name", model)
        if name == "dynchunk_model_state":
            replica.state = labels.get("state", "") if value else replica.state
        elif name == "dynchunk_floor_chunks_total":
            replica.floors[labels.get("cause", "?")] = value
        elif name.startswith("dynchunk_") or name in (RUNNING, QUEUED, CACHE_USE):
            replica.values[name] = value
    return Reading(dict(sorted(replicas.items())), sorted(broken), model)
