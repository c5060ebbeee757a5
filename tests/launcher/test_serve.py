"""`serve`: from the environment to the engine's command line."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from dynchunk.settings import SettingsError, knob_fields
from launcher import dotenv, environment, model_context, serve
from tests.conftest import ROOT, clean_environ
from tests.launcher.conftest import dynchunk, within

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
        SERVED_MODEL_NAME="-big",
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
        EXTRA_ARGS="--trust-remote-code --json-model-override-args '{\"a\": 1}'",
    )
    for flag, value in {
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
    }.items():
        assert value_of(argv, flag) == value
    assert "--served-model-name=-big" in argv  # as a word of its own it would be another flag
    assert argv[-3:] == ["--trust-remote-code", "--json-model-override-args", '{"a": 1}']


def test_all_problems_at_once() -> None:
    """Spelling, contradictions, the allocator, and what the sizes come to: one message, one sentence for each."""
    message = problems(
        {
            "TP_SIZE": "0",
            "DYNCHUNK_BUDGET": "nan",
            "DYNCHUNK_PAG": "1",
            "DYNCHUNK_PAGE": "4352",
            "NNODES": "2",
            "NODE_RANK": "2",
            "PYTORCH_ALLOC_CONF": "expandable_segments:True",
            "EXTRA_ARGS": "--port 1",
        }
    )
    names = ("TP_SIZE", "DYNCHUNK_BUDGET", "DYNCHUNK_PAG:", "MODEL_PATH", "DIST_INIT_ADDR", "NODE_RANK=2")
    for name in (*names, "PYTORCH_ALLOC_CONF", "EXTRA_ARGS contains", "a page of 4,352"):
        assert message.count(name) == 1, name
    assert message.startswith("9 settings are wrong:")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"CHUNKED_PREFILL_SIZE": "x", "DYNCHUNK_PAGE": "4352"}, "CHUNKED_PREFILL_SIZE="),
        ({"DYNCHUNK_CHUNK_MIN": "many"}, "DYNCHUNK_CHUNK_MIN="),
        ({"DYNCHUNK_CHUNK_MIN": "512", "DYNCHUNK_CHUNK_MAX": "256"}, "DYNCHUNK_CHUNK_MIN="),
        ({"NNODES": "x", "NODE_RANK": "1"}, "NNODES="),
        ({"CHUNKED_PREFILL_SIZE": "-1", "DYNCHUNK_PAGE": "4352"}, "CHUNKED_PREFILL_SIZE="),
    ],
)
def test_what_follows_from_a_wrong_value_is_not_a_second_problem(wrong: dict[str, str], said: str) -> None:
    """Nothing is concluded from a value that is not there."""
    with pytest.raises(SettingsError) as caught:
        serve.plan(MODEL | wrong)
    [problem] = caught.value.problems
    assert problem.startswith(said)


def test_a_misspelt_mode() -> None:
    """It is not taken for one of the three; everything else is checked as for `on`."""
    message = problems(MODEL | {"DYNCHUNK_MODE": "of", "CHUNKED_PREFILL_SIZE": "-1"})
    assert "DYNCHUNK_MODE='of': not one of on, report, off" in message
    assert "turns chunked prefill off" in message


@pytest.mark.parametrize(
    ("nnodes", "rank", "fine"),
    [("2", "1", True), ("2", "2", False), ("2", "3", False), ("", "1", False), ("1", "0", True)],
)
def test_hosts_are_numbered_from_0(nnodes: str, rank: str, fine: bool) -> None:
    """NODE_RANK is below NNODES; where that is a default, the message says so."""
    environ = MODEL | {"NNODES": nnodes, "NODE_RANK": rank, "DIST_INIT_ADDR": "a:1"}
    if fine:
        assert serve.plan(environ).argv
    else:
        hosts = f"NNODES={nnodes}" if nnodes else "NNODES, 1 by default"
        assert f"NODE_RANK={rank} is not below {hosts};" in problems(environ)


@pytest.mark.parametrize(
    ("words", "variable"),
    [
        ("--chunked-prefill-size 4096", "CHUNKED_PREFILL_SIZE"),
        ("--chunked-prefill 4096", "CHUNKED_PREFILL_SIZE"),
        ("--chunked=4096", "CHUNKED_PREFILL_SIZE"),
        ("--context-len 4096", "CONTEXT_LENGTH"),
        ("--tp 8", "TP_SIZE"),
        ("--tensor-parallel-size 8", "TP_SIZE"),
        ("--tensor-p 8", "TP_SIZE"),
        ("--pipeline-parallel=2", "PP_SIZE"),
        ("--model /x", "MODEL_PATH"),
        ("--nccl-init-addr a:1", "DIST_INIT_ADDR"),
        ("--nccl-init=a:1", "DIST_INIT_ADDR"),
        ("--dist-init a:1", "DIST_INIT_ADDR"),
        ("--port=1", "PORT"),
        ("--api-k s3cret", "API_KEY"),
    ],
)
def test_flags_that_have_a_variable_are_not_taken_from_extra_args(words: str, variable: str) -> None:
    """However it is written: the engine would take the last one, and the table that serve prints would be wrong."""
    message = problems(MODEL | {"EXTRA_ARGS": "--trust-remote-code " + words})
    assert message.startswith(f"EXTRA_ARGS contains {words.replace('=', ' ').split()[0]}")
    assert message.endswith(f"set {variable} instead")
    assert "s3cret" not in message


def test_a_beginning_of_several_flags() -> None:
    """The engine would refuse it; we say what it may be short for."""
    assert "may be short for --page-size or --pp-size" in problems(MODEL | {"EXTRA_ARGS": "--p 1"})


@pytest.mark.parametrize(
    "words", ["--max-prefill-tokens 1", "--portx 1", "--host-memory 1", "--chunked-x=1", "-p 1", "port"]
)
def test_other_flags_pass(words: str) -> None:
    """Only a beginning of a flag stands for it."""
    assert serve.plan(MODEL | {"EXTRA_ARGS": words}).argv[-len(words.split()) :] == words.split()


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


REFUSED = [
    ({"CHUNKED_PREFILL_SIZE": "0"}, "turns chunked prefill off"),
    ({"CHUNKED_PREFILL_SIZE": "-1"}, "turns chunked prefill off"),
    ({"DYNCHUNK_PAGE": "4352"}, "larger than the largest chunk"),
    ({"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, "NaN logits"),
]


@pytest.mark.parametrize(("setting", "why"), REFUSED)
def test_what_on_refuses_report_only_says(setting: dict[str, str], why: str) -> None:
    """`report` changes nothing, so it ends no start either; it says what `on` would do."""
    assert why in problems(MODEL | setting)
    [warning] = serve.plan(MODEL | setting | {"DYNCHUNK_MODE": "report"}).warnings
    assert warning.startswith("DYNCHUNK_MODE=on would refuse to start: ")
    assert why in warning


@pytest.mark.parametrize(("setting", "why"), REFUSED)
def test_off_starts_the_stock_engine(setting: dict[str, str], why: str) -> None:
    """Whatever DynChunk thinks of it."""
    planned = serve.plan(MODEL | setting | {"DYNCHUNK_MODE": "off"})
    assert planned.summary.endswith("the stock engine")
    assert any(why in warning for warning in planned.warnings) is (why == "NaN logits")


@pytest.mark.parametrize(
    ("context", "chunk_min", "warned"),
    [("781250", "256", False), ("781251", "256", True), ("512000", "", False), ("512000", "512", True)],
)
def test_the_floor_is_announced(context: str, chunk_min: str, warned: bool) -> None:
    """Where the context is longer than the floor keeps the budget for; serve says from which prefix on."""
    warnings = serve.plan(MODEL | {"CONTEXT_LENGTH": context, "DYNCHUNK_CHUNK_MIN": chunk_min}).warnings
    assert len(warnings) == warned
    if warned:
        last = 200_000_000 // int(chunk_min)
        assert warnings[0].startswith(f"beyond a prefix of {last:,} tokens")
        assert f"context length of {int(context):,}" in warnings[0]


def model_of(folder: Path, tokens: int) -> dict[str, str]:
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": tokens}))
    return {"MODEL_PATH": str(folder)}


@pytest.mark.parametrize(("longest", "expected"), [(32_768, "32768"), (512_000, "512000"), (1_048_576, "512000")])
def test_the_default_context_fits_the_model(tmp_path: Path, longest: int, expected: str) -> None:
    """The engine refuses a context above the model's own; a default is not worth that, and is said to be less."""
    planned = serve.plan(model_of(tmp_path, longest))
    assert value_of(planned.argv, "--context-length") == expected
    assert planned.origins == ({"CONTEXT_LENGTH": "the model's config.json"} if longest < 512_000 else {})
    assert planned.warnings == []


@pytest.mark.parametrize(("asked", "warned"), [("32768", False), ("32769", True)])
def test_a_context_above_the_models_own(tmp_path: Path, asked: str, warned: bool) -> None:
    """What the operator asks for is passed on, with a warning of what the engine will do, and its cure."""
    environ = model_of(tmp_path, 32_768) | {"CONTEXT_LENGTH": asked}
    planned = serve.plan(environ)
    assert value_of(planned.argv, "--context-length") == asked
    assert [w.startswith(f"CONTEXT_LENGTH={int(asked):,} is above the 32,768") for w in planned.warnings] == [
        True
    ] * warned
    assert serve.plan(environ | {model_context.MAY_BE_LONGER: "1"}).warnings == []


def test_a_model_that_is_not_here_yet(tmp_path: Path) -> None:
    """Of a name that was never downloaded nothing is known: the default stays, and is said to be one."""
    environ = {"MODEL_PATH": "org/name", "HF_HOME": str(tmp_path)}
    [warning] = serve.plan(environ).warnings
    assert "not known before it is downloaded" in warning
    assert serve.plan(environ | {"CONTEXT_LENGTH": "1000"}).warnings == []


@pytest.mark.parametrize(
    ("environ", "note"),
    [
        ({"DYNCHUNK_CHUNK_MAX": "200"}, "the default floor of 256 is lowered to 192, the largest chunk"),
        ({"DYNCHUNK_CHUNK_MAX": "32"}, "the default floor of 256 is lowered to 32, the largest chunk"),
        ({"DYNCHUNK_PAGE": "384"}, "the default floor of 256 becomes 384, whole pages of 384"),
        ({"DYNCHUNK_CHUNK_MIN": "100"}, "DYNCHUNK_CHUNK_MIN=100 becomes 128, whole pages of 64"),
        ({"CHUNKED_PREFILL_SIZE": "2000"}, "the engine's chunk size of 2,000 becomes 1,984, whole pages of 64"),
        ({"DYNCHUNK_CHUNK_MAX": "1000"}, "DYNCHUNK_CHUNK_MAX=1,000 becomes 960, whole pages of 64"),
        ({"CHUNKED_PREFILL_SIZE": "128"}, "the default floor of 256 is lowered to 128, the largest chunk"),
        ({"PAGE_SIZE": "512"}, "the default floor of 256 becomes 512, whole pages of 512"),
    ],
)
def test_a_default_bows_to_what_the_operator_chose(environ: dict[str, str], note: str) -> None:
    """It is not refused, and a note says what became of it; only settings that were set are named."""
    planned = serve.plan(MODEL | environ)
    assert note in planned.notes
    for sentence in planned.notes:
        assert not (sentence.startswith("DYNCHUNK_") and sentence.partition("=")[0] not in environ)


DP = {"EXTRA_ARGS": "--enable-dp-attention --dp-size 4", "CHUNKED_PREFILL_SIZE": "4096"}


def test_the_chunk_of_a_rank_counts() -> None:
    """Under data-parallel attention the engine divides its chunk; what does not fit a rank's part is refused here."""
    planned = serve.plan(MODEL | DP)
    assert "chunks 256 to 1,024" in planned.summary
    assert "CHUNKED_PREFILL_SIZE=4,096 on 4 data-parallel ranks is 1,024 tokens per rank" in planned.notes
    assert value_of(planned.argv, "--chunked-prefill-size") == "4096"
    message = problems(DP | {"DYNCHUNK_CHUNK_MIN": "2048", "TP_SIZE": "0"})
    for said in ("MODEL_PATH", "TP_SIZE", "DYNCHUNK_CHUNK_MIN=2,048 is above the largest chunk of 1,024"):
        assert message.count(said) == 1
    assert "4,096 on 4 data-parallel ranks is 1,024 tokens per rank" in message
    message = problems(MODEL | DP | {"CHUNKED_PREFILL_SIZE": "3"})
    assert "leaves no token to a data-parallel rank" in message
    assert "set it to 8192" in message


def test_flags_that_cannot_be_read_hide_no_other_problem() -> None:
    """What is wrong without the flags in EXTRA_ARGS is wrong with them."""
    message = problems(MODEL | {"EXTRA_ARGS": "--x 'y", "DYNCHUNK_PAGE": "4352"})
    assert "EXTRA_ARGS cannot be read" in message
    assert "a page of 4,352" in message


def test_the_page_of_the_model_counts(tmp_path: Path) -> None:
    """Where PAGE_SIZE is unset, the engine pages a DeepSeek-V4 by 256, and DYNCHUNK_PAGE must be a multiple of that."""
    (tmp_path / "config.json").write_text('{"model_type": "deepseek_v4"}')
    v4 = {"MODEL_PATH": str(tmp_path)}
    assert "in pages of 256" in serve.plan(v4).summary
    assert "DYNCHUNK_PAGE=64 is not a multiple of the engine's page of 256" in problems(v4 | {"DYNCHUNK_PAGE": "64"})
    assert "in pages of 64" in serve.plan(v4 | {"DYNCHUNK_PAGE": "64", "PAGE_SIZE": "64"}).summary


def test_two_choices_that_contradict_each_other_are_refused() -> None:
    """Neither is a default, so neither may bow."""
    message = problems(MODEL | {"DYNCHUNK_CHUNK_MIN": "512", "CHUNKED_PREFILL_SIZE": "256"})
    assert "DYNCHUNK_CHUNK_MIN=512 is above the largest chunk of 256" in message


def test_secrets_are_never_shown() -> None:
    """Neither API_KEY, nor a key in EXTRA_ARGS, nor a URL's password appears in what serve prints."""
    done = dynchunk(
        *("serve", "--dry-run"),
        MODEL_PATH="redis://me:s3cret@host/model",
        API_KEY="sk-s3cret-one",
        EXTRA_ARGS="--admin-api-key sk-s3cret-two --admin-api-k=s3cret-three --ssl-keyfile-p s3cret "
        '--hicache-storage-backend-extra-config \'{"access_key": "s3cret"}\'',
    )
    assert done.returncode == 0, done.stderr
    assert "s3cret" not in done.stdout + done.stderr
    assert "set, not shown" in done.stdout
    assert done.stdout.count("redis://***@host/model") == 2


def test_odd_values_are_shown_as_they_are() -> None:
    """What looks like rich's markup neither vanishes nor ends the command."""
    done = within("serve", "--dry-run", MODEL_PATH="/models/[/red]", SERVED_MODEL_NAME="[bold]big :smile:")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split() for line in lines if line.startswith("MODEL_PATH")] == [
        ["MODEL_PATH", "/models/[/red]", "environment"]
    ]
    assert any(line.startswith("SERVED_MODEL_NAME") and "[bold]big :smile:" in line for line in lines)


def test_a_refusal_is_one_message_and_exit_code_2() -> None:
    """No traceback, every wrong name, nothing started."""
    done = dynchunk("serve", DYNCHUNK_BUDGET="0", PORT="x", API_KEY="schlüssel")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    for name in ("MODEL_PATH", "DYNCHUNK_BUDGET", "PORT", "API_KEY"):
        assert name in done.stderr
    assert "schlüssel" not in done.stderr


def test_the_table_says_where_each_value_is_from(tmp_path: Path) -> None:
    """Environment, file, the model's own config.json, or default; the environment comes before the file."""
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 4096}')
    file = tmp_path / "mine.env"
    file.write_text(f"MODEL_PATH='{tmp_path}' # here\nexport PORT=1234\nTP_SIZE=2\nDYNCHUNK_BUDGET=1e8\nSGLANG_X=y\n")
    done = within("serve", "--dry-run", env_file=str(file), PORT="4321", TP_SIZE="")
    rows = {line.split()[0]: line.split()[1:] for line in done.stdout.splitlines() if line}
    assert rows["MODEL_PATH"] == [str(tmp_path), "mine.env"]
    assert rows["PORT"] == ["4321", "environment"]
    assert rows["TP_SIZE"] == ["1", "default"]
    assert rows["CONTEXT_LENGTH"] == ["4,096", "the", "model's", "config.json"]
    assert rows["DYNCHUNK_BUDGET"] == ["100,000,000", "mine.env"]


def test_a_file_that_is_wrong_is_named() -> None:
    """With its line, and exit code 2 as for any wrong setting."""
    done = within("serve", env_file="/nowhere")
    assert (done.returncode, done.stderr) == (
        2,
        "dynchunk serve: not started: --env-file /nowhere: there is no such file\n",
    )


FAKE_ENGINE = """
import json, multiprocessing, os, sys
def child(q):
    q.put([sys.argv[1:], __name__])
def main():
    q = multiprocessing.get_context("spawn").Queue()
    process = multiprocessing.get_context("spawn").Process(target=child, args=(q,))
    process.start()
    cmdline = open("/proc/self/cmdline").read().split("\\0")
    names = ("PYTHONPATH", "SGLANG_X", "API_KEY", "PYTHONSAFEPATH", "DYNCHUNK_BUDGET")
    environ = {name: os.environ.get(name) for name in names}
    print(json.dumps([os.getpid(), sys.argv[1:], cmdline, environ, q.get()]), flush=True)
    process.join()
if __name__ == "__main__":
    main()
"""


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    """A folder with something that is started as the engine is."""
    fake = tmp_path / "site" / "sglang"
    fake.mkdir(parents=True)
    (fake / "__init__.py").write_text("")
    (fake / "launch_server.py").write_text(FAKE_ENGINE)
    return fake.parent


def started(engine: Path, **environ: str) -> tuple[int, list[object]]:
    """(the process's id, what the fake engine saw) of `./dynchunk serve`."""
    with subprocess.Popen(
        [ROOT / "dynchunk", "serve", "--env-file", os.devnull],
        env=clean_environ(**MODEL, PYTHONPATH=str(engine), **environ),
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        last = process.stdout.read().splitlines()[-1]
    return process.pid, json.loads(last)


def test_serve_becomes_the_engine(engine: Path) -> None:
    """The engine takes over the process (signals reach it) with boot/ first on PYTHONPATH and the rest kept."""
    pid, seen = started(engine, SGLANG_X="y")
    environ = {"PYTHONPATH": f"{ROOT / 'adapter' / 'boot'}{os.pathsep}{engine}", "SGLANG_X": "y", "API_KEY": None}
    assert seen[0] == pid
    assert seen[1][:2] == ["--model-path", "/models/big"]  # type: ignore[index]
    assert seen[3] == environ | {"PYTHONSAFEPATH": None, "DYNCHUNK_BUDGET": None}


def test_the_key_reaches_the_engine_but_not_its_command_line(engine: Path) -> None:
    """Every user of a machine can read command lines. Nothing else differs, not even in a spawned child."""
    _, (_, bare, _, _, child) = started(engine)
    _, (_, words, cmdline, environ, child_with_key) = started(engine, API_KEY=" s3cret ")
    assert words == ["--api-key=s3cret", *bare]  # type: ignore[misc]
    assert not [word for word in cmdline if "s3cret" in word]  # type: ignore[attr-defined]
    assert environ["API_KEY"] == "s3cret"  # type: ignore[index]
    assert child_with_key == [["--api-key=s3cret", *child[0]], "__mp_main__"]  # type: ignore[index]
    assert child[1] == "__mp_main__"  # type: ignore[index]


def test_what_serve_prints_starts_the_same(engine: Path) -> None:
    """The command line can be copied: with the key in the environment it is complete."""
    environ = clean_environ(**MODEL, PYTHONPATH=str(engine), API_KEY="s3cret")
    shown = subprocess.run(
        [ROOT / "dynchunk", "serve", "--dry-run", "--env-file", os.devnull],
        env=environ,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()[-1]
    done = subprocess.run(["sh", "-c", shown], env=environ, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout.splitlines()[-1])[1][:2] == ["--api-key=s3cret", "--model-path"]


def test_the_engine_does_not_see_the_launchers_folders() -> None:
    """Folders named `launcher`, `scripts`, `tests` on the engine's path could shadow other people's modules."""
    path = serve.engine_environ({"PYTHONPATH": f"{ROOT / 'adapter'}:{ROOT}:/theirs"})["PYTHONPATH"]
    assert path.split(":") == [str(ROOT / "adapter" / "boot"), "/theirs"]


def test_a_file_is_in_the_engines_environment(tmp_path: Path) -> None:
    """All of it, as in Compose: SGLANG_ and NCCL_ settings too, and PYTHONPATH where the environment has none."""
    file = tmp_path / "env"
    file.write_text("SGLANG_X=y\nPYTHONPATH=/theirs\n")
    made = serve.engine_environ(dotenv.merged({}, file).environ)
    assert made["SGLANG_X"] == "y"
    assert made["PYTHONPATH"] == f"{ROOT / 'adapter' / 'boot'}:/theirs"


def test_every_flag_has_its_variable() -> None:
    """The flag table and the settings class name the same things."""
    names = {f.name for f in knob_fields(environment.Launch)}
    assert names - {"extra_args"} == set(environment.FLAGS)


def test_the_folder_it_is_called_from_does_not_matter(tmp_path: Path) -> None:
    """A user's folder may hold packages of any name; none of them is taken for ours."""
    for name in ("launcher", "dynchunk", "scripts", "rich", "typer"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('the wrong one')\n")
    done = dynchunk("serve", "--dry-run", cwd=tmp_path, **MODEL)
    assert done.returncode == 0, done.stderr
    done = dynchunk("memguard", "--help", cwd=tmp_path, env_file="")
    assert "the wrong one" not in done.stdout + done.stderr
