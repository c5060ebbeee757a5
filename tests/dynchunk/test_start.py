"""The start path: every Python process of the image goes through it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.conftest import BOOT, ROOT, run_python

HEAVY = [
    "typing",
    "re",
    "json",
    "logging",
    "dataclasses",
    "inspect",
    "enum",
    "functools",
    "collections",
    "contextlib",
    "threading",
    "subprocess",
    "asyncio",
    "importlib.metadata",
    "importlib.util",
    "tokenize",
    "linecache",
    "traceback",
    "torch",
    "sglang",
    "numpy",
]
WATCHED = "sglang.srt.managers.scheduler"


def test_a_process_without_sglang_loads_nothing_heavy() -> None:
    """The start hook adds our own few modules and `__future__` to an interpreter, nothing else."""
    show = "import os, sys; print('\\n'.join(sorted(sys.modules)))"
    # -S: without site-packages, whose .pth files load all sorts of things on their own.
    bare = set(run_python(show, "-S", path=()).stdout.split())
    ours = set(run_python("import sitecustomize\n" + show, "-S").stdout.split())
    assert ours - bare <= {
        "sitecustomize",
        "__future__",
        "_frozen_importlib_external",
        "dynchunk",
        "dynchunk.activate",
        "dynchunk.import_watch",
    }
    assert "dynchunk.import_watch" in ours
    assert not ours & set(HEAVY) - {"linecache"}  # Python 3.13 loads that one itself, for `-c`


def test_off_does_nothing_at_all() -> None:
    """With DYNCHUNK_MODE=off no module of ours is loaded and no finder is added."""
    done = run_python(
        "import sys; print([m for m in sys.modules if 'dynchunk' in m], [type(f).__name__ for f in sys.meta_path])",
        DYNCHUNK_MODE="off",
    )
    assert "ImportWatch" not in done.stdout
    assert done.stdout.startswith("[] ")
    assert done.stderr == ""


def test_the_watch_stands_first() -> None:
    """A fresh interpreter has the import watch at the head of sys.meta_path."""
    done = run_python("import sys; print(type(sys.meta_path[0]).__name__)")
    assert done.stdout.strip() == "ImportWatch"
    assert done.stderr == ""


def test_the_shadowed_sitecustomize_still_runs(tmp_path: Path) -> None:
    """Another sitecustomize further down the path runs as if ours were not there, and is the one importers find."""
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.theirs = True\nname = 'theirs'\n")
    done = run_python(
        "import sys, sitecustomize; print(sys.theirs, sitecustomize.name, 'dynchunk.activate' in sys.modules)",
        path=(BOOT, tmp_path),
    )
    assert done.stdout.split() == ["True", "theirs", "True"], done.stderr


def test_the_shadowed_sitecustomize_runs_when_off(tmp_path: Path) -> None:
    """Turning DynChunk off must not turn other people's start hooks off."""
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.theirs = True\n")
    done = run_python("import sys; print(sys.theirs)", path=(BOOT, tmp_path), DYNCHUNK_MODE="off")
    assert done.stdout.strip() == "True", done.stderr


def test_a_failing_shadowed_sitecustomize_leaves_python_alive(tmp_path: Path) -> None:
    """An exception in the other sitecustomize is reported by Python as usual; the process goes on."""
    (tmp_path / "sitecustomize.py").write_text("raise ValueError('theirs')\n")
    done = run_python("print('alive')", path=(BOOT, tmp_path))
    assert done.stdout.strip() == "alive"
    assert "theirs" in done.stderr


@pytest.mark.skipif(not Path("/usr/bin/python3").exists(), reason="no system Python here")
def test_under_the_systems_own_sitecustomize() -> None:
    """Debian ships a sitecustomize of its own in the library folder; with ours on PYTHONPATH both have run."""
    import subprocess

    done = subprocess.run(
        ["/usr/bin/python3", "-c", "import sys; print('dynchunk.activate' in sys.modules)"],
        env={"PYTHONPATH": str(BOOT), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.strip() == "True", done.stderr
    assert done.stderr == ""


def test_a_broken_adapter_leaves_python_alive(tmp_path: Path) -> None:
    """Whatever is wrong with our own files, the interpreter starts, and one line names us and the cause."""
    boot = tmp_path / "adapter" / "boot"
    boot.mkdir(parents=True)
    (boot / "sitecustomize.py").write_text((BOOT / "sitecustomize.py").read_text())
    package = tmp_path / "adapter" / "dynchunk"
    package.mkdir()
    (package / "__init__.py").write_text("raise OSError('half an upload')\n")
    done = run_python("print('alive')", path=(boot,))
    assert done.stdout.strip() == "alive"
    assert done.stderr.count("\n") == 1
    assert "dynchunk" in done.stderr
    assert "half an upload" in done.stderr


@pytest.mark.parametrize("order", ["before", "after", "thread", "spawn"])
def test_the_target_is_patched_however_it_is_imported(fake_engine: Path, order: str) -> None:
    """A module imported before DynChunk starts, after, from another thread, or in a spawned child is patched."""
    ask = f"import {WATCHED} as m; print(hasattr(m.Scheduler.on_idle, '__dynchunk__'))"
    code = {
        "after": ask,
        "thread": f"import threading\nt = threading.Thread(target=lambda: exec({ask!r}))\nt.start(); t.join()",
        "before": (
            f"import {WATCHED}, sys\nsys.path.append({str(ROOT / 'adapter')!r})\n"
            f"from dynchunk import activate\nactivate.install()\n{ask}"
        ),
        "spawn": (
            f"import multiprocessing as mp\nmp.get_context('spawn').Process(target=exec, args=({ask!r},)).start()"
        ),
    }[order]
    boot = () if order == "before" else (BOOT,)
    done = run_python(code, path=(*boot, fake_engine))
    assert done.stdout.strip() == "True", done.stderr


def test_both_loaders_patch_once(fake_engine: Path) -> None:
    """The start hook and SGLang's plugin loader may both call install(); the engine is wrapped once."""
    done = run_python(
        "from importlib.metadata import entry_points\n"
        "[ep] = [e for e in entry_points(group='sglang.srt.plugins') if e.name == 'dynchunk']\n"
        f"import {WATCHED} as m\nep.load()()\nep.load()()\n"
        "f = m.Scheduler.on_idle\nprint(hasattr(f, '__wrapped__'), hasattr(f.__wrapped__, '__wrapped__'))",
        path=(BOOT, fake_engine),
    )
    assert done.stdout.split() == ["True", "False"], done.stderr


def test_the_plugin_alone_is_enough(fake_engine: Path) -> None:
    """With adapter/ on PYTHONPATH and no start hook, the entry point finds and patches the engine."""
    done = run_python(
        "from importlib.metadata import entry_points\n"
        "[ep] = [e for e in entry_points(group='sglang.srt.plugins') if e.name == 'dynchunk']\nep.load()()\n"
        f"import {WATCHED} as m\nprint(hasattr(m.Scheduler.on_idle, '__dynchunk__'))",
        path=(ROOT / "adapter", fake_engine),
    )
    assert done.stdout.strip() == "True", done.stderr


def test_report_changes_nothing(fake_engine: Path) -> None:
    """Mode `report` leaves the engine as it is and says what would be done."""
    done = run_python(
        f"import {WATCHED} as m; print(hasattr(m.Scheduler.on_idle, '__dynchunk__'))",
        path=(BOOT, fake_engine),
        DYNCHUNK_MODE="report",
    )
    assert done.stdout.strip() == "False"
    assert "would apply" in done.stderr


@pytest.mark.parametrize(
    ("chunk", "said"),
    [
        (2048, "in mode on: budget 200,000,000 token^2 (prefix rule), chunks 256 to 2,048 in pages of 64"),
        (-1, "chunked prefill is off, so no prefill can be bounded; start with"),
    ],
)
def test_report_says_what_a_scheduler_would_run_under(fake_engine: Path, chunk: int, said: str) -> None:
    """Once the engine has settled its sizes, mode `report` says what `on` would make of them, or why it would not."""
    child = (
        "import threading, time, types\nfrom dynchunk.patches import look_on\nlook_on.ASK_AGAIN_S = 0.01\n"
        "looks, ask = [], look_on._published\nlook_on._published = lambda: (looks.append(1), ask())[1]\n"
        f"import {WATCHED} as m, sglang.srt.runtime_context as c\nwhile len(looks) < 2: time.sleep(0.01)\n"
        f"c.published = types.SimpleNamespace(chunked_prefill_size={chunk}, page_size=64, context_length=900_000)\n"
        "[looking] = [t for t in threading.enumerate() if t.name == 'dynchunk-report']\nlooking.join()\n"
        "print(hasattr(m.Scheduler.maybe_init_dynamic_chunk_sizer, '__dynchunk__'))"
    )
    done = run_python(
        f"import multiprocessing as mp\nmp.get_context('spawn').Process(target=exec, args=({child!r}, {{}})).start()",
        path=(BOOT, fake_engine),
        DYNCHUNK_MODE="report",
    )
    assert done.stdout.strip() == "False"
    assert said in done.stderr
    assert ("beyond a prefix of 781,250 tokens" in done.stderr) == (chunk > 0)


def test_a_contract_that_does_not_match_ends_the_start(fake_engine: Path) -> None:
    """In mode `on` a moved target ends the process with one message that names target, expected and found."""
    scheduler = fake_engine / "sglang" / "srt" / "managers" / "scheduler.py"
    scheduler.write_text(scheduler.read_text().replace("def on_idle(self)", "def on_idle(self, really)"))
    done = run_python(f"import {WATCHED}; print('served')", path=(BOOT, fake_engine))
    assert done.returncode == 1
    assert "served" not in done.stdout
    assert done.stderr.count("Scheduler.on_idle: expected (self), found (self, really)") >= 1
    assert "Traceback" not in done.stderr
    assert "tested with sglang 0.5.20, 0.5.21, 0.5.22, 0.5.23" in done.stderr
    assert "DYNCHUNK_MODE=off" in done.stderr


def test_an_import_that_was_refused_is_refused_again(fake_engine: Path) -> None:
    """Code that swallows the refusal and tries again does not get an unguarded engine."""
    scheduler = fake_engine / "sglang" / "srt" / "managers" / "scheduler.py"
    scheduler.write_text(scheduler.read_text().replace("def on_idle(self)", "def on_idle(self, really)"))
    done = run_python(
        f"for i in range(2):\n try:\n  import {WATCHED}\n except SystemExit: print('refused')",
        path=(BOOT, fake_engine),
    )
    assert done.stdout.split() == ["refused", "refused"]


def test_report_goes_on_where_on_would_refuse(fake_engine: Path) -> None:
    """Mode `report` says that the start would be refused, and lets the engine start."""
    scheduler = fake_engine / "sglang" / "srt" / "managers" / "scheduler.py"
    scheduler.write_text(scheduler.read_text().replace("def on_idle(self)", "def on_idle(self, really)"))
    done = run_python(f"import {WATCHED}; print('served')", path=(BOOT, fake_engine), DYNCHUNK_MODE="report")
    assert done.stdout.strip() == "served"
    assert "found (self, really)" in done.stderr


def fake_version(engine: Path, version: str) -> None:
    info = engine / f"sglang-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: sglang\nVersion: {version}\n")


@pytest.mark.parametrize("version", ["0.5.18", "0.5.19"])
def test_versions_whose_ranks_can_diverge_are_refused(fake_engine: Path, version: str) -> None:
    """0.5.18 and 0.5.19 are refused with the reason, even if every contract were met."""
    fake_version(fake_engine, version)
    done = run_python(f"import {WATCHED}", path=(fake_engine, BOOT))
    assert done.returncode == 1
    assert f"sglang {version} is not supported" in done.stderr
    assert "Use 0.5.20 or later" in done.stderr


def test_an_untested_version_that_meets_every_contract_is_patched_and_marked(fake_engine: Path) -> None:
    """People run development builds: what decides is the contract, and the journal says what was not tested."""
    fake_version(fake_engine, "0.5.24.dev7")
    done = run_python(
        f"import {WATCHED} as m; print(hasattr(m.Scheduler.on_idle, '__dynchunk__'))", path=(fake_engine, BOOT)
    )
    assert done.stdout.strip() == "True"
    assert "untested version" in done.stderr
    assert '"untested_version": "0.5.24.dev7"' in done.stderr


def test_wrong_settings_end_the_start_in_one_message(fake_engine: Path) -> None:
    """Every wrong setting is named when SGLang is imported; before that, other processes are left alone."""
    wrong = {"DYNCHUNK_BUDGET": "nan", "DYNCHUNK_PAG": "64", "DYNCHUNK_RULE": "both"}
    assert run_python("print('fine')", **wrong).stdout.strip() == "fine"
    done = run_python(f"import {WATCHED}", path=(BOOT, fake_engine), **wrong)
    assert done.returncode == 1
    for name in wrong:
        assert name in done.stderr
    assert "did you mean DYNCHUNK_PAGE?" in done.stderr


def test_a_function_somebody_else_wrapped_is_refused(fake_engine: Path) -> None:
    """Two hooks on one function hide each other's faults; the second one is refused."""
    scheduler = fake_engine / "sglang" / "srt" / "managers" / "scheduler.py"
    scheduler.write_text(
        scheduler.read_text()
        + "\nimport functools\nfrom theirs import around\n"
        + "Scheduler.on_idle = functools.wraps(Scheduler.on_idle)(around)\n"
    )
    (fake_engine / "theirs.py").write_text("def around(self): pass\n")
    done = run_python(f"import {WATCHED}", path=(BOOT, fake_engine))
    assert done.returncode == 1
    assert "other code has wrapped" in done.stderr


def test_patched_functions_stay_functions(fake_engine: Path) -> None:
    """Patched methods are plain functions that pickle by name, as spawn needs, and keep their name and signature."""
    done = run_python(
        f"import pickle, inspect, types; from {WATCHED} import Scheduler as S\n"
        "f = S.on_idle\nassert type(f) is types.FunctionType\n"
        "assert pickle.loads(pickle.dumps(f)) is f\nprint(f.__qualname__, inspect.signature(f))",
        path=(BOOT, fake_engine),
    )
    assert done.stdout.strip() == "Scheduler.on_idle (self)", done.stderr


def test_python_version_is_one_the_engine_runs_on() -> None:
    """The suite runs where the engine does: a green run on another Python would prove nothing."""
    assert sys.version_info >= (3, 11)
