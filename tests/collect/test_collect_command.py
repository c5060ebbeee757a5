"""`./dynchunk collect` against a server that answers, one that does not, and a log full of what must not be sent."""

from __future__ import annotations

import json
import subprocess
import tarfile
from pathlib import Path

import pytest
from pytest_httpserver import HTTPServer

from tests.conftest import ROOT, clean_environ

pytestmark = pytest.mark.slow

KEY = "key-of-the-server-77"
LOG = """\
[2026-11-29 10:00:00] server_args=ServerArgs(model_path='/m', api_key='key-of-the-server-77')
dynchunk [pid 7]: 0.1.0 on, sglang 0.5.23; applied: sizer
[2026-11-29 10:00:05] Prefill batch, #new-seq: 1, #new-token: 2048, #cached-token: 0
[2026-11-29 10:00:06] Receive: text='my private prompt'
Traceback (most recent call last):
  File "x.py", line 1, in f
ValueError: no key-of-the-server-77 for you
"""


def collect(tmp_path: Path, *arguments: str, log: str | None = None, **environ: str) -> dict[str, str]:
    out = tmp_path / "out.tar.gz"
    done = subprocess.run(
        [ROOT / "dynchunk", "collect", "--out", out, *arguments],
        env=clean_environ(MODEL_PATH="/m", API_KEY=KEY, **environ),
        input=log,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "look into it" in done.stdout
    with tarfile.open(out) as archive:
        names = archive.getnames()
        assert len({name.partition("/")[0] for name in names}) == 1
        texts = {name.partition("/")[2]: archive.extractfile(name).read().decode() for name in names}  # type: ignore[union-attr]
    assert [name for name, text in texts.items() if KEY in text] == []
    return texts


def test_everything_in_one_archive(tmp_path: Path, httpserver: HTTPServer) -> None:
    """Settings, versions, doctor, the server's state, metrics, the log and the last report; the key in none of them."""
    sent = {"headers": {"Authorization": f"Bearer {KEY}"}}
    state = {"version": "0.1.0", "rank": "pp0tp0", "mode": "on", "engine": "0.5.23", "pid": 1, "hooks": {}}
    httpserver.expect_request("/server_info", **sent).respond_with_json(
        {"api_key": KEY, "model_path": "/m", "internal_states": [{"dynchunk": state}]}
    )
    httpserver.expect_request("/metrics", **sent).respond_with_data(
        'sglang:num_queue_reqs 0\ndynchunk_batch_rows{tp_rank="0"} 512.0\n'
    )
    report = tmp_path / "profile-2026-11-29"
    report.mkdir()
    (report / "REPORT.md").write_text(f"# memguard\n--api-key {KEY}\n")
    (report / "run.json").write_text("{}")
    (report / "memory.png").write_bytes(b"\x89PNG")
    arguments = ("--log", "-", "--report", str(report))
    texts = collect(tmp_path, *arguments, log=LOG, PORT=str(httpserver.port), HF_TOKEN="hf_secret_of_the_user")
    assert set(texts) == {
        "versions.json",
        "settings.txt",
        "doctor.json",
        "server_info.json",
        "metrics.txt",
        "log.txt",
        "profile-2026-11-29/REPORT.md",
        "profile-2026-11-29/run.json",
    }
    assert json.loads(texts["server_info.json"])["internal_states"][0]["dynchunk"]["rank"] == "pp0tp0"
    assert texts["metrics.txt"] == 'dynchunk_batch_rows{tp_rank="0"} 512.0\n'
    assert "hf_secret" not in "".join(texts.values())
    assert "API_KEY = set, not shown" in texts["settings.txt"] or "API_KEY = ***" in texts["settings.txt"]
    assert "MAX_TOTAL_TOKENS = the engine decides" in texts["settings.txt"]
    assert any(check["name"] == "settings" for check in json.loads(texts["doctor.json"])["checks"])


def test_of_the_log_only_what_helps(tmp_path: Path) -> None:
    """Our lines, prefills and the last traceback; prompts that the engine logs stay here."""
    text = collect(tmp_path, "--log", "-", log=LOG, PORT="1")["log.txt"]
    assert "applied: sizer" in text
    assert "#new-token: 2048" in text
    assert "ValueError: no *** for you" in text
    assert "private prompt" not in text


def test_variables_of_the_engine(tmp_path: Path) -> None:
    """The secret ones without their values, the others with theirs."""
    given = {"SGLANG_APIKEY": "S1", "SGLANG_S3_PASS": "S2 S2", "SGLANG_AUTH": "S3", "NCCL_X": "redis://:S4@h"}
    lists = {"EXTRA_ARGS": """--x '{"accessKey": ["S46b"]}'""", "NCCL_DEBUG": "INFO"}
    text = collect(tmp_path, PORT="1", **given, **lists)["settings.txt"]
    assert [line for line in text.splitlines() if line.startswith(("SGLANG_", "NCCL_"))] == [
        *("NCCL_DEBUG=INFO", "NCCL_X=redis://***@h", "SGLANG_APIKEY=***", "SGLANG_AUTH=***", "SGLANG_S3_PASS=***")
    ]
    assert "S46b" not in text


def test_without_a_server(tmp_path: Path) -> None:
    """What cannot be had says why; the rest is there all the same."""
    texts = collect(tmp_path, PORT="1")
    assert texts["server_info.json"].startswith("could not be collected: no answer from")
    assert texts["metrics.txt"].startswith("could not be collected")
    assert "dynchunk" in json.loads(texts["versions.json"])


def test_a_log_that_is_not_there(tmp_path: Path) -> None:
    """One line, exit code 1, nothing written."""
    out = tmp_path / "out.tar.gz"
    done = subprocess.run(
        [ROOT / "dynchunk", "collect", "--out", out, "--log", tmp_path / "none"],
        env=clean_environ(PORT="1"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "not written" in done.stderr
    assert not out.exists()
