"""The real engine's /metrics, read by a real Prometheus, by top, and by the dashboard's queries."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from dynchunk.metrics import DECLARED
from scripts import reference
from scripts.reference import Server, prompt
from scripts.top import scrape
from tests.conftest import ROOT, clean_environ, no_dotenv
from tests.engine import asks, traffic
from tests.monitoring.test_monitoring import FOLDER, queries

pytestmark = [pytest.mark.engine, pytest.mark.xdist_group("guarded")]

# Beyond the prefix of 15,625 the floor exceeds the budget, so that there are floors to count.
TOKENS = 17_000
# Without a model nothing is predicted, and the gauge of progress is empty when nothing is in flight.
MAY_BE_EMPTY = ("dynchunk_latency_predicted_ms", "dynchunk_prefill_done_tokens")


@pytest.fixture(scope="module")
def seen(guarded: Server) -> list[scrape.Reading]:
    """What /metrics said again and again while one long prompt ran, and after it."""
    for number in range(5):  # until the readings have met one prompt several times: nobody knows who gets the cores
        guarded.flush()
        readings = []
        ask = {"rid": f"watched{number}"}
        long = threading.Thread(target=guarded.generate, args=(prompt(TOKENS, 1),), kwargs=ask)
        long.start()
        while long.is_alive():
            readings.append(scrape.parse(scrape.fetch(guarded.url, None)))
        long.join()
        if len({r.replicas["0"].get("dynchunk_prefill_done_tokens") for r in readings}) > 5:
            break
    guarded.generate(prompt(TOKENS, 1)[:12_000] + prompt(1_500, 2), rid="watched-hit")
    traffic.wait_until(lambda: total_tokens(guarded) == 0, what="the prompt's progress is still shown")
    return [*readings, scrape.parse(scrape.fetch(guarded.url, None))]


def total_tokens(server: Server) -> float | None:
    replica = scrape.parse(scrape.fetch(server.url, None)).replicas["0"]
    return replica.get("dynchunk_prefill_total_tokens")


def test_the_long_prefill_as_it_goes(seen: list[scrape.Reading]) -> None:
    """Progress grows to the whole prompt and is gone after it; the budget's use is what the chunks say."""
    replicas = [reading.replicas["0"] for reading in seen]
    moving = [r for r in replicas if r.get("dynchunk_prefill_total_tokens") == TOKENS]
    done = [r.get("dynchunk_prefill_done_tokens") for r in moving]
    assert len(set(done)) > 3
    assert done == sorted(done)
    assert replicas[-1].get("dynchunk_prefill_total_tokens") == 0
    for r in moving:
        rows, longest = r.get("dynchunk_batch_rows"), r.get("dynchunk_batch_longest_tokens")
        assert r.get("dynchunk_budget_utilisation") == pytest.approx(rows * longest / asks.BUDGET)
        assert 0 < r.get("dynchunk_chunk_tokens") <= asks.CHUNK_TOKENS
    assert moving[-1].get("dynchunk_prefill_elapsed_seconds") > moving[0].get("dynchunk_prefill_elapsed_seconds")


def test_counters_and_hooks(guarded: Server, seen: list[scrape.Reading]) -> None:
    """Counters are what /server_info counts; every hook is in place; measured times are there, a model is not."""
    counts = guarded.state()["counts"]
    floors = sum(count for name, count in counts.items() if name.startswith("floor_over_budget"))
    assert min(floors, counts["first_chunks_lowered"]) > 0

    def published() -> bool:
        [replica] = scrape.parse(scrape.fetch(guarded.url, None)).replicas.values()
        clamped = replica.get("dynchunk_first_chunk_clamped_total")
        return (sum(replica.floors.values()), clamped) == (floors, counts["first_chunks_lowered"])

    # With the next batch or, without one, when the scheduler finds itself idle.
    traffic.wait_until(published, what="/metrics and /server_info count differently")
    last = scrape.parse(scrape.fetch(guarded.url, None))
    [replica] = last.replicas.values()
    assert last.broken == []
    assert replica.state == "off"
    assert replica.get("dynchunk_latency_measured_ms") > 0
    assert replica.get("dynchunk_mem_available_bytes") > 0


def test_one_line_in_the_log(guarded: Server, seen: list[scrape.Reading]) -> None:
    """Each long prefill that has finished has its line; one with few computed tokens is not worth a line."""
    assert seen

    def lines() -> list[tuple[str, ...]]:
        said = r"request (watched\S*): prefill of ([\d,]+) tokens, ([\d,]+) of them cached, in ([\d,]+) chunks of"
        return re.findall(said, guarded.log.read_text())

    traffic.wait_until(lines)
    rid, tokens, cached, chunks = lines()[-1]
    assert (tokens, cached) == (f"{TOKENS:,}", "0")
    assert chunks == f"{len(guarded.chunks(rid)):,}"
    assert "watched-hit" not in [rid for rid, *_ in lines()]


def test_every_declared_metric_is_there(guarded: Server, seen: list[scrape.Reading]) -> None:
    """And nothing beside them begins with dynchunk_."""
    assert seen
    text = scrape.fetch(guarded.url, None)
    families = set(re.findall(r"^# TYPE (dynchunk_\w+)", text, re.MULTILINE))
    assert {name.removesuffix("_total") for name in families} == {m.name.removesuffix("_total") for m in DECLARED}


def test_top_and_doctor_on_it(guarded: Server, seen: list[scrape.Reading]) -> None:
    """The operator's tools read the same server."""
    assert seen
    environ = clean_environ(PORT=guarded.url.rpartition(":")[2], MODEL_PATH=str(reference.ROOT / reference.MODEL))

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [ROOT / "dynchunk", *words, *no_dotenv(words)], env=environ, capture_output=True, text=True, check=False
        )

    shown = run("top", "--once")
    assert "no long prompt in flight" in shown.stdout
    assert f"of {asks.BUDGET:,} token^2" in shown.stdout
    done = run("doctor", "--json")
    [running] = [check for check in json.loads(done.stdout)["checks"] if check["name"] == "running server"]
    assert running["level"] == "ok"


def test_a_real_prometheus(guarded: Server, seen: list[scrape.Reading], tmp_path: Path) -> None:
    """Prometheus loads our files, scrapes the engine, and answers every query of the dashboard."""
    assert seen
    program = prometheus(tmp_path)
    port = reference.free_port()
    config = (FOLDER / "prometheus.yml").read_text()
    target = guarded.url.removeprefix("http://")
    assert config.count("127.0.0.1:30000") == 1
    (tmp_path / "prometheus.yml").write_text(config.replace("127.0.0.1:30000", target))
    shutil.copy(FOLDER / "alerts.yml", tmp_path)
    command = [program, f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data"]
    with (
        (tmp_path / "log").open("wb") as log,
        subprocess.Popen([*command, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log) as process,
        httpx.Client(base_url=f"http://127.0.0.1:{port}/api/v1", trust_env=False) as api,
    ):
        try:
            # Rates need two scrapes.
            wait_for(api, f'count_over_time(dynchunk_batch_rows{{instance="{target}"}}[1m]) > 3')
            for query in queries():
                found = ask(api, query.replace("$instance", ".*"))
                assert found or any(name in query for name in MAY_BE_EMPTY), query
            rules = api.get("/rules").json()["data"]["groups"][0]["rules"]
            states = {rule["name"]: rule["state"] for rule in rules}
            assert states["DynChunkHookNotApplied"] == "inactive"
            assert len(states) == 4
        finally:
            process.terminate()


def ask(api: httpx.Client, query: str) -> list[Any]:
    response = api.get("/query", params={"query": query})
    if response.status_code == httpx.codes.SERVICE_UNAVAILABLE:
        raise httpx.HTTPStatusError("Prometheus still starts", request=response.request, response=response)
    answer = response.json()
    assert answer["status"] == "success", (query, answer)
    result: list[Any] = answer["data"]["result"]
    return result


def wait_for(api: httpx.Client, query: str, timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            if ask(api, query):
                return
        except httpx.HTTPError:
            pass
        assert time.monotonic() < deadline, f"Prometheus has no answer to {query}"
        time.sleep(0.5)


def prometheus(folder: Path) -> str:
    """The program: installed, or Debian's package unpacked into `folder` for as long as the test takes."""
    installed = shutil.which("prometheus")
    if installed:
        return installed
    if shutil.which("apt-get") is None or os.geteuid():
        pytest.skip("no prometheus here; apt-get install prometheus")
    done = subprocess.run(
        ["apt-get", "download", "prometheus"], cwd=folder, capture_output=True, text=True, check=False
    )
    packages = list(folder.glob("prometheus_*.deb"))
    if not packages:
        pytest.skip(f"no prometheus here, and apt-get has none: {done.stderr[-200:]}")
    subprocess.run(["dpkg", "-x", packages[0], folder / "unpacked"], check=True)
    return str(folder / "unpacked" / "usr" / "bin" / "prometheus")
