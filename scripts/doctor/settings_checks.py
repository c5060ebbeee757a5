"""What the settings come to, checked before the engine is started: the same settings that `serve` reads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from dynchunk import effective, measured_before, values
from dynchunk.settings import SettingsError
from launcher import environment, flags, serve
from launcher import setting as settings_of
from launcher.setting import PAGES_OF_256, RATIO_FLAG, Setting
from scripts.doctor import allocator_rules, chunk_rules
from scripts.doctor.verdict import Check, fail, gib, not_checked, ok, warn

NO_MODEL = "MODEL_PATH is not set"
V4_RATIO, USUAL_RATIO = 0.1, 0.8
# Deterministic inference with flashinfer cuts prompts at these; the engine reads the same variable.
TILE_VARIABLE, TILE_TOKENS = "SGLANG_FLASHINFER_PREFILL_SPLIT_TILE_SIZE", 4096


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
    return settings_of.of(planned.launch, planned.settings), found


def _as_far_as_read(environ: Mapping[str, str]) -> Setting | None:
    """A setting that `serve` refuses for what follows from it can be looked at all the same."""
    try:
        return settings_of.of(*environment.read(environ))
    except SettingsError:
        return None


def _of_allocator(sentence: str) -> bool:
    """Those have a check of their own, which knows the GPU."""
    return sentence.startswith("PYTORCH_")


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
    found += [fail("settings", problem, "") for problem in setting.unreadable_flags()]
    found += report(setting.settings.report)
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


def report(file: str | None) -> list[Check]:
    """Whether DYNCHUNK_REPORT, as this machine sees its path, holds what is to be taken from it."""
    if file is None:
        return []
    try:
        found = measured_before.of_report(Path(file))
    except measured_before.ReportError as error:
        cure = "another run.json of memguard; a path such as /opt/dynchunk/logs/... is the container's: ask there"
        return [warn("report", f"DYNCHUNK_REPORT={file}: {error}", cure)]
    beside = f", {gib(found.base_bytes)} however small the chunk" if found.base_bytes else ""
    return [ok("report", f"{file}: {found.millibytes / 1000:g} B for a row and key{beside}")]


def _window(setting: Setting) -> list[Check]:
    """The sliding-window layers' pool, for models that have one."""
    window = setting.window
    ratio = flags.number(setting.words, RATIO_FLAG)
    if not window and ratio is None:
        reason = "the model has none" if setting.model else "the model's config.json is not here"
        return [not_checked("sliding-window pool", reason)]
    found = [chunk_rules.window_lock(setting.chunk, window)] if window else []
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
    try:
        align = int(values.number(int(environ.get(TILE_VARIABLE, "")), 1, environment.MOST_TOKENS))
    except ValueError:
        align = TILE_TOKENS
    limits = setting.limits()
    budget = effective.DEFAULT_BUDGET if limits is None else limits.budget
    return [chunk_rules.truncation_alignment(setting.chunk, budget, align, setting.launch.context_length)]
