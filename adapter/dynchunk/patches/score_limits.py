"""Lower the byte limits that the sparse indexer keeps for its score buffers.

Each limit is a module global that the engine reads at every call (or, for the ROCm pool, before its first use), so
setting it right after import is enough. `_TORCH_INDEXER_SCORE_BUDGET_BYTES` exists in development builds only;
`candidate_blocks_hip` imports it by value and therefore has a row of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from dynchunk import journal
from dynchunk.contract import ContractError
from dynchunk.settings import current

MIB = 1 << 20


@dataclass(frozen=True)
class ScoreLimit:
    """A module global that bounds one score buffer. `unit_bytes`: what one unit of its value stands for."""

    module: str
    name: str
    unit_bytes: int = 1

    @property
    def hook(self) -> str:
        """Its name in the journal."""
        return f"score_limit.{self.module.rsplit('.', 1)[1]}.{self.name}"


_ATTENTION = "sglang.srt.layers.attention."
LIMITS = (
    ScoreLimit(_ATTENTION + "dsv4.v41_indexer.scoring", "_DEEP_GEMM_SCORE_BUDGET_BYTES"),
    ScoreLimit(_ATTENTION + "dsv4.v41_indexer.scoring", "_TORCH_SCORE_BUDGET_BYTES"),
    ScoreLimit(_ATTENTION + "dsv4.low_ratio_backend_hip", "_CANDIDATE_SCORE_BUDGET_BYTES"),
    ScoreLimit(_ATTENTION + "deepseek_v4_backend", "_TORCH_INDEXER_SCORE_BUDGET_BYTES"),
    ScoreLimit(_ATTENTION + "dsv4.low_ratio_backend", "_TORCH_INDEXER_SCORE_BUDGET_BYTES"),
    ScoreLimit(_ATTENTION + "dsv4.candidate_blocks_hip", "_TORCH_INDEXER_SCORE_BUDGET_BYTES"),
    # Counts fp32 elements; its pool is sized from it at first use.
    ScoreLimit("sglang.kernels.ops.attention.dsv4.fp4_indexer_hip", "_LOGITS_BUDGET_ELEMS", 4),
)


def apply(module: ModuleType) -> None:
    """Lower this module's limits to DYNCHUNK_INDEXER_SCORE_MIB and say what came of each."""
    settings = current()
    wanted_bytes = settings.indexer_score_mib * MIB
    for limit in LIMITS:
        if limit.module != module.__name__:
            continue
        value = vars(module).get(limit.name)
        if value is None:
            journal.record(limit.hook, journal.ABSENT, "this engine version has no such limit")
        elif type(value) is not int or value <= 0:
            raise ContractError(f"{limit.module}.{limit.name}: expected a positive int, found {value!r}")
        elif wanted_bytes == 0:
            journal.record(limit.hook, journal.NOT_IN_USE, "DYNCHUNK_INDEXER_SCORE_MIB=0 leaves it")
        elif value * limit.unit_bytes <= wanted_bytes:
            journal.record(limit.hook, journal.ALREADY_LOWER, f"{_mib(value * limit.unit_bytes)} in force")
        else:
            change = f"{_mib(value * limit.unit_bytes)} -> {_mib(wanted_bytes)}"
            if settings.mode == "report":
                journal.record(limit.hook, journal.WOULD_APPLY, change)
                continue
            setattr(module, limit.name, wanted_bytes // limit.unit_bytes)
            in_force = vars(module)[limit.name] * limit.unit_bytes
            if in_force > wanted_bytes:
                raise ContractError(
                    f"{limit.module}.{limit.name}: set to {wanted_bytes:,} bytes, but {in_force:,} are in force"
                )
            journal.record(limit.hook, journal.APPLIED, change)


def record_the_rest() -> None:
    """Note the limits whose module this model did not load, so that none is missing from the journal."""
    import sglang  # here, so that the table can be read without the engine

    root = Path(next(iter(sglang.__path__))).parent
    seen = journal.snapshot()["hooks"]
    for limit in LIMITS:
        if limit.hook in seen:
            continue
        if root.joinpath(*limit.module.split(".")).with_suffix(".py").exists():
            journal.record(limit.hook, journal.NOT_IN_USE, "this model does not load it")
        else:
            journal.record(limit.hook, journal.ABSENT, "this engine version has no such module")


def _mib(value_bytes: int) -> str:
    return f"{value_bytes / MIB:g} MiB"
