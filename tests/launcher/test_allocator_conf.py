"""The allocator's settings: what serve refuses, what it hands to torch, and that torch takes it."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dynchunk.settings import Settings, SettingsError, from_env
from launcher import allocator, serve
from tests.conftest import ROOT, clean_environ

MODEL = {"MODEL_PATH": "/models/big"}
BOTH = {"DYNCHUNK_MEMORY_FRACTION": "0.92", "DYNCHUNK_GC_THRESHOLD": "0.95"}


def problems(**environ: str) -> str:
    with pytest.raises(SettingsError) as caught:
        serve.plan(MODEL | environ)
    return str(caught.value)


def conf(environ: dict[str, str], settings: Settings | None = None) -> str | None:
    return allocator.engine_variables(environ, settings or from_env(environ)).get("PYTORCH_ALLOC_CONF")


def fake_package(folder: Path, name: str, version: str) -> None:
    """The metadata of an installed package, and nothing else of it."""
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def fake_engine(folder: Path) -> None:
    """An engine that prints its allocator settings and ends."""
    (folder / "sglang").mkdir(parents=True)
    (folder / "sglang" / "__init__.py").write_text("")
    (folder / "sglang" / "launch_server.py").write_text(
        "import os\nprint('engine:', [os.environ.get(n) for n in ('PYTORCH_ALLOC_CONF', 'PYTORCH_CUDA_ALLOC_CONF')])\n"
    )


def run_serve(folder: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [ROOT / "dynchunk", "serve", "--env-file", os.devnull],
        env=clean_environ(**MODEL, PYTHONPATH=str(folder), **environ),
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
    )


def test_both_options_become_one_variable() -> None:
    """The spelling that torch reads."""
    assert conf(BOTH) == "per_process_memory_fraction:0.92,garbage_collection_threshold:0.95"
    assert conf({"DYNCHUNK_MEMORY_FRACTION": "0.9"}) == "per_process_memory_fraction:0.9"


@pytest.mark.parametrize("name", allocator.VARIABLES)
def test_the_operators_options_stay(name: str) -> None:
    """Under either name; afterwards there is one variable only."""
    made = allocator.engine_variables(BOTH | {name: "max_split_size_mb:64"}, from_env(BOTH))
    assert made["PYTORCH_ALLOC_CONF"].startswith("max_split_size_mb:64,per_process_memory_fraction:0.92,")
    assert "PYTORCH_CUDA_ALLOC_CONF" not in made


def test_an_empty_second_variable_does_not_wipe_the_first() -> None:
    """Compose passes what is unset as empty, and torch would take that for the last word."""
    given = {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64", "PYTORCH_CUDA_ALLOC_CONF": ""}
    assert allocator.engine_variables(given, Settings()) == {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}


@pytest.mark.parametrize("mode", ["off", "report"])
def test_nothing_is_changed_unless_dynchunk_is_on(mode: str) -> None:
    """Off is the stock engine, and report changes nothing."""
    environ = BOTH | {"DYNCHUNK_MODE": mode, "PYTORCH_CUDA_ALLOC_CONF": ""}
    assert allocator.engine_variables(environ, from_env(environ)) == environ


def test_two_variables_that_differ_are_refused() -> None:
    """Torch would heed one of them and say nothing; the same text twice does no harm."""
    one, other = {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128"}
    assert "torch heeds one of them only" in problems(**one, **other)
    assert serve.plan(MODEL | one | {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}).argv


def test_an_option_given_twice_is_refused() -> None:
    """Once as torch's option and once as ours: which one counts would be a matter of order."""
    message = problems(PYTORCH_ALLOC_CONF="per_process_memory_fraction:0.8", **BOTH, MEM_FRACTION_STATIC="0.7")
    assert "PYTORCH_ALLOC_CONF has per_process_memory_fraction, and DYNCHUNK_MEMORY_FRACTION is set too" in message


def test_the_threshold_must_lie_above_the_static_share() -> None:
    """Weights and KV cache count as reserved: 0.9 of 0.92 is 0.828, below a static share of 0.85."""
    message = problems(DYNCHUNK_MEMORY_FRACTION="0.92", DYNCHUNK_GC_THRESHOLD="0.9", MEM_FRACTION_STATIC="0.85")
    assert "DYNCHUNK_GC_THRESHOLD=0.9 of DYNCHUNK_MEMORY_FRACTION=0.92 is not above MEM_FRACTION_STATIC=0.85" in message
    assert "above 0.92" in message
    assert serve.plan(MODEL | BOTH | {"MEM_FRACTION_STATIC": "0.85"}).warnings == []


def test_the_fraction_must_lie_above_the_static_share() -> None:
    """Otherwise the engine would run out of memory while it loads."""
    message = problems(DYNCHUNK_MEMORY_FRACTION="0.8", MEM_FRACTION_STATIC="0.8")
    assert "weights and KV cache alone would exceed it" in message


def test_what_cannot_be_checked_is_said() -> None:
    """Without MEM_FRACTION_STATIC the engine decides what is static."""
    assert any("MEM_FRACTION_STATIC is left to the engine" in w for w in serve.plan(MODEL | BOTH).warnings)


def test_a_threshold_alone_is_refused() -> None:
    """It would do nothing, in silence."""
    assert "DYNCHUNK_GC_THRESHOLD=0.9 does nothing without DYNCHUNK_MEMORY_FRACTION" in problems(
        DYNCHUNK_GC_THRESHOLD="0.9"
    )


def test_torchs_own_threshold_with_our_fraction_works() -> None:
    """The two options may come from two places; the warning about a threshold without a fraction is not due."""
    environ = {"PYTORCH_ALLOC_CONF": "garbage_collection_threshold:0.95", "DYNCHUNK_MEMORY_FRACTION": "0.92"}
    assert serve.plan(MODEL | environ | {"MEM_FRACTION_STATIC": "0.8"}).warnings == []


@pytest.mark.parametrize(
    ("version", "refused"),
    [
        ("2.13.0", True),
        ("2.13.1+cu130", True),
        ("2.14.0", False),
        ("2.14.1+cu130", False),
        ("2.15.0a0+git1234", False),
        ("3.0", False),
        (None, True),
        ("unknown", True),
    ],
)
def test_torch_before_2_14_is_refused(version: str | None, *, refused: bool) -> None:
    """It ends with "unrecognized key" somewhere in the engine's start; here it is one sentence."""
    message = allocator.too_old(from_env(BOTH), version)
    assert (message is not None) == refused
    assert allocator.too_old(Settings(), version) is None


def test_the_version_comes_from_metadata(tmp_path: Path) -> None:
    """Torch is not imported: a folder with metadata and no torch in it is enough."""
    fake_package(tmp_path, "torch", "2.13.0")
    environ = clean_environ(PYTHONPATH=str(tmp_path))
    assert allocator.torch_version(sys.executable, environ) == "2.13.0"
    assert allocator.torch_version(str(tmp_path / "no-python"), environ) is None


def test_serve_asks_the_engines_torch(tmp_path: Path) -> None:
    """The whole way: an old torch beside the engine ends the start with the reason, a new one gets the options."""
    fake_engine(tmp_path / "old")
    fake_package(tmp_path / "old", "torch", "2.13.0")
    done = run_serve(tmp_path / "old", **BOTH)
    assert done.returncode != 0
    assert "the engine's Python has torch 2.13.0, which refuses per_process_memory_fraction" in done.stderr
    assert "Traceback" not in done.stderr
    fake_engine(tmp_path / "new")
    fake_package(tmp_path / "new", "torch", "2.14.1")
    done = run_serve(tmp_path / "new", **BOTH, PYTORCH_CUDA_ALLOC_CONF="")
    assert "engine: ['per_process_memory_fraction:0.92,garbage_collection_threshold:0.95', None]" in done.stdout


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed here")
def test_the_real_torch_takes_what_serve_hands_over() -> None:
    """The installed torch, asked for its allocator settings in force; the cure for an empty variable is one."""
    given = clean_environ(PYTORCH_CUDA_ALLOC_CONF="", **BOTH)
    code = "import torch; print(torch._C._accelerator_getAllocatorSettings())"
    if allocator.too_old(from_env(BOTH), allocator.torch_version(sys.executable, given)):
        pytest.skip("this torch has no memory fraction")
    seen = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env=allocator.engine_variables(given, from_env(BOTH)),
        capture_output=True,
        text=True,
        check=True,
    )
    assert seen.stdout.strip() == "per_process_memory_fraction:0.92,garbage_collection_threshold:0.95"
