"""One engine, one stand-in base and one image for all image tests."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.image import harness, stand_in

# On the machine's own engine other tests may run beside: whatever is made there has a name, or a label, of our own.
NAME = f"{harness.NAME}-{os.getpid()}"
BASE = f"{NAME}/sglang-stand-in"
IMAGE = f"{NAME}/dynchunk"
# What the base has on PYTHONPATH: a folder with a sitecustomize of its own.
BASE_PYTHONPATH = "/opt/base-path"
# Every image made here inherits it from the base, those that a failed build leaves behind as well; so do containers.
LABEL = "dynchunk.test"


@pytest.fixture(scope="session")
def programs() -> Path:
    """The folder with docker-compose and hadolint."""
    return harness.programs()


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what a user has of the project, without anything that git ignores."""
    folder = tmp_path_factory.mktemp("project")
    harness.Project.copy_to(folder)
    return folder


@pytest.fixture(scope="session")
def project(files: Path, programs: Path) -> harness.Project:
    """Compose over a copy of the project's files; needs no engine."""
    return harness.Project(files, programs / "docker-compose", None)


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[harness.Engine]:
    """A Docker engine. Its containers, networks and files are gone when the tests end."""
    reason = stand_in.why_not()
    if reason:
        pytest.skip(f"no stand-in for the base image can be made: {reason}")
    try:
        with harness.engine(tmp_path_factory.mktemp("docker-config")) as running:
            if not running.own:
                remove_what_the_dead_left(running)
            yield running
            if not running.own:
                remove(running, os.getpid())
    except harness.NoEngineError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def base(engine: harness.Engine, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The stand-in for the public SGLang image, its engine's source text included, with a PYTHONPATH of its own."""
    folder = tmp_path_factory.mktemp("base")
    archive = folder / "base.tar"
    stand_in.write(archive)
    path = f"{sys.prefix}/bin:/usr/local/bin:/usr/sbin:/usr/bin"
    changes = (
        *(f"ENV PATH={path}", f"ENV PYTHONPATH={BASE_PYTHONPATH}"),
        *("WORKDIR /sgl-workspace/sglang", f"LABEL {LABEL}={os.getpid()}"),
    )
    words = [word for change in changes for word in ("--change", change)]
    engine.run("import", *words, str(archive), f"{BASE}:bare")
    archive.unlink()
    (folder / "sitecustomize.py").write_text("import sys\nsys.base_sitecustomize_ran = True\n")
    build(engine, folder, f"{BASE}:ci", f"FROM {BASE}:bare\nCOPY sitecustomize.py {BASE_PYTHONPATH}/\n")
    return f"{BASE}:ci"


@pytest.fixture(scope="session")
def image(engine: harness.Engine, base: str, files: Path, programs: Path) -> str:
    """The image, built as a user builds it: by Compose, from the project's files."""
    project = harness.Project(files, programs / "docker-compose", engine, BASE_IMAGE=base)
    override = Path(__file__).with_name("compose.test.yaml")
    project.compose(
        *("build", "cpu"),
        files=("compose.yaml", str(override)),
        environ={"TEST_IMAGE": f"{IMAGE}:ci", "TEST_ENVIRONMENT": sys.prefix},
    )
    return f"{IMAGE}:ci"


def build(
    engine: harness.Engine, context: Path, tag: str, dockerfile: str | None = None, *options: str, check: bool = True
) -> harness.Finished:
    """`docker build` with the classic builder."""
    if dockerfile is not None:
        (context / "Dockerfile").write_text(dockerfile)
    words = ("build", "--force-rm", "--tag", tag, *options, str(context))
    return engine.run(*words, check=check, environ={"DOCKER_BUILDKIT": "0"})


def remove_what_the_dead_left(engine: harness.Engine) -> None:
    """Take away what earlier tests made that were killed."""
    images = engine.run("images", "--all", "--quiet", "--filter", f"label={LABEL}").stdout.split()
    if images:
        form = f'{{{{index .Config.Labels "{LABEL}"}}}}'
        for pid in set(engine.run("image", "inspect", "--format", form, *images).stdout.split()):
            if not Path("/proc", pid).exists():
                remove(engine, int(pid))


def remove(engine: harness.Engine, pid: int) -> None:
    """Take away all that the tests with this process id made."""
    made = ("--quiet", "--filter", f"label={LABEL}={pid}")
    for container in engine.run("ps", "--all", *made).stdout.split():
        engine.run("rm", "--force", "--volumes", container)
    for kind in ("network", "volume"):
        for found in engine.run(kind, "ls", "--quiet", "--filter", f"name={harness.NAME}-{pid}-").stdout.split():
            engine.run(kind, "rm", found)
    before: set[str] = set()
    # Newest first would do, were it not for images that others are made from: again until a round removes none.
    while (left := set(engine.run("images", "--all", *made).stdout.split())) and left != before:
        engine.run("rmi", "--force", *left, check=False)
        before = left
