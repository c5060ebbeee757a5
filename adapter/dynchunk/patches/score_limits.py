"""Lower the byte limits that the engine keeps for the sparse indexer's score buffers, wherever they live.

`LIMITS` is the whole of it: which engine versions have a limit, in which module, under which name, and how it is read
and set. Each is lowered right after its module has executed; `settle` does so again when model and device are known,
`verify` reads all of them at the first prefill. None is ever set above the engine's own.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from dynchunk import journal
from dynchunk.contract import MARK, ContractError, Patch, apply_all
from dynchunk.patches import contracts
from dynchunk.policy import score_budget
from dynchunk.policy.score_budget import MIB, PLAIN_LIMIT_BYTES
from dynchunk.settings import SettingsError, current

# Which environment variables are DynChunk's own doing: processes that this one starts inherit both.
OURS = "_DYNCHUNK_SET"

# How a limit is read and set.
GLOBAL = "module global, read at every call"
ENVIRON = "environment, read when a module is imported or at every call"
FUNCTION = "function's result, asked before every large prefill"
DEVICE_TABLE = "class attribute {device: bytes}; the first reading is kept for ever"

_V41 = ("0.5.21", "0.5.22", "0.5.23")
_ALL = ("0.5.20", *_V41)
_DEV: tuple[str, ...] = ()  # development builds of September 2026 only
_ATTENTION = "sglang.srt.layers.attention."
_ENVIRON = "sglang.srt.environ"
_DSA_INDEXER = _ATTENTION + "dsa.dsa_indexer"
RATIO_WITHOUT_INDEXER = 128  # layers that compress as much attend to all they keep


@dataclass(frozen=True)
class Limit:
    """One limit. unit: bytes that one unit of its value stands for; 0 where it counts tokens.

    follows_gpu: whether `auto` depends on the GPU, because tiles of few rows would leave it idle. unset: the value
    without the environment variable. operators: the variable by which an operator sets this limit himself, after which
    it is left alone. copies: modules that import the name by value.
    """

    versions: tuple[str, ...]
    module: str
    name: str
    how: str = GLOBAL
    unit: int = 1
    follows_gpu: bool = False
    unset: int = 0
    operators: str = ""
    copies: tuple[str, ...] = ()

    @property
    def hook(self) -> str:
        """Its name in the journal."""
        return f"score_limit.{self.module.rsplit('.', 1)[1]}.{self.name}"


_FP4_POOL = "SGLANG_DSV4_FP4_LOGITS_BUDGET_MB"
_KV_CHUNK = "SGLANG_MAX_KV_CHUNK_CAPACITY"
# Rebuilding the keys of a cached prefix (MLA) takes 896 bytes x heads of one rank for each of this many tokens.
KV_CHUNK_TOKENS = 32_768
LIMITS = (
    Limit(_V41, _ATTENTION + "dsv4.v41_indexer.scoring", "_DEEP_GEMM_SCORE_BUDGET_BYTES", follows_gpu=True),
    Limit(_V41, _ATTENTION + "dsv4.v41_indexer.scoring", "_TORCH_SCORE_BUDGET_BYTES"),
    Limit(("0.5.22", "0.5.23"), _ATTENTION + "dsv4.low_ratio_backend_hip", "_CANDIDATE_SCORE_BUDGET_BYTES"),
    # DeepSeek-V4, k-pool and DSA ask this one function.
    Limit(
        _V41,
        _ATTENTION + "mqa_logits_utils",
        "mqa_logits_static_budget_bytes",
        FUNCTION,
        follows_gpu=True,
        copies=(_DSA_INDEXER, _ATTENTION + "dsa.utils"),
    ),
    Limit(_ALL, _DSA_INDEXER, "Indexer._mqa_logits_budget_bytes", DEVICE_TABLE, follows_gpu=True),
    Limit(_ALL, _ATTENTION + "qsa.qsa_indexer", "_QSA_PREFILL_LOGITS_BUDGET_BYTES"),
    # Counts fp32 elements. Its pool is sized from it at first use, so it must not be raised later.
    Limit(
        _ALL, "sglang.kernels.ops.attention.dsv4.fp4_indexer_hip", "_LOGITS_BUDGET_ELEMS", unit=4, operators=_FP4_POOL
    ),
    Limit(_ALL, _ENVIRON, _FP4_POOL, ENVIRON, unit=MIB, unset=2048, operators=_FP4_POOL),
    # Sums are taken in other parts than with the engine's value, as with another chunk size.
    Limit(_ALL, _ENVIRON, _KV_CHUNK, ENVIRON, unit=0, unset=131_072, operators=_KV_CHUNK),
    Limit(_DEV, _ATTENTION + "deepseek_v4_backend", "_TORCH_INDEXER_SCORE_BUDGET_BYTES"),
    Limit(_DEV, _ATTENTION + "deepseek_v4_backend", "_DENSE_INDEXER_LOGITS_BUDGET_BYTES", follows_gpu=True),
    Limit(_DEV, _ATTENTION + "dsv4.low_ratio_backend", "_TORCH_INDEXER_SCORE_BUDGET_BYTES"),
    Limit(_DEV, _ATTENTION + "dsv4.low_ratio_backend", "_DENSE_INDEXER_LOGITS_BUDGET_BYTES", follows_gpu=True),
    Limit(_DEV, _ATTENTION + "dsv4.candidate_blocks_hip", "_TORCH_INDEXER_SCORE_BUDGET_BYTES"),
)


@dataclass
class Found:
    """A limit in this process, in its units. own: the engine's value. lowered: ours, 0 where the engine's counts."""

    module: ModuleType
    own: int
    lowered: int

    @property
    def in_force(self) -> int:
        """What counts now; 0 where the engine's own is not known."""
        return self.lowered or self.own


@dataclass(frozen=True)
class Shape:
    """What `auto` depends on: the keys of the longest context, the indexer's heads (0: none), the multiprocessors."""

    keys: int
    heads: int
    processors: int | None
    device: int | None


_found: dict[Limit, Found] = {}
_shape: Shape | None = None  # until `settle`


def wanted_bytes(*, follows_gpu: bool = False) -> int:
    """What DYNCHUNK_INDEXER_SCORE_MIB comes to for one kind of limit; 0: leave the engine's own."""
    configured = current()
    if configured.indexer_score_mib != "auto":
        return int(configured.indexer_score_mib) * MIB
    # Cut by keys, a tile has rows enough at any context.
    if not follows_gpu or configured.indexer == "keys" or _shape is None or not (_shape.heads and _shape.processors):
        return PLAIN_LIMIT_BYTES
    return score_budget.auto_limit_bytes(_shape.keys, _shape.heads, _shape.processors)


def in_force_bytes() -> int | None:
    """The largest tile that the limits in force allow; None where this model has no sparse indexer."""
    if _shape is None or not _shape.heads:
        return None
    return max((f.in_force * limit.unit for limit, f in _found.items() if limit.follows_gpu), default=None)


def limit_of(name: str) -> int:
    """The bytes in force of the limit called `name`; 0 where this engine has none, or its own is not known."""
    return max((f.in_force * limit.unit for limit, f in _found.items() if limit.name == name), default=0)


def processors() -> int:
    """Multiprocessors of the device; 1 while that is not known."""
    return (_shape.processors if _shape is not None else None) or 1


def apply(module: ModuleType) -> None:
    """Lower this module's limits and say what came of each."""
    try:
        current()
    except SettingsError:
        if module.__name__ != _ENVIRON:
            raise
        return  # said where the scheduler is imported; not every process that looks at the engine needs to end
    required = contracts.SCORE_LIMITS.get(module.__name__, ())
    apply_all(module, [Patch(contract) for contract in required], hint=contracts.HINT)
    for limit in LIMITS:
        if limit.module == module.__name__:
            _lower(module, limit)


def settle() -> None:
    """Complete the limits once device and model are known, and note those whose module this model did not load."""
    import sglang  # here, so that the table can be read without the engine

    global _shape
    _shape = _ask_engine()
    for limit, found in list(_found.items()):
        _lower(found.module, limit)
    root = Path(next(iter(sglang.__path__))).parent
    seen = journal.snapshot()["hooks"]
    for hook, module in ({limit.hook: limit.module for limit in LIMITS} | contracts.INDEXER_HOOKS).items():
        if hook in seen:
            continue
        if root.joinpath(*module.split(".")).with_suffix(".py").exists():
            journal.record(hook, journal.NOT_IN_USE, "this model does not load it")
        else:
            journal.record(hook, journal.ABSENT, "this engine version has no such module")


def verify() -> list[str]:
    """Read every lowered limit again: one sentence for each that is not in force. For the first prefill."""
    problems = []
    for limit, found in _found.items():
        if not found.lowered:
            continue
        if (now := _read(found.module, limit)) is not None and now > found.lowered:
            problems.append(_not_in_force(limit, found.lowered, now))
        problems += [
            f"{copy.__name__}.{limit.name}: not the one that DynChunk limits"
            for copy in _copies(limit)
            if not getattr(vars(copy)[limit.name], MARK, False)
        ]
        pool = vars(found.module).get("_LOGITS_POOL") or {}
        problems += [
            f"{limit.module}._LOGITS_POOL: {_shown(limit, block.numel())}, made before the limit was lowered"
            for block in pool.values()
            if block.numel() > found.lowered
        ]
    return problems


def _lower(module: ModuleType, limit: Limit) -> None:
    found = _found.get(limit)
    own = found.own if found and found.own else _own(module, limit)
    wanted = _wanted(limit)
    if own is None:
        journal.record(limit.hook, journal.ABSENT, "this engine version has no such limit")
    elif limit.how == DEVICE_TABLE and _table_device() is None:
        _found[limit] = Found(module, 0, 0)
        without_device = _shape is not None and _shape.device is None
        outcome = journal.NO_DEVICE if without_device else journal.NOT_IN_USE
        journal.record(limit.hook, outcome, "an entry for each CUDA device of a model with a sparse indexer")
    elif _set_by_operator(limit):
        journal.record(limit.hook, journal.NOT_IN_USE, f"{limit.operators} of the operator counts")
    elif wanted == 0:
        journal.record(limit.hook, journal.NOT_IN_USE, "DYNCHUNK_INDEXER_SCORE_MIB=0 leaves it")
    elif 0 < own <= wanted:
        _found[limit] = Found(module, own, 0)
        if found and found.lowered:  # before the GPU was known
            _write(module, limit, own)
        journal.record(limit.hook, journal.ALREADY_LOWER, f"{_shown(limit, own)} in force" + _tile(limit, own))
    else:
        change = f"{_shown(limit, own) if own else 'its own'} -> {_shown(limit, wanted)}" + _tile(limit, wanted)
        if current().mode == "report":
            journal.record(limit.hook, journal.WOULD_APPLY, change)
            return
        _found[limit] = Found(module, own, wanted)
        _write(module, limit, wanted)
        if (now := _read(module, limit)) is not None and now > wanted:
            raise ContractError(_not_in_force(limit, wanted, now))
        journal.record(limit.hook, journal.APPLIED, change)


def _wanted(limit: Limit) -> int:
    """The value to set, in the limit's units; 0: leave it."""
    wanted = wanted_bytes(follows_gpu=limit.follows_gpu)
    if limit.unit == 0:
        return KV_CHUNK_TOKENS if wanted else 0
    return max(1, wanted // limit.unit) if wanted else 0


def _own(module: ModuleType, limit: Limit) -> int | None:
    """The engine's own value before any change; None where there is none, 0 where it is not known yet."""
    if limit.how == ENVIRON:
        return limit.unset
    if limit.how == FUNCTION:
        return 0 if limit.name in vars(module) else None
    if limit.how == DEVICE_TABLE and _table_device() is None:
        return 0
    value = _read(module, limit)
    if value is not None and (type(value) is not int or value <= 0):
        raise ContractError(f"{limit.module}.{limit.name}: expected a positive int, found {value!r}")
    return value


def _read(module: ModuleType, limit: Limit) -> Any:
    """The value in force, in the limit's units; None where there is none or only a call would tell."""
    if limit.how == GLOBAL:
        return vars(module).get(limit.name)
    if limit.how == ENVIRON:
        return int(os.environ.get(limit.name, limit.unset))
    if limit.how == DEVICE_TABLE and (device := _table_device()) is not None:
        # The engine's own reading, taken when everything is loaded. It keeps the first one for ever.
        return module.Indexer._get_mqa_logits_budget_bytes(module.Indexer, device)
    return None


def _write(module: ModuleType, limit: Limit, value: int) -> None:
    if limit.how == GLOBAL:
        setattr(module, limit.name, value)
    elif limit.how == ENVIRON:
        os.environ[limit.name] = str(value)
        os.environ[OURS] = ",".join(sorted({*_ours(), limit.name}))
    elif limit.how == DEVICE_TABLE:
        module.Indexer._mqa_logits_budget_bytes[_table_device()] = value
    elif limit.how == FUNCTION:
        original = vars(module)[limit.name]
        apply_all(module, [Patch(contracts.STATIC_SCORE_BUDGET, _at_most(limit))], hint=contracts.HINT)
        for copy in _copies(limit):
            if vars(copy)[limit.name] is original:
                setattr(copy, limit.name, vars(module)[limit.name])


def _at_most(limit: Limit) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """What the engine's function says, but not above the limit that is in force when it is asked."""

    def replace(original: Callable[..., Any]) -> Callable[..., Any]:
        def mqa_logits_static_budget_bytes(*, device_index: int) -> int:
            return min(int(original(device_index=device_index)), _found[limit].lowered)

        return mqa_logits_static_budget_bytes

    return replace


def _table_device() -> int | None:
    """The device whose entry counts; None until `settle`, without CUDA, and for a model that scores nothing."""
    return _shape.device if _shape is not None and _shape.heads else None


def _copies(limit: Limit) -> list[ModuleType]:
    """The modules that have imported this limit by value."""
    loaded = (sys.modules.get(name) for name in limit.copies)
    return [module for module in loaded if module is not None and limit.name in vars(module)]


def _ours() -> list[str]:
    return [name for name in os.environ.get(OURS, "").split(",") if name]


def _set_by_operator(limit: Limit) -> bool:
    return limit.operators in os.environ and limit.operators not in _ours()


def _not_in_force(limit: Limit, wanted: int, now: int) -> str:
    return (
        f"{limit.module}.{limit.name}: set to {_shown(limit, wanted)}, but {_shown(limit, now)} "
        "is in force; something has changed it after DynChunk"
    )


def _ask_engine() -> Shape:
    """What the engine knows of its model and device."""
    import torch
    from sglang.srt.runtime_context import process_model_config

    model = process_model_config()
    config = model.hf_text_config
    heads = int(getattr(config, "index_n_heads", 0) or 0)
    ratios = getattr(config, "compress_ratios", None) or []
    keys = int(model.context_len) // min((r for r in ratios if 0 < r < RATIO_WITHOUT_INDEXER), default=1)
    if not torch.cuda.is_available():
        return Shape(keys, heads, None, None)
    device = torch.cuda.current_device()
    return Shape(keys, heads, torch.cuda.get_device_properties(device).multi_processor_count, device)


def _tile(limit: Limit, value: int) -> str:
    """For the journal: what a limit comes to at the longest context, as far as it is known."""
    if not limit.follows_gpu or _shape is None or not _shape.heads:
        return ""
    rows = score_budget.rows_per_tile(value, _shape.keys, _shape.heads)
    told = f"; {rows:,} rows a tile at the longest context of {_shape.keys:,} keys"
    if _shape.processors is None:
        return told + ", no device to keep busy"
    busy = score_budget.busy_percent(rows, _shape.heads, _shape.processors)
    return told + f", {busy} % of {_shape.processors} multiprocessors busy"


def _shown(limit: Limit, value: int) -> str:
    return f"{value * limit.unit / MIB:g} MiB" if limit.unit else f"{value:,} tokens"
