"""What the settings come to, checked before the engine is started: the same settings that `serve` reads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynchunk import effective
from dynchunk.policy.budget import Budget
from dynchunk.settings import Settings, SettingsError
from launcher import environment, serve
from launcher.environment import Launch
from scripts.doctor import allocator_rules, chunk_rules, flags
from scripts.doctor.verdict import Check, fail, not_checked, ok, warn

NO_MODEL = "MODEL_PATH is not set"
# Models whose cache the engine pages by 256 and whose sliding-window layers get a tenth of it, unless told otherwise.
PAGES_OF_256 = ("deepseek_v4",)
V4_PAGE, V4_RATIO, USUAL_RATIO = 256, 0.1, 0.8
V4_RATIO_OF_KEYS = 4
# Deterministic inference with flashinfer cuts prompts at these; the engine reads the same variable.
TILE_VARIABLE, TILE_TOKENS = "SGLANG_FLASHINFER_PREFILL_SPLIT_TILE_SIZE", 4096


@dataclass(frozen=True)
class Setting:
    """What is to be started. model: the model's config.json, empty where it is not on this machine."""

    launch: Launch
    settings: Settings
    words: list[str]
    model: dict[str, Any]

    @property
    def path(self) -> str:
        """The engine's attention path (policy/paths.py) as far as the model's file tells; empty where it does not."""
        if str((self.model.get("architectures") or [""])[0]).startswith("DeepseekV4"):
            ratios = [ratio for ratio in self.model.get("compress_ratios") or () if ratio > 0]
            # V4 keeps every fourth key at the most; V4.1 has layers that keep them all.
            return "v4" if min(ratios, default=1) >= V4_RATIO_OF_KEYS else "v41-dev"
        return "dsa" if self.model.get("index_topk") else ""

    @property
    def page(self) -> int:
        """The engine's page as far as it is known here."""
        usual = V4_PAGE if self.model.get("model_type") in PAGES_OF_256 else 1
        return self.launch.page_size or usual

    @property
    def dp_attention(self) -> int:
        """Ranks that the chunk is divided among; 1 without data-parallel attention."""
        if not flags.given(self.words, "--enable-dp-attention"):
            return 1
        return flags.whole(self.words, "--dp-size", "--data-parallel-size") or 1

    @property
    def context_parallel(self) -> int:
        """Ranks that share the rows of a prefill; 1 without context parallelism."""
        if not flags.given(self.words, "--enable-prefill-cp"):
            return 1
        return flags.whole(self.words, "--attn-cp-size", "--attention-context-parallel-size") or 1

    @property
    def chunk(self) -> int:
        """The engine's chunk size on each rank."""
        return self.launch.chunked_prefill_size // max(self.dp_attention, 1)

    def limits(self) -> Budget | None:
        """The rule in force; None where it cannot be worked out (the settings check says why) or is off."""
        if self.settings.mode == "off" or self.chunk <= 0:
            return None
        try:
            return effective.resolve(
                self.settings,
                engine_page=self.page,
                static_tokens=self.chunk,
                context_tokens=self.launch.context_length,
            ).limits
        except SettingsError:
            return None


def read(environ: Mapping[str, str]) -> tuple[Setting | None, list[Check]]:
    """The setting and what `serve` would say about it; no setting where it cannot be read."""
    nameless = not environ.get("MODEL_PATH", "").strip()
    # A folder that is not there: nothing is known of the model, and nothing is looked for under its name.
    given = {**environ, "MODEL_PATH": "/no/model"} if nameless else dict(environ)
    found = []
    if nameless:
        found.append(warn("settings", f"{NO_MODEL}, so nothing is known of the model", "set MODEL_PATH, or --env-file"))
    try:
        planned = serve.plan(given)
    except SettingsError as error:
        found += [fail("settings", problem, "") for problem in error.problems if not _of_allocator(problem)]
        return _as_far_as_read(given), found
    found += [warn("settings", warning, "") for warning in planned.warnings if not _of_allocator(warning)]
    found.append(ok("settings", planned.summary))
    return _setting(planned.launch, planned.settings), found


def _as_far_as_read(environ: Mapping[str, str]) -> Setting | None:
    """A setting that `serve` refuses for what follows from it can be looked at all the same."""
    try:
        return _setting(*environment.read(environ))
    except SettingsError:
        return None


def _setting(launch: Launch, settings: Settings) -> Setting:
    return Setting(launch, settings, environment.extra_flags(launch), _model(launch))


def _of_allocator(sentence: str) -> bool:
    """Those have a check of their own, which knows the GPU."""
    return sentence.startswith("PYTORCH_")


def _model(launch: Launch) -> dict[str, Any]:
    try:
        config = json.loads(Path(str(launch.model_path), "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    # Multimodal models keep the language model's part in here.
    return {**config, **(config.get("text_config") or {})} if isinstance(config, dict) else {}


def checks(setting: Setting, environ: Mapping[str, str], capabilities: list[str]) -> list[Check]:
    """The chunk against everything that depends on it, and the allocator. capabilities: of the GPUs here."""
    launch, words = setting.launch, setting.words
    found = allocator_rules.checks(
        environ,
        words,
        capabilities,
        tp_size=launch.tp_size,
        allowed=setting.settings.allow_expandable_segments,
    )
    if launch.chunked_prefill_size <= 0:
        if setting.settings.mode == "off":
            found.append(not_checked("chunk", "chunked prefill is off, and so is DynChunk"))
        return found  # with DynChunk on, the settings check has refused it
    if setting.dp_attention > 1:
        found.append(
            chunk_rules.dp_attention(launch.chunked_prefill_size, setting.dp_attention, setting.settings.chunk_max)
        )
    if setting.page > 1:
        found.append(chunk_rules.page_and_chunk(setting.chunk, setting.page))
    else:
        found.append(not_checked("chunk and page", "PAGE_SIZE is not set; the engine chooses its page"))
    found += _window(setting)
    if launch.max_running_requests is not None:
        found.append(chunk_rules.requests_per_stage(launch.max_running_requests, launch.pp_size))
    algorithm = flags.value(words, "--speculative-algorithm")
    if algorithm and flags.given(words, "--enable-mixed-chunk"):
        found.append(chunk_rules.mixed_with_speculation(algorithm))
    if setting.context_parallel > 1:
        found.append(chunk_rules.context_parallel(setting.settings.chunk_min, setting.context_parallel))
    return found + _alignment(setting, environ)


def _window(setting: Setting) -> list[Check]:
    """The sliding-window layers' pool, for models that have one."""
    window = setting.model.get("sliding_window")
    ratio = flags.number(setting.words, "--swa-full-tokens-ratio")
    if not window and ratio is None:
        reason = "the model has none" if setting.model else "the model's config.json is not here"
        return [not_checked("sliding-window pool", reason)]
    found = [chunk_rules.window_lock(setting.chunk, int(window))] if window else []
    total = setting.launch.max_total_tokens
    if total is None:
        return [*found, not_checked("sliding-window pool", "MAX_TOTAL_TOKENS is not set; the engine sizes the cache")]
    if ratio is None:
        ratio = V4_RATIO if setting.model.get("model_type") in PAGES_OF_256 else USUAL_RATIO
    return [*found, chunk_rules.swa_pool(setting.chunk, total, ratio, setting.page)]


def _alignment(setting: Setting, environ: Mapping[str, str]) -> list[Check]:
    backend = flags.value(setting.words, "--prefill-attention-backend") or flags.value(
        setting.words, "--attention-backend"
    )
    if not flags.given(setting.words, "--enable-deterministic-inference") or backend != "flashinfer":
        return []
    tile = environ.get(TILE_VARIABLE, "")
    align = int(tile) if tile.isdigit() and int(tile) else TILE_TOKENS
    limits = setting.limits()
    budget = effective.DEFAULT_BUDGET if limits is None else limits.budget
    return [chunk_rules.truncation_alignment(setting.chunk, budget, align, setting.launch.context_length)]
