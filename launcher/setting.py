"""What is to be started, as far as the environment and the model's config.json tell: what `plan` and doctor go by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynchunk import effective, values
from dynchunk.policy import paths
from dynchunk.policy.budget import Budget
from dynchunk.settings import Settings, SettingsError
from dynchunk.shortened import shortened
from launcher import environment, flags
from launcher.environment import Launch

# Models whose cache the engine pages by 256 and whose sliding-window layers get a tenth of it, unless told otherwise.
PAGES_OF_256 = ("deepseek_v4",)
V4_PAGE = 256
RATIO_FLAG = "--swa-full-tokens-ratio"
DP_FLAGS = ("--dp-size", "--data-parallel-size")
CP_FLAGS = ("--attn-cp-size", "--attention-context-parallel-size")
LONGEST_WINDOW = 10**9


@dataclass(frozen=True)
class Setting:
    """What is to be started. words: EXTRA_ARGS. model: its config.json, empty where it is not on this machine."""

    launch: Launch
    settings: Settings
    words: list[str]
    model: dict[str, Any]

    @property
    def path(self) -> str:
        """The engine's attention path (policy/paths.py) as far as the model's file tells; empty where it does not."""
        shared = paths.tokens_per_key(self.model.get("architectures"), self.model.get("compress_ratios"))
        if shared is not None:
            return "v4" if shared >= paths.V4_TOKENS_PER_KEY else "v41-dev"
        return "dsa" if self.model.get("index_topk") else ""

    @property
    def page(self) -> int:
        """The engine's page as far as it is known here."""
        usual = V4_PAGE if self.model.get("model_type") in PAGES_OF_256 else 1
        return self.launch.page_size or usual

    @property
    def window(self) -> int | None:
        """The model's sliding window in tokens; None where it has none, or where its file says something else."""
        found = self.model.get("sliding_window")
        return found if _is_count(found) else None

    @property
    def dp_attention(self) -> int:
        """Ranks that the chunk is divided among; 1 without data-parallel attention."""
        if not flags.given(self.words, "--enable-dp-attention"):
            return 1
        return flags.count(self.words, *DP_FLAGS) or 1

    @property
    def context_parallel(self) -> int:
        """Ranks that share the rows of a prefill; 1 without context parallelism."""
        if not flags.given(self.words, "--enable-prefill-cp"):
            return 1
        return flags.count(self.words, *CP_FLAGS) or 1

    @property
    def chunk(self) -> int:
        """The engine's chunk size on each rank."""
        return self.launch.chunked_prefill_size // self.dp_attention

    @property
    def per_rank(self) -> str:
        """What data-parallel attention makes of the chunk size, in one sentence; empty without it."""
        if self.dp_attention == 1:
            return ""
        size = f"CHUNKED_PREFILL_SIZE={self.launch.chunked_prefill_size:,}"
        return f"{size} on {self.dp_attention} data-parallel ranks is {self.chunk:,} tokens per rank"

    @property
    def no_chunk(self) -> str:
        """Why a rank has no chunk that a rule could bound, in one sentence; empty where it has one."""
        if self.chunk > 0:
            return ""
        size = self.launch.chunked_prefill_size
        what = "leaves no token to a data-parallel rank" if size > 0 else "turns chunked prefill off"
        return f"CHUNKED_PREFILL_SIZE={size} {what}"

    def resolved(self, static_tokens: int) -> effective.Effective:
        """The rule in force with chunks of that size on a rank. Raises SettingsError with every contradiction."""
        try:
            return effective.resolve(
                self.settings,
                # Where neither the operator nor the model's file says the page, the scheduler checks again with it.
                engine_page=self.page,
                static_tokens=static_tokens,
                context_tokens=self.launch.context_length,
            )
        except SettingsError as error:
            # A sentence with a rank's size says as well what was set for all of them.
            told = f" ({self.per_rank})" if self.per_rank else ""
            problems = [problem + told if f"{self.chunk:,}" in problem else problem for problem in error.problems]
            raise SettingsError(problems) from None

    def limits(self) -> Budget | None:
        """The rule in force; None where it cannot be worked out (`serve` and doctor say why) or is off."""
        if self.settings.mode == "off" or self.no_chunk:
            return None
        try:
            return self.resolved(self.chunk).limits
        except SettingsError:
            return None

    def unreadable_flags(self) -> list[str]:
        """A sentence for each flag of EXTRA_ARGS that is counted with here and whose value the engine will refuse."""
        problems = [
            f"EXTRA_ARGS: {names[0]} {shortened(repr(text))}: not a whole number of 1 or more"
            for names in (DP_FLAGS, CP_FLAGS)
            if (text := flags.value(self.words, *names)) is not None and flags.count(self.words, *names) is None
        ]
        ratio = flags.value(self.words, RATIO_FLAG)
        if ratio is not None and not 0 < (flags.number(self.words, RATIO_FLAG) or 0) <= 1:
            problems.append(f"EXTRA_ARGS: {RATIO_FLAG} {shortened(repr(ratio))}: not a share above 0 and up to 1")
        return problems


def of(launch: Launch, settings: Settings) -> Setting:
    """The setting of what was read. Raises ValueError where EXTRA_ARGS has unbalanced quotes."""
    return Setting(launch, settings, environment.extra_flags(launch), model_config(launch.model_path or ""))


def model_config(model_path: str) -> dict[str, Any]:
    """What the model's config.json says; empty where it is not here or is none."""
    try:
        config = values.parsed(Path(model_path, "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(config, Mapping):
        return {}
    # Multimodal models keep the language model's part in here.
    text = config.get("text_config")
    return {**config, **(text if isinstance(text, Mapping) else {})}


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= LONGEST_WINDOW
