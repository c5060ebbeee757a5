"""The image build, on a real engine: what it adds to a base, what it keeps of it, and on which bases it fails."""

from __future__ import annotations

import ast
import json
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from dynchunk import __version__
from dynchunk.patches.contracts import CONTRACTS, SCHEDULER
from tests.image import harness
from tests.image.conftest import BASE, BASE_PYTHONPATH, IMAGE, build

pytestmark = [pytest.mark.image, pytest.mark.xdist_group("docker"), pytest.mark.timeout(1800)]

BOOT = "/opt/dynchunk/adapter/boot"


def inspect(engine: harness.Engine, image: str) -> dict[str, Any]:
    """The image's configuration."""
    (found,) = json.loads(engine.run("image", "inspect", image).stdout)
    config: dict[str, Any] = found["Config"]
    return config


@pytest.fixture(scope="module")
def derive(engine: harness.Engine, base: str, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A function that makes a variant of the base from Dockerfile lines and returns its name."""

    def make(name: str, *lines: str, **files: str) -> str:
        folder = tmp_path_factory.mktemp(name)
        for file, text in files.items():
            (folder / file).write_text(text)
        build(engine, folder, f"{BASE}:{name}", "\n".join([f"FROM {base}", *lines, ""]))
        return f"{BASE}:{name}"

    return make


def overlay(engine: harness.Engine, context: Path, base: str, name: str, check: bool = True) -> harness.Finished:
    """Build DynChunk's image on `base`."""
    return build(engine, context, f"{IMAGE}:{name}", None, "--build-arg", f"BASE_IMAGE={base}", check=check)


@pytest.fixture(scope="module")
def littered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout with keys, caches and stray files in it, whose files only their owner may read."""
    folder = tmp_path_factory.mktemp("littered")
    harness.Project.copy_to(folder)
    (folder / ".env").write_text("API_KEY=secret\n")
    (folder / ".git").mkdir()
    (folder / ".git" / "config").write_text("secret\n")
    (folder / "model.safetensors").write_text("large\n")
    (folder / "adapter" / "__pycache__").mkdir()
    (folder / "adapter" / "__pycache__" / "stale.cpython-311.pyc").write_text("stale\n")
    for path in folder.rglob("*"):
        path.chmod(0o700 if path.is_dir() else 0o600)  # a strict umask, or a system without executable bits
    return folder


@pytest.fixture(scope="module")
def unusual(engine: harness.Engine, littered: Path, derive: Any) -> str:
    """The image of such a checkout, on a base without a PYTHONPATH."""
    overlay(engine, littered, derive("no-path", "ENV PYTHONPATH="), "unusual")
    return f"{IMAGE}:unusual"


def test_the_base_is_kept(engine: harness.Engine, base: str, image: str) -> None:
    """PYTHONPATH, PATH, working directory, user and entry point of the base are what they were, behind our own."""
    before, after = inspect(engine, base), inspect(engine, image)
    environ = dict(pair.split("=", 1) for pair in after["Env"])
    old = dict(pair.split("=", 1) for pair in before["Env"])
    assert environ.pop("PYTHONPATH") == f"{BOOT}:{BASE_PYTHONPATH}"
    assert environ.pop("HOST") == "0.0.0.0"
    assert old.pop("PYTHONPATH") == BASE_PYTHONPATH
    assert environ == old
    for key in ("WorkingDir", "User", "Entrypoint"):
        assert after[key] == before[key]


def test_the_image_says_how_to_run_and_to_check_it(engine: harness.Engine, image: str) -> None:
    """The command and the health check are lists, so no shell stands between Docker and the engine."""
    config = inspect(engine, image)
    assert config["Cmd"] == ["dynchunk", "serve"]
    assert config["Healthcheck"]["Test"] == ["CMD", "python3", "-S", "-E", "/opt/dynchunk/launcher/health.py"]
    assert config["Labels"]["org.opencontainers.image.version"] == __version__
    assert "30000/tcp" in config["ExposedPorts"]


def test_an_empty_pythonpath_of_the_base_adds_nothing(engine: harness.Engine, unusual: str) -> None:
    """Without a PYTHONPATH in the base ours has one entry; an empty second one would be the working directory."""
    assert f"PYTHONPATH={BOOT}" in inspect(engine, unusual)["Env"]


def test_buildkit_builds_it_too(engine: harness.Engine, files: Path, base: str, image: str) -> None:
    """The newer builder makes the same image."""
    # Docker 20.10's own client has BuildKit inside; later ones need buildx beside them.
    client = "/usr/bin/docker" if Path("/usr/bin/docker").is_file() else engine.docker
    command = (client, "build", "--tag", f"{IMAGE}:buildkit", "--build-arg", f"BASE_IMAGE={base}", str(files))
    done = harness.run(*command, environ=engine.environ | {"DOCKER_BUILDKIT": "1"}, check=False)
    if "buildx component is missing" in done.stderr:
        pytest.skip("this Docker client has no BuildKit")
    assert done.returncode == 0, done.stderr
    ours, classic = inspect(engine, f"{IMAGE}:buildkit"), inspect(engine, image)
    for key in ("Env", "Cmd", "Entrypoint", "Healthcheck", "User", "WorkingDir"):
        assert ours.get(key) == classic.get(key)


def test_only_our_files_go_in(engine: harness.Engine, littered: Path, unusual: str) -> None:
    """Keys, caches and stray files of the checkout stay out; the rest is readable and compiled for any user."""
    # As nobody in particular and without a place to write to: what is missing cannot be made up for.
    run = ("run", "--rm", "--user", "12345:12345", "--read-only", unusual)
    look = "cd /opt/dynchunk && find . -type f && find . -type f -readable | wc -l && dynchunk --version"
    *found, version = engine.run(*run, "sh", "-c", look).stdout.splitlines()
    *files, readable = found
    seen = {file.removeprefix("./") for file in files}
    wanted = {
        str(path.relative_to(littered))
        for name in ("LICENSE", "dynchunk", "adapter", "docker-images", "launcher", "scripts")
        for path in [littered / name, *(littered / name).rglob("*")]
        if path.is_file() and path.suffix != ".pyc"
    }
    assert {file for file in seen if not file.endswith(".pyc")} == wanted
    tag = sys.implementation.cache_tag
    compiled = {
        str(Path(file).parent / "__pycache__" / f"{Path(file).stem}.{tag}.pyc")
        for file in wanted
        if file.endswith(".py")
    }
    assert {file for file in seen if file.endswith(".pyc")} == compiled
    assert int(readable) == len(files)
    assert version == f"dynchunk {__version__}"


def test_a_base_whose_engine_misses_a_contract_is_refused(engine: harness.Engine, files: Path, derive: Any) -> None:
    """An engine in which a hooked function has another shape fails the build, which names the function."""
    path = Path(sysconfig.get_paths()["purelib"], *SCHEDULER.split(".")).with_suffix(".py")
    contract = CONTRACTS[SCHEDULER][0]
    name = contract.target.rpartition(".")[2]
    text = path.read_text(encoding="utf-8")
    changed = text.replace(f"def {name}(self", f"def {name}(self, something_new")
    assert changed != text
    ast.parse(changed)
    other = derive("mutilated", f"COPY scheduler.py {path}", **{"scheduler.py": changed})
    done = overlay(engine, files, other, "mutilated", check=False)
    assert done.returncode != 0
    said = f"dynchunk: not met: {SCHEDULER}: {contract.target}: expected (self), found (self, something_new"
    assert said in done.stdout + done.stderr


def test_a_base_without_the_engine_is_refused(engine: harness.Engine, files: Path, derive: Any) -> None:
    """A base that is no SGLang image fails the build, which says so."""
    # The Python that the stand-in's environment was made from has no packages.
    plain = derive("no-engine", f"ENV PATH={sys.base_prefix}/bin:/usr/local/bin:/usr/bin:/bin")
    done = overlay(engine, files, plain, "no-engine", check=False)
    assert done.returncode != 0
    assert "sglang is not installed for" in done.stdout + done.stderr


def test_a_base_that_keeps_the_adapter_out_is_refused(engine: harness.Engine, files: Path, derive: Any) -> None:
    """Where `python3` ignores PYTHONPATH the adapter would never run; that image is not made."""
    wrapper = f'#!/bin/sh\nexec {sys.prefix}/bin/python3 -E "$@"\n'
    lines = ("COPY python3 /opt/isolated/", "RUN chmod 755 /opt/isolated/python3", "ENV PATH=/opt/isolated:$PATH")
    done = overlay(engine, files, derive("isolated", *lines, python3=wrapper), "isolated", check=False)
    assert done.returncode != 0
    assert "dynchunk: image: the adapter is not loaded by python3 (/opt/isolated/python3)" in done.stdout + done.stderr
