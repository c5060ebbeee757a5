"""The switch: which engine modules are watched, and what happens when one of them has been imported.

`install()` runs at interpreter start (boot/sitecustomize.py) or as an SGLang plugin (entry point, see
dynchunk-*.dist-info); the second call does nothing. Until an SGLang module is imported only `sys` and `os` are used.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # typing's own flag, without importing typing
if TYPE_CHECKING:
    from types import ModuleType

    from dynchunk.import_watch import ImportWatch

# Engine module -> the file under patches/ that answers for it.
PATCHES = {
    "sglang.srt.managers.scheduler": "scheduler",
    "sglang.srt.managers.schedule_policy": "schedule_policy",
    "sglang.srt.managers.scheduler_components.request_receiver": "request_receiver",
    "sglang.srt.model_executor.model_runner": "model_runner",
    # Where the sparse indexer keeps its score limits; patches/score_limits.py says what each one is. The first is
    # executed before all others, and some of those read the environment while they are.
    "sglang.srt.environ": "score_limits",
    "sglang.srt.layers.attention.mqa_logits_utils": "score_limits",
    "sglang.srt.layers.attention.dsa.dsa_indexer": "score_limits",
    "sglang.srt.layers.attention.qsa.qsa_indexer": "score_limits",
    "sglang.srt.layers.attention.dsv4.v41_indexer.scoring": "score_limits",
    "sglang.srt.layers.attention.dsv4.low_ratio_backend_hip": "score_limits",
    "sglang.srt.layers.attention.dsv4.low_ratio_backend": "score_limits",
    "sglang.srt.layers.attention.dsv4.candidate_blocks_hip": "score_limits",
    "sglang.srt.layers.attention.deepseek_v4_backend": "score_limits",
    "sglang.kernels.ops.attention.dsv4.fp4_indexer_hip": "score_limits",
    # Where it holds more than those limits say.
    "sglang.srt.layers.attention.dsv4.v41_indexer.sparse_table": "score_tiles",
    "sglang.srt.layers.attention.dsv4.v41_indexer.full_topk": "indexer_keys",
    "sglang.srt.layers.attention.dsv4.v41_indexer.dense_blocks": "indexer_keys",
    "sglang.srt.layers.attention.dsv4.sparse_prefill_utils": "kv_workspace",
    "sglang.srt.layers.attention.dsv4.indexer": "torch_fallback",
}

_watch: ImportWatch | None = None


def mode() -> str:
    """The raw switch. A misspelt value counts as `on` here; it is reported as soon as SGLang is imported."""
    return os.environ.get("DYNCHUNK_MODE", "").strip().lower() or "on"


def install() -> None:
    """Watch the engine's modules; patch those that are imported already. Safe to call again."""
    global _watch
    if _watch is not None or mode() == "off":
        return
    from dynchunk.import_watch import ImportWatch

    _watch = ImportWatch(dict.fromkeys(PATCHES, _patch))
    sys.meta_path.insert(0, _watch)
    for name in PATCHES:
        if name in sys.modules:
            _patch_imported(name)


def _patch_imported(name: str) -> None:
    """Patch a module whose import began before the watch stood, after any thread that is at it has finished."""
    import importlib

    # Returns at once for a finished module; blocks on the import lock of one that another thread is executing.
    module = importlib.import_module(name)
    if getattr(module.__spec__, "_initializing", False):
        _refuse(
            RuntimeError(
                f"{name} is being imported by the very code that starts DynChunk; start DynChunk earlier "
                "(put its boot folder on PYTHONPATH) or after that import"
            )
        )
    _patch(module)


def _patch(module: ModuleType) -> None:
    """Hand an executed engine module to its patch. In mode `on`, a failure ends the process."""
    import importlib

    try:
        patch = importlib.import_module("dynchunk.patches." + PATCHES[module.__name__])
        patch.apply(module)
    except Exception as error:
        _refuse(error)


def _refuse(error: Exception) -> None:
    """Say once why; in mode `on` end this process, in mode `report` leave the engine as it was.

    SystemExit, not an ordinary exception: SGLang logs and ignores the exceptions of plugins, which would leave a
    server running without its guard.
    """
    from dynchunk import journal

    journal.refuse(error)
    if mode() != "report":
        raise SystemExit(1) from error
