"""Dashboard, alerts and documents name metrics that exist."""

from __future__ import annotations

import json
import re
from typing import Any

from dynchunk.metrics import DECLARED, STATES
from tests.conftest import ROOT

FOLDER = ROOT / "docker-images" / "monitoring"
NAMES = {metric.name for metric in DECLARED}
# Of SGLang's own, those that 0.5.20 to 0.5.23 all have; tests/engine holds a real scrape against them. Prometheus
# before 3.0 is served an underscore for their colon.
ENGINE = {
    f"sglang[:_]{name}"
    for name in (
        "num_running_reqs",
        "num_queue_reqs",
        "token_usage",
        "time_to_first_token_seconds_bucket",
        "realtime_tokens_total",
    )
}


def dashboard() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((FOLDER / "dashboard.json").read_text())
    return loaded


def queries() -> list[str]:
    return [target["expr"] for panel in dashboard()["panels"] for target in panel["targets"]]


def metrics_in(text: str) -> set[str]:
    return set(re.findall(r"(?:dynchunk_|sglang\[:_\])[a-z_]+", text))


def test_every_query_is_of_a_metric_that_exists() -> None:
    """Ours as declared, the engine's as all supported versions have them; labels too."""
    assert "sglang:" not in " ".join(queries())
    for query in queries():
        assert metrics_in(query) <= NAMES | ENGINE, query
    labels = {label for query in queries() for label in re.findall(r"\bby \((\w+)\)", query)}
    assert labels <= {"le", "mode", *(label for metric in DECLARED for label in metric.labels)}


def test_every_metric_is_on_the_dashboard() -> None:
    """What is worth exporting is worth seeing."""
    assert metrics_in(" ".join(queries())) & NAMES == NAMES


def test_counters_are_shown_as_rates() -> None:
    """A counter's own value says nothing."""
    counters = {metric.name for metric in DECLARED if metric.kind == "counter"}
    for query in queries():
        for name in metrics_in(query) & counters:
            assert re.search(rf"(?:rate|increase)\({name}", query), query


def test_panels_do_not_lie_on_each_other() -> None:
    """Each has a place of its own on the grid of 24 columns, and an id."""
    taken: set[tuple[int, int]] = set()
    panels = dashboard()["panels"]
    for panel in panels:
        at = panel["gridPos"]
        cells = {(at["x"] + i, at["y"] + j) for i in range(at["w"]) for j in range(at["h"])}
        assert at["x"] + at["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells
    assert len({panel["id"] for panel in panels}) == len(panels)


def test_alerts_and_documents() -> None:
    """The alerts' expressions are those that docs/operating.md explains; every name in either exists."""
    alerts = re.findall(r"expr: (.+)", (FOLDER / "alerts.yml").read_text())
    operating = (ROOT / "docs" / "operating.md").read_text()
    assert alerts
    for expression in alerts:
        assert f"`{expression}`" in operating
    assert metrics_in(operating) <= NAMES


def test_the_table_of_metrics() -> None:
    """README lists what is declared, in its words."""
    readme = (FOLDER / "README.md").read_text()
    for metric in DECLARED:
        labels = "{" + ",".join(metric.labels) + "}" if metric.labels else ""
        assert f"| `{metric.name}{labels}` | {metric.meaning} |" in readme
    states = dashboard()["panels"]
    assert any(", ".join(STATES[:-1]) + f" or {STATES[-1]}" in panel["description"] for panel in states)


def test_operating_names_what_there_is() -> None:
    """Files, commands and settings in docs/operating.md exist."""
    from dynchunk.settings import Settings, env_name, knob_fields
    from launcher.__main__ import app
    from launcher.environment import Launch

    text = (ROOT / "docs" / "operating.md").read_text()
    for link in re.findall(r"\]\((\.\./[\w./-]+)\)", text):
        assert (ROOT / "docs" / link).resolve().exists(), link
    commands = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
    assert set(re.findall(r"\./dynchunk (\w+)", text)) <= commands
    known = {env_name(f) for f in knob_fields(Settings)} | {env_name(f, "") for f in knob_fields(Launch)}
    named = set(re.findall(r"\b(?:DYNCHUNK_[A-Z_]+|[A-Z]+_(?:SIZE|STATIC|LENGTH))\b", text))
    assert named <= known
