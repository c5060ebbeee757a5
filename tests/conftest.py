"""What tests share: a fresh interpreter, and a small package that stands for the engine in import tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
BOOT = ROOT / "adapter" / "boot"


def clean_environ(**extra: str) -> dict[str, str]:
    """This environment without anything of DynChunk's or Python's path in it."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("DYNCHUNK_", "PYTHON", "SGLANG_"))}
    return kept | extra


def run_python(
    code: str, *flags: str, path: tuple[Path, ...] = (BOOT,), timeout_s: int = 60, **env: str
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


FAKE_SCHEDULER = '''
class Scheduler:
    """Stands for the engine's class; only its shape matters."""
    def maybe_init_dynamic_chunk_sizer(self): self.dynamic_chunk_sizer = None
    def _get_new_batch_prefill_raw(self, prefill_delayer_single_pass, running_batch):
        return self.chunked_req, self.dynamic_chunk_sizer.predict(1), self.chunked_prefill_size
    def get_internal_state(self, recv_req): pass
    def on_idle(self): pass
'''
FAKE_CONTEXT = "def get_parallel(): raise RuntimeError('no engine here')\n"


@pytest.fixture
def fake_engine(tmp_path: Path) -> Path:
    """A folder with a package `sglang` whose modules have the shape that the scheduler's contracts ask for."""
    managers = tmp_path / "fake" / "sglang" / "srt" / "managers"
    managers.mkdir(parents=True)
    # Regular packages: a namespace package would lose against an installed engine.
    for package in (managers, managers.parent, managers.parent.parent):
        (package / "__init__.py").write_text("")
    (managers.parent / "runtime_context.py").write_text(FAKE_CONTEXT)
    (managers / "scheduler.py").write_text(FAKE_SCHEDULER)
    torch = tmp_path / "fake" / "torch"
    torch.mkdir()
    (torch / "__init__.py").write_text("")
    return tmp_path / "fake"
