"""Start DynChunk in every Python process of the image, then run the sitecustomize this file shadows.

Nothing here may stop an interpreter: a failure is one line on stderr. Only modules that the interpreter has
already loaded are used, because pip, compilers and health probes start through this file as well.
"""

import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))


def _start_adapter() -> None:
    if os.environ.get("DYNCHUNK_MODE", "").strip().lower() == "off":
        return
    adapter = os.path.dirname(_HERE)
    if adapter not in sys.path:
        sys.path.append(adapter)
    from dynchunk import activate

    activate.install()


def _run_shadowed() -> None:
    """Run the sitecustomize that would have been found without this folder, as if this one did not exist."""
    from _frozen_importlib import module_from_spec
    from _frozen_importlib_external import PathFinder

    # Another copy of this file further down comes here as well, and some tools' files search the whole path as of
    # old: whoever has run does not run again, and nobody is looked for in front of the one who looks.
    seen = sys.__dict__.setdefault("_dynchunk_boot", [])
    if _HERE in seen:
        return
    seen.append(_HERE)
    entries = [os.path.abspath(entry) for entry in sys.path]
    behind = entries[entries.index(_HERE) + 1 :] if _HERE in entries else entries
    spec = PathFinder.find_spec("sitecustomize", [entry for entry in behind if entry not in seen])
    if spec is None or spec.loader is None:
        return
    module = module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


try:
    _start_adapter()
except Exception as error:
    sys.stderr.write(
        f"dynchunk: the adapter did not start in pid {os.getpid()}: {type(error).__name__}: {error}; "
        "SGLang runs WITHOUT DynChunk in this process\n"
    )
_run_shadowed()
