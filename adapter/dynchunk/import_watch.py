"""Call a function once, right after a named module has executed.

Runs at interpreter start: standard library only, and only what the interpreter has loaded already. Our own forty
lines rather than wrapt, whose import costs more than the whole start-up budget and whose proxies cannot be pickled.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False  # typing's own flag, without importing typing
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any


class ImportWatch:
    """A meta-path finder that finds nothing itself: it adds one step to the loader of the modules it watches.

    `callbacks` maps a full module name to a function that receives the executed module. An exception in the callback
    fails that import; the next attempt to import the module meets the callback again.
    """

    def __init__(self, callbacks: Mapping[str, Callable[[ModuleType], None]]) -> None:
        self.callbacks = callbacks

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The other finders' answer, its loader extended where the module is watched. Part of the import protocol."""
        callback = self.callbacks.get(name)
        if callback is None:
            return None
        # Ask the other finders in order instead of importlib.util.find_spec, which would come back here.
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                if spec.loader is not None and hasattr(spec.loader, "exec_module"):
                    _call_after_exec(spec.loader, callback)
                return spec
        return None


def _call_after_exec(loader: Any, callback: Callable[[ModuleType], None]) -> None:
    """Shadow `loader.exec_module` on this one instance; the shadow takes itself away as it runs."""
    original = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        # First, so that the module is left with the loader it would have had without us.
        del loader.exec_module
        original(module)
        callback(module)

    loader.exec_module = exec_module
