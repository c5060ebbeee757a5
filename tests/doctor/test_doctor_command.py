"""`./dynchunk doctor` as an operator runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from pytest_httpserver import HTTPServer
from typer.testing import CliRunner

from launcher import dotenv
from scripts.doctor import readings
from scripts.doctor.__main__ import app
from tests.conftest import BOOT, ROOT, clean_environ, no_dotenv, run_python

pytestmark = pytest.mark.slow

NOWHERE = {"PORT": "1"}


def as_a_process(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """As a shell runs it."""
    return subprocess.run(
        [ROOT / "dynchunk", "doctor", *no_dotenv(arguments), *arguments],
        env=clean_environ(**{**NOWHERE, **environ}),
        capture_output=True,
        text=True,
        check=False,
    )


def doctor(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """The same in this process: in that environment, without a second's look at what the machine swaps."""
    with (
        mock.patch.dict(os.environ, clean_environ(**{**NOWHERE, **environ}), clear=True),
        mock.patch.object(dotenv, "FILE", ROOT / "no.env"),
        mock.patch.object(readings, "machine", partial(readings.machine, interval_s=0)),
    ):
        done = CliRunner().invoke(app, arguments, catch_exceptions=False)
    return subprocess.CompletedProcess(arguments, done.exit_code, done.stdout, done.stderr)


def unchecked(*arguments: str, **environ: str) -> dict[str, str]:
    """What there was no verdict on, and why."""
    answer = json.loads(doctor("--json", *arguments, **environ).stdout)
    return {check["name"]: check["reason"] for check in answer["not_checked"]}


def checks(
    *arguments: str, run: Callable[..., subprocess.CompletedProcess[str]] = doctor, **environ: str
) -> dict[str, list[dict[str, Any]]]:
    done = run("--json", *arguments, **environ)
    assert done.stderr == ""
    answer = json.loads(done.stdout)
    failed = [check for check in answer["checks"] if check["level"] == "fail"]
    assert done.returncode == (1 if failed else 0)
    assert answer["ok"] is not bool(failed)
    named: dict[str, list[dict[str, Any]]] = {}
    for check in answer["checks"]:
        assert check["level"] in {"ok", "warn", "fail"}
        assert check["reason"]
        named.setdefault(check["name"], []).append(check)
    return named


def levels(named: dict[str, list[dict[str, Any]]], name: str) -> list[str]:
    return [check["level"] for check in named.get(name, [])]


@pytest.fixture
def v4(tmp_path: Path) -> str:
    """A model folder with a sliding window, whose cache the engine pages by 256."""
    config = {
        "model_type": "deepseek_v4",
        "architectures": ["DeepseekV4ForCausalLM"],
        "compress_ratios": [0, 4, 128],
        "sliding_window": 128,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


def test_a_plain_setting(tmp_path: Path) -> None:
    """Nothing fails for the defaults on this machine; without a GPU there is no verdict on one."""
    named = checks(run=as_a_process, MODEL_PATH=str(tmp_path))
    assert levels(named, "settings") == ["ok"]
    assert levels(named, "allocator") == ["ok"]
    assert levels(named, "memory for long prompts") in (["ok"], ["warn"])  # what is free here is not ours to say


def test_the_known_hang_is_refused(v4: str) -> None:
    """A chunk of 8192, 131,072 tokens, the model's own page and ratio: exit code 1 and the largest chunk that works."""
    named = checks(MODEL_PATH=v4, CHUNKED_PREFILL_SIZE="8192", MAX_TOTAL_TOKENS="131072", CONTEXT_LENGTH="100000")
    [pool] = named["sliding-window pool"]
    assert pool["level"] == "fail"
    assert "6,400" in pool["reason"]


def test_every_contradiction_at_once(v4: str) -> None:
    """Data-parallel attention, stages without requests, mixed chunk with speculation, deterministic alignment."""
    named = checks(
        MODEL_PATH=v4,
        CHUNKED_PREFILL_SIZE="4096",
        MAX_RUNNING_REQUESTS="2",
        PP_SIZE="4",
        PAGE_SIZE="100",
        EXTRA_ARGS="--enable-dp-attention --dp-size 4 --enable-mixed-chunk --speculative-algorithm EAGLE "
        "--enable-deterministic-inference --attention-backend flashinfer",
    )
    for name, level in {
        "data-parallel attention": "warn",
        "requests and pipeline stages": "fail",
        "mixed chunk": "fail",
        "truncation alignment": "fail",
        "chunk and page": "fail",
    }.items():
        assert levels(named, name) == [level], name
    assert "1,024" in named["data-parallel attention"][0]["reason"]


def test_chunking_off_is_refused() -> None:
    """With DynChunk on there must be chunks."""
    named = checks(MODEL_PATH="/m", CHUNKED_PREFILL_SIZE="-1")
    assert any(c["level"] == "fail" and "turns chunked prefill off" in c["reason"] for c in named["settings"])


def test_wrong_settings_are_all_named() -> None:
    """What `serve` would refuse is refused here."""
    named = checks(MODEL_PATH="/m", DYNCHUNK_BUDGET="lots", TP_SIZE="0")
    reasons = " ".join(check["reason"] for check in named["settings"] if check["level"] == "fail")
    assert "DYNCHUNK_BUDGET" in reasons
    assert "TP_SIZE" in reasons


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (
            {
                "EXTRA_ARGS": "--enable-dp-attention --dp-size 4",
                "CHUNKED_PREFILL_SIZE": "4096",
                "DYNCHUNK_CHUNK_MIN": "2048",
            },
            "the largest chunk of 1,024",
        ),
        ({"DYNCHUNK_PAGE": "64"}, "not a multiple of the engine's page of 256"),
    ],
)
def test_what_the_adapter_would_refuse_fails_here(v4: str, wrong: dict[str, str], said: str) -> None:
    """With a rank's chunk and the model's own page, as plan and the scheduler count."""
    assert any(
        said in check["reason"] for check in checks(MODEL_PATH=v4, **wrong)["settings"] if check["level"] == "fail"
    )


def test_settings_from_a_file(tmp_path: Path) -> None:
    """A profile is checked before it is used; the environment comes first; a broken file is a failed check."""
    file = tmp_path / "env"
    file.write_text("# a profile\nMODEL_PATH=/m\nCHUNKED_PREFILL_SIZE=-1\n")
    assert "fail" in levels(checks("--env-file", str(file)), "settings")
    assert "fail" not in levels(checks("--env-file", str(file), CHUNKED_PREFILL_SIZE="2048"), "settings")
    file.write_text("what is this\n")
    assert levels(checks("--env-file", str(file)), "settings") == ["fail"]
    assert "it is a folder" in checks("--env-file", str(tmp_path))["settings"][0]["reason"]


def test_a_running_server(httpserver: HTTPServer) -> None:
    """A hook that was refused on a rank fails, as does a stock engine; one with all hooks applied passes."""
    state = {"rank": "pp0tp0", "mode": "on", "hooks": {"sizer": {"outcome": "applied", "detail": ""}}}
    refused = {**state, "hooks": {"sizer": {"outcome": "refused", "detail": "found other parameters"}}}
    for answer, level in ((state, "ok"), (refused, "fail"), (None, "fail")):
        httpserver.clear()
        internal = {} if answer is None else {"dynchunk": {**answer, "version": "1", "engine": "0", "pid": 1}}
        httpserver.expect_request("/server_info").respond_with_json({"internal_states": [internal]})
        named = checks(MODEL_PATH="/m", PORT=str(httpserver.port))
        assert levels(named, "running server") == [level]


def test_a_password_in_the_address(httpserver: HTTPServer) -> None:
    """It is shown nowhere, whatever the server says or where there is none."""
    state = {"rank": "pp0tp0", "mode": "on", "hooks": {"sizer": {"outcome": "applied", "detail": ""}}}
    where = f"me:s3cret@localhost:{httpserver.port}"
    for internal in ({}, {"dynchunk": state}, {"dynchunk": {**state, "degraded": True}}):
        httpserver.clear()
        httpserver.expect_request("/server_info").respond_with_json({"internal_states": [internal]})
        for words in (("--json",), ()):
            said = doctor(*words, "--url", f"http://{where}", MODEL_PATH="/m").stdout
            assert f"http://***@localhost:{httpserver.port}" in said
            assert "s3cret" not in said
    said = doctor("--url", "http://me:s3cret@127.0.0.1:1", MODEL_PATH="/m").stdout
    assert "no answer from http://***@127.0.0.1:1" in said
    assert "s3cret" not in said


def test_the_table_for_people() -> None:
    """Every check has a line, the cure behind an arrow, and the last line counts them."""
    done = doctor(MODEL_PATH="/m", MAX_RUNNING_REQUESTS="2", PP_SIZE="4")
    assert done.returncode == 1
    assert "-> MAX_RUNNING_REQUESTS=4 or more" in done.stdout
    assert "1 fail" in done.stdout.splitlines()[-1]


def test_the_cost_of_a_chunk_is_the_models(v4: str, tmp_path: Path) -> None:
    """By the model's file, --path or --bytes; one that is not known is assumed dear, and that is only a warning."""

    def memory(*arguments: str, **environ: str) -> dict[str, Any]:
        # More than any machine has, so that the verdict is about what was assumed.
        [check] = checks(*arguments, DYNCHUNK_BUDGET="1e13", CONTEXT_LENGTH="1e9", **environ)["memory for long prompts"]
        return check

    dearest = memory(MODEL_PATH=str(tmp_path / "none"))
    assert (dearest["level"], "v41-dev" in dearest["reason"]) == ("warn", True)
    assert "v4 in tiles of 256 MiB" in memory(MODEL_PATH=v4)["reason"]
    named = memory("--path", "dsa-torch", MODEL_PATH=v4)
    assert (named["level"], "dsa-torch" in named["reason"]) == ("fail", True)
    measured = memory("--bytes", "12.5", MODEL_PATH=v4)
    assert (measured["level"], "12.5 B for a row and key" in measured["reason"]) == ("fail", True)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--path", "none"), "--path none: no such path"),
        (("--guard-gib", "inf"), "--guard-gib inf: not a number"),
        (("--guard-gib", "-1"), "--guard-gib -1.0: not a number"),
        (("--bytes", "inf"), "--bytes inf: not a number"),
        (("--bytes", "nan"), "--bytes nan: not a number"),
        (("--bytes", "0"), "--bytes 0.0: not a number from 0.001 to 1,000,000"),
    ],
)
def test_options_nothing_can_be_worked_out_with(words: tuple[str, str], said: str) -> None:
    """Exit code 2 and one sentence, and JSON where that was asked for."""
    done = doctor(*words)
    assert (done.returncode, said in done.stderr, "Traceback" in done.stderr) == (2, True, False)
    done = doctor("--json", *words)
    answer = json.loads(done.stdout)
    assert done.returncode == 2
    assert answer["ok"] is False
    assert said in answer["checks"][0]["reason"]


@pytest.mark.parametrize(
    "config",
    [
        '{"sliding_window": "y"}',
        '{"text_config": 5}',
        '{"architectures": 5}',
        '{"max_position_embeddings": 1e400}',
        "[" * 100_000,
    ],
)
def test_an_odd_model_file(tmp_path: Path, config: str) -> None:
    """It is as if nothing were known of the model: all checks are made, and none of them breaks."""
    (tmp_path / "config.json").write_text(config)
    named = checks(MODEL_PATH=str(tmp_path))
    assert levels(named, "settings") == ["ok"]
    assert levels(named, "allocator") == ["ok"]


@pytest.mark.parametrize(
    "extra",
    ["--swa-full-tokens-ratio nan", "--enable-prefill-cp --attn-cp-size -4", "--enable-dp-attention --dp-size x"],
)
def test_flags_the_engine_will_refuse(extra: str) -> None:
    """A failed check that names the flag, and no figures worked out from it."""
    named = checks(MODEL_PATH="/m", MAX_TOTAL_TOKENS="131072", EXTRA_ARGS=extra)
    failed = [check["reason"] for check in named["settings"] if check["level"] == "fail"]
    assert len(failed) == 1
    assert failed[0].startswith("EXTRA_ARGS: --")
    assert "context parallel prefill" not in named


def test_a_report_to_count_with(tmp_path: Path) -> None:
    """DYNCHUNK_REPORT is looked at: one that is not here, or holds nothing, is a warning with the reason."""
    report = tmp_path / "run.json"
    [missing] = checks(MODEL_PATH="/m", DYNCHUNK_REPORT=str(report))["report"]
    assert (missing["level"], "there is no such file" in missing["reason"]) == ("warn", True)
    report.write_text("{}")
    [empty] = checks(MODEL_PATH="/m", DYNCHUNK_REPORT=str(report))["report"]
    assert (empty["level"], "no measured coefficient" in empty["reason"]) == ("warn", True)
    report.write_text(json.dumps({"coefficient": {"kind": "line", "bytes_per_pair": 12.5, "base_bytes": 0}}))
    [good] = checks(MODEL_PATH="/m", DYNCHUNK_REPORT=str(report))["report"]
    assert (good["level"], "12.5 B for a row and key" in good["reason"]) == ("ok", True)


def test_the_memory_is_counted_with_the_report(v4: str, tmp_path: Path) -> None:
    """What was measured comes before the model's path, what is held however small the chunk included."""
    report = tmp_path / "run.json"
    report.write_text(json.dumps({"coefficient": {"kind": "line", "bytes_per_pair": 12.5, "base_bytes": 7 << 50 - 3}}))
    environ = {"MODEL_PATH": v4, "DYNCHUNK_REPORT": str(report), "CONTEXT_LENGTH": "2048"}
    named = checks(**environ)
    [memory] = named["memory for long prompts"]
    assert memory["level"] == "fail"
    assert f"0.05 GiB for a chunk of 4,194,304 token^2 (measured: {report})" in memory["reason"]
    assert "917504.00 GiB held beside it" in memory["reason"]
    assert "917504.00 GiB however small the chunk" in named["report"][0]["reason"]
    for words in (("--bytes", "12.5"), ("--path", "dsa")):
        [memory] = checks(*words, **environ)["memory for long prompts"]
        assert "measured:" not in memory["reason"]
        assert "held beside it" not in memory["reason"]


def test_without_dynchunk(v4: str) -> None:
    """There is no verdict on the memory then, for that reason, and what the stock engine's chunk may come to."""
    off = {"MODEL_PATH": v4, "DYNCHUNK_MODE": "off"}
    said = unchecked(CONTEXT_LENGTH="100K", **off)["memory for long prompts"]
    assert said.startswith("DYNCHUNK_MODE=off")
    # 48 whole chunks of 2,048, and 1 B for a row and key.
    assert "201,326,592 token^2 at CONTEXT_LENGTH=100,000, which hold up to 0.19 GiB (v4" in said
    said = unchecked("--bytes", "12.5", CONTEXT_LENGTH="100K", **off)["memory for long prompts"]
    assert "up to 2.34 GiB (12.5 B for a row and key" in said
    said = unchecked(CHUNKED_PREFILL_SIZE="-1", **off)["memory for long prompts"]
    assert said.endswith("CHUNKED_PREFILL_SIZE=-1 turns chunked prefill off")


def test_no_size_to_go_by(tmp_path: Path) -> None:
    """Settings that are refused leave none, and the reason says where to look."""
    said = unchecked(MODEL_PATH=str(tmp_path), DYNCHUNK_PAGE="4352")["memory for long prompts"]
    assert "the settings check says why" in said
    said = unchecked(MODEL_PATH=str(tmp_path), TP_SIZE="0")["memory for long prompts"]
    assert said.startswith("the settings cannot be read")


def test_a_part_that_breaks(httpserver: HTTPServer) -> None:
    """A server of another kind answers nobody knows what: that check fails, the others are made."""
    httpserver.expect_request("/server_info").respond_with_json({"internal_states": [{"dynchunk": {"hooks": 5}}]})
    named = checks(MODEL_PATH="/m", PORT=str(httpserver.port))
    assert levels(named, "running server") == ["fail"]
    assert "this part of doctor broke" in named["running server"][0]["reason"]
    assert levels(named, "allocator") == ["ok"]


def test_an_automatic_budget(tmp_path: Path) -> None:
    """It follows from the memory at the start, so there is nothing to hold against it before."""
    named = checks(MODEL_PATH=str(tmp_path), DYNCHUNK_BUDGET="auto")
    assert "memory for long prompts" not in named
    assert "fail" not in levels(named, "settings")


def test_a_mistyped_option_is_no_verdict() -> None:
    """Exit code 2, so that a script can tell it from a failed check."""
    assert as_a_process("--jsn").returncode == 2


def test_neither_torch_nor_the_engine_is_imported() -> None:
    """Versions come from package metadata and contracts from source text: doctor stays quick and small."""
    code = (
        "import os, sys\n"
        "from scripts.doctor import examine, readings\n"
        "here, nowhere = readings.machine(0), 'http://127.0.0.1:1'\n"
        "examine.examine(os.environ, here, nowhere, None, guard_bytes=0)\n"
        "print([name for name in ('torch', 'sglang', 'numpy', 'transformers') if name in sys.modules])\n"
    )
    done = run_python(code, path=(ROOT / "adapter", ROOT), MODEL_PATH="/m")
    assert done.stdout == "[]\n", done.stderr


def test_the_start_hook_that_was_promised(tmp_path: Path) -> None:
    """With adapter/boot on PYTHONPATH a fresh python3 must load the adapter; where something keeps it out it fails."""
    assert levels(checks(run=as_a_process, MODEL_PATH="/m", PYTHONPATH=str(BOOT)), "start hook") == ["ok"]
    wrapper = tmp_path / "python3"
    wrapper.write_text(f'#!/bin/sh\nexec {sys.executable} -E "$@"\n')
    wrapper.chmod(0o755)
    path = f"{tmp_path}:/usr/bin:/bin"
    assert levels(checks(run=as_a_process, MODEL_PATH="/m", PYTHONPATH=str(BOOT), PATH=path), "start hook") == ["fail"]
