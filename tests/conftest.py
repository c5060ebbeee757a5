"""What tests share: a fresh interpreter, and a small package that stands for the engine in import tests."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from dynchunk.patches.contracts import CONTRACTS, SCHEDULE_BATCH, SCHEDULER

ROOT = Path(__file__).resolve().parent.parent
BOOT = ROOT / "adapter" / "boot"

# A shell starts what it puts in the background deaf to Ctrl-C, and nohup to a hangup, and so are all their children;
# the tests send them both.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


# What takes long begins first, so that in the end no worker has it alone. "off" before all: others read its answers.
FIRST = ("off", "docker", "guarded", "two hosts")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="also those that show more of the same (marked `more`)")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what only --all runs, and put the long ones first."""
    if not config.getoption("--all"):
        left_out = [item for item in items if item.get_closest_marker("more")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
    items.sort(key=_place)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Groups that pytest-xdist takes apart without a word (3.8.0 beside pytest 9.2) would start their servers twice."""
    if getattr(session.config, "workerinput", {}) and session.config.getoption("dist") == "loadgroup":
        for item in session.items:
            group = item.get_closest_marker("xdist_group")
            if group is not None and not item.nodeid.endswith(f"@{group.args[0]}"):
                raise pytest.UsageError(f"{item.nodeid} is not kept with its group {group.args[0]!r}")


def _place(item: pytest.Item) -> int:
    group = item.get_closest_marker("xdist_group")
    if group is not None and group.args[0] in FIRST:
        return FIRST.index(group.args[0])
    kinds = ("image", "engine", "slow")
    return len(FIRST) + next((i for i, kind in enumerate(kinds) if item.get_closest_marker(kind)), len(kinds))


def clean_environ(**extra: str) -> dict[str, str]:
    """This environment without anything of DynChunk's or Python's path in it; `python3` is the Python of the tests."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("DYNCHUNK_", "PYTHON", "PYTORCH_", "SGLANG_"))}
    kept["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    kept["VENV"] = sys.prefix  # what ./dynchunk runs on
    return kept | extra


def no_dotenv(words: Sequence[object]) -> tuple[str, ...]:
    """Options that keep the checkout's own .env out of a test, where it names no file itself."""
    return () if "--env-file" in words else ("--env-file", os.devnull)


def run_python(
    code: str, *flags: str, path: tuple[Path, ...] = (BOOT,), timeout_s: int = 300, **env: str
) -> subprocess.CompletedProcess[str]:
    """Run `code` in a fresh interpreter with `path` on PYTHONPATH."""
    environ = clean_environ(PYTHONPATH=os.pathsep.join(map(str, path)), **env)
    return subprocess.run(
        [sys.executable, *flags, "-c", code],
        env=environ,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


FAKE_CONTEXT = """
from types import SimpleNamespace
published = None
def get_parallel(): raise RuntimeError("no engine here")
get_disagg = get_exec = get_parallel
def get_schedule():
    if published is None: raise ValueError("not published")
    return published
get_model = get_schedule
"""


def fake_source(module: str) -> str:
    """A module with the classes and functions of its contracts: the right parameters, the names they must use."""
    classes: dict[str, list[str]] = {}
    for contract in CONTRACTS[module]:
        owner, _, name = contract.target.partition(".")
        uses = ", ".join(f"self.{used}" for used in contract.uses)
        classes.setdefault(owner, []).append(f"    def {name}({contract.signatures[0]}): return [{uses}]")
    return "\n".join(f"class {owner}:\n" + "\n".join(methods) for owner, methods in classes.items()) + "\n"


@pytest.fixture
def fake_engine(tmp_path: Path) -> Path:
    """A folder with a package `sglang` whose modules have the shape that the scheduler's contracts ask for."""
    managers = tmp_path / "fake" / "sglang" / "srt" / "managers"
    managers.mkdir(parents=True)
    # Regular packages: a namespace package would lose against an installed engine.
    for package in (managers, managers.parent, managers.parent.parent):
        (package / "__init__.py").write_text("")
    (managers.parent / "runtime_context.py").write_text(FAKE_CONTEXT)
    (managers / "schedule_batch.py").write_text(fake_source(SCHEDULE_BATCH))
    (managers / "scheduler.py").write_text(f"from {SCHEDULE_BATCH} import ScheduleBatch\n{fake_source(SCHEDULER)}")
    torch = tmp_path / "fake" / "torch"
    torch.mkdir()
    (torch / "__init__.py").write_text("")
    return tmp_path / "fake"
