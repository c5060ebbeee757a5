"""`./dynchunk collect` against a server that answers, one that does not, and a log full of what must not be sent."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from pytest_httpserver import HTTPServer

from scripts.collect import __main__ as command
from tests.conftest import ROOT, clean_environ, no_dotenv

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


def collect(
    tmp_path: Path, *arguments: str, log: str | None = None, program: Path = ROOT, **environ: str
) -> dict[str, str]:
    out = tmp_path / "out.tar.gz"
    done = subprocess.run(
        [program / "dynchunk", "collect", "--out", out, *(no_dotenv(arguments) if program == ROOT else ()), *arguments],
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


def refused(tmp_path: Path, *words: object) -> str:
    """What is said where nothing can be written: one line, exit code 1, no archive."""
    done = subprocess.run(
        [ROOT / "dynchunk", "collect", *no_dotenv(words), *map(str, words)],
        env=clean_environ(PORT="1", MODEL_PATH="/m"),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("dynchunk collect: not written: ")
    assert (done.stderr.count("\n"), "Errno" in done.stderr) == (1, False)
    assert list(tmp_path.rglob("dynchunk-*.tar.gz")) == []
    return done.stderr


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--log", "none", "No such file or directory; name the file that the server's output went to"),
        ("--log", "folder", "Is a directory; name the file that the server's output went to"),
        ("--report", "none", "No such file or directory; name a folder that memguard wrote"),
        ("--report", "folder/run.txt", "it is a file; name the folder it is in: "),
        ("--report", "folder", "no .md, .json or .jsonl file of up to 8 MiB is in it; name a folder that memguard"),
        ("--out", "folder", "it is a folder; name a file in it: "),
        ("--out", "folder/run.txt", "there is such a file already, and it stays as it is; name another"),
        ("--out", "none/x.tar.gz", "there is no folder "),
    ],
)
def test_what_cannot_be_read_or_written(tmp_path: Path, option: str, value: str, said: str) -> None:
    """One line with the option, its value and the cure; what is there already stays as it is."""
    (tmp_path / "folder").mkdir()
    file = tmp_path / "folder" / "run.txt"
    file.write_text("mine")
    given = tmp_path / value
    message = refused(tmp_path, option, given)
    assert f"{option} {given}: " in message
    assert said in message
    assert file.read_text() == "mine"
    assert list(tmp_path.iterdir()) == [tmp_path / "folder"]


def test_a_file_that_came_meanwhile(tmp_path: Path) -> None:
    """It is not written over either, and where the room ends nothing is left."""
    path = tmp_path / "out.tar.gz"
    path.write_text("mine")
    with pytest.raises(ValueError, match=r"--out .*out\.tar\.gz: there is such a file already"):
        command.write(path, b"ours")
    assert path.read_text() == "mine"
    code = (
        "import resource, signal, sys\n"
        "from pathlib import Path\n"
        "from scripts.collect import __main__ as command\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "try: command.write(Path(sys.argv[1]), bytes(2000))\n"
        "except ValueError as error: print(error)\n"
    )
    full = tmp_path / "full.tar.gz"
    done = subprocess.run(
        [sys.executable, "-c", code, full],
        env=clean_environ(PYTHONPATH=f"{ROOT / 'adapter'}:{ROOT}"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.startswith(f"--out {full}: File too large; name a file in a folder that has room"), done.stderr
    assert not full.exists()


def test_one_server_and_one_setting_in_all_parts(tmp_path: Path, httpserver: HTTPServer) -> None:
    """What doctor says is of the file and the address that were named."""
    state = {"version": "0.1.0", "rank": "pp0tp0", "mode": "on", "engine": "0.5.23", "pid": 1, "hooks": {}}
    httpserver.expect_request("/server_info").respond_with_json({"internal_states": [{"dynchunk": state}]})
    file = tmp_path / "x.env"
    file.write_text("CHUNKED_PREFILL_SIZE=1024\nDYNCHUNK_CHUNK_MIN=2048\nPORT=1\n")
    url = f"http://me:s3cret@localhost:{httpserver.port}"
    texts = collect(tmp_path, "--env-file", str(file), "--url", url)
    checks = {check["name"]: check for check in json.loads(texts["doctor.json"])["checks"]}
    assert "the largest chunk of 1,024" in checks["settings"]["reason"]
    assert f"http://***@localhost:{httpserver.port}, rank pp0tp0" in checks["running server"]["reason"]
    assert "wrong: DYNCHUNK_CHUNK_MIN=2,048 is above the largest chunk of 1,024" in texts["settings.txt"]
    assert "s3cret" not in "".join(texts.values())


def test_the_env_file_beside_the_program(tmp_path: Path) -> None:
    """Where another file is named, it counts in no part of the archive."""
    program = tmp_path / "checkout"
    for name in ("adapter", "launcher", "scripts"):
        shutil.copytree(ROOT / name, program / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "dynchunk", program)
    (program / ".env").write_text("TP_SIZE=0\n")
    named = tmp_path / "x.env"
    named.write_text("CHUNKED_PREFILL_SIZE=1024\n")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    beside = collect(tmp_path, program=program, PORT="1", PATH=path)
    (tmp_path / "out.tar.gz").unlink()
    other = collect(tmp_path, "--env-file", str(named), program=program, PORT="1", PATH=path)
    for part in ("doctor.json", "settings.txt"):
        assert ("TP_SIZE=" in beside[part], "TP_SIZE=" in other[part]) == (True, False), part
