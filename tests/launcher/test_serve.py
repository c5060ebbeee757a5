"""`serve`: from the environment to the engine's command line."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from dynchunk.settings import SettingsError
from launcher import environment, serve
from tests.conftest import ROOT, clean_environ

MODEL = {"MODEL_PATH": "/models/big"}


def flags(**environ: str) -> list[str]:
    return serve.plan(MODEL | environ).argv[3:]


def problems(environ: dict[str, str]) -> str:
    with pytest.raises(SettingsError) as caught:
        serve.plan(environ)
    return str(caught.value)


def value_of(argv: list[str], flag: str) -> str:
    return argv[argv.index(flag) + 1]


def test_the_defaults() -> None:
    """A model path is enough: chunks of 2048, a context of 512,000; what is unset is left to the engine."""
    argv = flags()
    assert value_of(argv, "--model-path") == "/models/big"
    assert value_of(argv, "--chunked-prefill-size") == "2048"
    assert value_of(argv, "--context-length") == "512000"
    for flag in ("--page-size", "--mem-fraction-static", "--api-key", "--max-total-tokens"):
        assert flag not in argv


def test_every_launcher_setting_reaches_the_engine() -> None:
    """Each variable of the table becomes its flag, and EXTRA_ARGS is split as a shell would."""
    argv = flags(
        SERVED_MODEL_NAME="big",
        CHUNKED_PREFILL_SIZE="4096",
        CONTEXT_LENGTH="1M",
        MEM_FRACTION_STATIC="0.85",
        MAX_TOTAL_TOKENS="1200000",
        MAX_RUNNING_REQUESTS="8",
        PAGE_SIZE="64",
        TP_SIZE="4",
        PP_SIZE="2",
        NNODES="2",
        NODE_RANK="1",
        DIST_INIT_ADDR="10.0.0.1:5000",
        HOST="0.0.0.0",
        PORT="8888",
        API_KEY="sk",
        EXTRA_ARGS="--trust-remote-code --json-model-override-args '{\"a\": 1}'",
    )
    for flag, value in {
        "--served-model-name": "big",
        "--chunked-prefill-size": "4096",
        "--context-length": "1000000",
        "--mem-fraction-static": "0.85",
        "--max-total-tokens": "1200000",
        "--max-running-requests": "8",
        "--page-size": "64",
        "--tp-size": "4",
        "--pp-size": "2",
        "--nnodes": "2",
        "--node-rank": "1",
        "--dist-init-addr": "10.0.0.1:5000",
        "--host": "0.0.0.0",
        "--port": "8888",
        "--api-key": "sk",
    }.items():
        assert value_of(argv, flag) == value
    assert argv[-3:] == ["--trust-remote-code", "--json-model-override-args", '{"a": 1}']


def test_all_problems_at_once() -> None:
    """The engine's settings and DynChunk's are refused together."""
    message = problems({"TP_SIZE": "0", "DYNCHUNK_BUDGET": "nan", "DYNCHUNK_PAG": "1", "NNODES": "2"})
    for name in ("TP_SIZE", "DYNCHUNK_BUDGET", "DYNCHUNK_PAG:", "MODEL_PATH", "DIST_INIT_ADDR"):
        assert name in message


@pytest.mark.parametrize("flag", ["--chunked-prefill-size 4096", "--tp 8", "--model /x", "--port=1", "--pp-size 2"])
def test_flags_that_have_a_variable_are_not_taken_from_extra_args(flag: str) -> None:
    """The engine would take the last one, and the table that serve prints would be wrong."""
    assert "EXTRA_ARGS contains" in problems(MODEL | {"EXTRA_ARGS": flag})


def test_unbalanced_quotes_in_extra_args() -> None:
    """A quoting mistake is named, not passed on."""
    assert "EXTRA_ARGS cannot be read" in problems(MODEL | {"EXTRA_ARGS": "--x 'y"})


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_expandable_segments_are_refused(name: str) -> None:
    """NaN logits for every long prefill are worse than a server that does not start; an operator may insist."""
    environ = MODEL | {name: "max_split_size_mb:512, expandable_segments:True"}
    assert "expandable_segments:True" in problems(environ)
    assert serve.plan(environ | {"DYNCHUNK_ALLOW_EXPANDABLE_SEGMENTS": "1"}).argv
    assert serve.plan(MODEL | {name: "expandable_segments:False"}).argv


def test_a_garbage_collection_threshold_without_a_fraction_is_only_warned_about() -> None:
    """It does nothing then, which is worth a sentence and no more."""
    environ = MODEL | {"PYTORCH_ALLOC_CONF": "garbage_collection_threshold:0.9"}
    assert any("garbage_collection_threshold does nothing" in w for w in serve.plan(environ).warnings)
    both = {"PYTORCH_ALLOC_CONF": "garbage_collection_threshold:0.9,per_process_memory_fraction:0.8"}
    assert serve.plan(MODEL | both).warnings == []


@pytest.mark.parametrize("size", ["0", "-1"])
def test_chunking_off_is_refused_unless_dynchunk_is_off(size: str) -> None:
    """Without chunks there is nothing to size."""
    environ = MODEL | {"CHUNKED_PREFILL_SIZE": size}
    assert "turns chunked prefill off" in problems(environ)
    assert serve.plan(environ | {"DYNCHUNK_MODE": "off"}).argv


def test_contradictions_with_the_engine_are_seen_before_it_loads() -> None:
    """A page that cannot work is refused in a second, not after ten minutes of loading weights."""
    assert "larger than the largest chunk" in problems(MODEL | {"DYNCHUNK_PAGE": "4352"})


def test_the_floor_is_announced() -> None:
    """With a context of a million the floor exceeds the default budget; serve says from which prefix."""
    [warning] = serve.plan(MODEL | {"CONTEXT_LENGTH": "1000000"}).warnings
    assert "beyond a prefix of 781,250" in warning


def test_secrets_are_never_shown() -> None:
    """Neither API_KEY nor a key in EXTRA_ARGS appears in what serve prints."""
    environ = clean_environ(
        **MODEL, API_KEY="sk-secret-one", EXTRA_ARGS="--admin-api-key sk-secret-two --admin-api-key=sk-secret-three"
    )
    done = subprocess.run(
        [ROOT / "dynchunk", "serve", "--dry-run"], env=environ, capture_output=True, text=True, check=True
    )
    assert "secret" not in done.stdout + done.stderr
    assert "set, not shown" in done.stdout


def test_a_refusal_is_one_message_and_exit_code_2() -> None:
    """No traceback, every wrong name, nothing started."""
    done = subprocess.run(
        [ROOT / "dynchunk", "serve"],
        env=clean_environ(DYNCHUNK_BUDGET="0", PORT="x"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    for name in ("MODEL_PATH", "DYNCHUNK_BUDGET", "PORT"):
        assert name in done.stderr


def test_serve_becomes_the_engine(tmp_path: Path) -> None:
    """The engine takes over the process (signals reach it) with boot/ first on PYTHONPATH and the rest kept."""
    fake = tmp_path / "sglang"
    fake.mkdir()
    (fake / "__init__.py").write_text("")
    (fake / "launch_server.py").write_text(
        "import os, sys\nprint(os.getpid(), os.environ['PYTHONPATH'], sys.argv[1:3], flush=True)\n"
    )
    with subprocess.Popen(
        [ROOT / "dynchunk", "serve"],
        env=clean_environ(**MODEL, PYTHONPATH=str(tmp_path)),
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        last = process.stdout.read().splitlines()[-1]
    assert last == f"{process.pid} {ROOT / 'adapter' / 'boot'}{os.pathsep}{tmp_path} ['--model-path', '/models/big']"


def test_the_engine_does_not_see_the_launchers_folders() -> None:
    """Folders named `launcher`, `scripts`, `tests` on the engine's path could shadow other people's modules."""
    path = serve.engine_environ({"PYTHONPATH": f"{ROOT / 'adapter'}:{ROOT}:/theirs"})["PYTHONPATH"]
    assert path.split(":") == [str(ROOT / "adapter" / "boot"), "/theirs"]


def test_every_flag_has_its_variable() -> None:
    """The flag table and the settings class name the same things."""
    names = {f.name for f in environment.knob_fields(environment.Launch)}
    assert names - {"extra_args"} == set(environment.FLAGS)
