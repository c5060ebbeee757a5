"""The import watch's promises, each in a fresh interpreter."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from dynchunk.import_watch import ImportWatch


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, list[ModuleType]]]:
    """A folder on sys.path whose module `watched_module` is watched; the modules the callback has seen."""
    seen: list[ModuleType] = []
    watch = ImportWatch({"watched_module": seen.append})
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", [watch, *sys.meta_path])
    (tmp_path / "watched_module.py").write_text("value = 1\n")
    yield tmp_path, seen
    sys.modules.pop("watched_module", None)


def test_called_once_after_the_module_has_executed(watched: tuple[Path, list[ModuleType]]) -> None:
    """The callback sees a finished module, once, however often it is imported."""
    import watched_module  # type: ignore[import-not-found]
    import watched_module as again

    assert watched[1] == [watched_module]
    assert again.value == 1


def test_a_probe_does_not_use_the_callback_up(watched: tuple[Path, list[ModuleType]]) -> None:
    """importlib.util.find_spec looks without importing; the import that follows is still seen."""
    assert importlib.util.find_spec("watched_module") is not None
    assert watched[1] == []
    importlib.import_module("watched_module")
    assert len(watched[1]) == 1


def test_a_module_whose_first_import_fails_is_seen_on_the_second(watched: tuple[Path, list[ModuleType]]) -> None:
    """An import that raises is not a patched module; the next attempt meets the watch again."""
    folder, seen = watched
    (folder / "watched_module.py").write_text("raise ValueError('not yet')\n")
    with pytest.raises(ValueError, match="not yet"):
        importlib.import_module("watched_module")
    assert seen == []
    (folder / "watched_module.py").write_text("value = 22\n")
    importlib.invalidate_caches()
    importlib.import_module("watched_module")
    assert [m.value for m in seen] == [22]


def test_the_loader_is_left_as_found(watched: tuple[Path, list[ModuleType]]) -> None:
    """After the import nothing of ours hangs on the module's loader."""
    module = importlib.import_module("watched_module")
    loader = module.__spec__.loader  # type: ignore[union-attr]
    assert type(loader) is importlib.machinery.SourceFileLoader
    assert "exec_module" not in vars(loader)


def test_a_reload_is_seen_again(watched: tuple[Path, list[ModuleType]]) -> None:
    """Reloading makes new functions; the callback gets to patch those as well."""
    importlib.reload(importlib.import_module("watched_module"))
    assert len(watched[1]) == 2


def test_many_threads_importing_at_once(watched: tuple[Path, list[ModuleType]]) -> None:
    """Sixteen threads that import the module together get one execution and one callback."""
    (watched[0] / "watched_module.py").write_text("import time\ntime.sleep(0.05)\nvalue = 1\n")
    importlib.invalidate_caches()
    threads = [threading.Thread(target=importlib.import_module, args=("watched_module",)) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(watched[1]) == 1


def test_other_finders_are_asked_in_their_order(
    watched: tuple[Path, list[ModuleType]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A finder of somebody else's that knows the module keeps the last word on where it comes from."""
    other = watched[0] / "elsewhere"
    other.mkdir()
    (other / "watched_module.py").write_text("value = 'elsewhere'\n")

    class TheirFinder:
        @staticmethod
        def find_spec(name: str, path: object = None, target: object = None) -> object:
            if name != "watched_module":
                return None
            return importlib.util.spec_from_file_location(name, other / "watched_module.py")

    monkeypatch.setattr(sys, "meta_path", [sys.meta_path[0], TheirFinder, *sys.meta_path[1:]])
    importlib.import_module("watched_module")
    assert [m.value for m in watched[1]] == ["elsewhere"]


def test_a_failing_callback_fails_the_import(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A module that could not be patched is not left imported."""

    def fail(module: ModuleType) -> None:
        raise RuntimeError("refused")

    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "refused_module.py").write_text("")
    monkeypatch.setattr(sys, "meta_path", [ImportWatch({"refused_module": fail}), *sys.meta_path])
    for _ in range(2):
        with pytest.raises(RuntimeError, match="refused"):
            importlib.import_module("refused_module")
        assert "refused_module" not in sys.modules
