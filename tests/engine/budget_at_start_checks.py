"""What a start makes of the ranks' memory and of an earlier report; test_in_one_process.py runs this."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]  # the engine warns on import


def test_ranks_that_share_a_host_share_what_it_has_to_spare() -> None:
    from dynchunk.patches.budget_at_start import headrooms

    reports = {
        "pp0tp0": {"headroom_bytes": 10, "host": "a"},
        "pp0tp1": {"headroom_bytes": 12, "host": "a"},
        "pp0tp2": {"headroom_bytes": 7, "host": "b"},
        "pp0tp3": {"headroom_bytes": 9, "host": None},
    }
    assert headrooms(reports) == {"pp0tp0": 5, "pp0tp1": 6, "pp0tp2": 7, "pp0tp3": 9}


def test_a_report_of_another_engine_is_said_and_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The start goes on with the table; the journal has the reason."""
    from dynchunk import journal, settings
    from dynchunk.patches import budget_at_start, facts

    report = tmp_path / "run.json"
    monkeypatch.setattr(facts, "cost_identity", lambda _: {"engine": "here"})
    monkeypatch.setattr(settings, "current", lambda: settings.Settings(budget="auto", report=str(report)))
    fit = {"kind": "line", "bytes_per_pair": 12.5, "base_bytes": 0, "belongs_to": {"engine": "there"}}
    for text, reason in (
        (None, "there is no such file"),
        ("{", "it is no JSON"),
        ("{}", "no measured coefficient"),
        (json.dumps({"coefficient": fit}), "it is of another engine: engine is 'here' here and 'there' there"),
    ):
        if text is not None:
            report.write_text(text)
        assert budget_at_start._measured_before(None) is None
        entry = journal.snapshot()["hooks"]["report"]
        assert entry["outcome"] == "not in use"
        assert reason in entry["detail"]
    report.write_text(json.dumps({"coefficient": fit | {"belongs_to": {"engine": "here"}}}))
    found = budget_at_start._measured_before(None)
    assert found is not None
    assert found["millibytes"] == 12_500
    everybody = {"pp0tp0": {"headroom_bytes": 10**10, "host": None, "path": None, "score_limit_bytes": 0}}
    derived = budget_at_start.derive({"pp0tp0": everybody["pp0tp0"] | {"measured": found}}, 0)
    assert derived.budget == 680_000_000


def test_auto_is_refused_where_the_cost_is_not_known() -> None:
    from dynchunk.patches.budget_at_start import derive
    from dynchunk.settings import SettingsError

    one = {"headroom_bytes": 10**10, "host": None, "path": None, "score_limit_bytes": 0, "measured": None}
    with pytest.raises(SettingsError, match=r"set a number such as 2\.0e8"):
        derive({"pp0tp0": one}, 0)
