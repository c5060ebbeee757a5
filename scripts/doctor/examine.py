"""All checks, in the order of the report."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from dynchunk.policy import paths
from dynchunk.policy.budget import chunk_tokens, most_pairs
from launcher import cost
from launcher.setting import Setting
from scripts.doctor import containers, engine, killers, memory_rules, settings_checks
from scripts.doctor.readings import Machine, docker_containers
from scripts.doctor.verdict import Check, fail, gib, not_checked, ok, warn
from scripts.image import prove_adapter

# What is assumed of a model that is not known: the most that was measured on a GPU.
DEAREST = "v41-dev"


def examine(
    environ: Mapping[str, str],
    here: Machine,
    url: str,
    api_key: str | None,
    *,
    guard_bytes: int,
    path: str = "",
    bytes_each: float | None = None,
) -> list[Check]:
    """Every check on one look at the machine. url, api_key: where a server may run already. The rest: see headroom."""
    found = _part("engine", lambda: engine.checks(environ, in_container=here.container is not None))
    if any(entry.endswith("adapter/boot") for entry in environ.get("PYTHONPATH", "").split(os.pathsep)):
        found += _part("start hook", lambda: [start_hook()])
    setting: Setting | None = None

    def settings() -> list[Check]:
        nonlocal setting
        setting, said = settings_checks.read(environ)
        if setting is None:
            return said
        return said + settings_checks.checks(setting, environ, [d["capability"] for d in here.devices["devices"]])

    found += _part("settings", settings)
    found += _part("GPU", lambda: devices(here))
    found += _part("memory", lambda: memory(here, setting, guard_bytes, path, bytes_each))
    found += _part("surroundings", lambda: around(here, guard_bytes))
    return found + _part("running server", lambda: engine.running(url, api_key))


def _part(name: str, look: Callable[[], list[Check]]) -> list[Check]:
    """One part of the report. Where a file, driver or server says what nobody foresaw, the others are still made."""
    try:
        return look()
    except Exception as error:
        reason = f"this part of doctor broke: {type(error).__name__}: {error}"
        return [
            fail(name, reason, "what it reads is not as it should be, or doctor is: ./dynchunk collect, and report it")
        ]


def start_hook() -> Check:
    """Whether a fresh Python has DynChunk's import watch, as PYTHONPATH promises (`serve` sees to it itself)."""
    watches, _, said = prove_adapter.fresh_python(None)
    if watches:
        return ok("start hook", "a fresh python3 loads the adapter")
    return fail(
        "start hook",
        "adapter/boot is on PYTHONPATH, but a fresh python3 does not load the adapter" + (f": {said}" if said else ""),
        "adapter/boot first on PYTHONPATH, DYNCHUNK_MODE not off; python3 not a wrapper with -I, -E or -S",
    )


def devices(here: Machine) -> list[Check]:
    """What GPUs there are, and whether their memory is the host's."""
    name = "GPU"
    if here.devices.get("error"):
        return [
            warn(name, here.devices["error"], "nvidia-smi says whether the driver works; give the container --gpus all")
        ]
    found = here.devices["devices"]
    if not found:
        return [not_checked(name, "no CUDA driver here")]
    nvml = here.devices.get("nvml_memory", [])
    checks = []
    for index, device in enumerate(found):
        kind = "GPU memory is host memory" if device["integrated"] else "memory of its own"
        reason = (
            f"{index}: {device['name']}, capability {device['capability']}, {device['multiprocessors']} "
            f"multiprocessors, {gib(device['total_bytes'])}, {kind}"
        )
        if index < len(nvml) and isinstance(nvml[index], str):
            reason += f"; NVML says {nvml[index]!r} of its memory, so that is unknown, not 0"
        checks.append(ok(name, reason))
    return checks


def memory(
    here: Machine, setting: Setting | None, guard_bytes: int, path: str, bytes_each: float | None
) -> list[Check]:
    """MemAvailable or the GPU's memory against what one chunk takes, and the state of the host's memory."""
    unified = here.unified is True
    weights = None if setting is None else weight_bytes(str(setting.launch.model_path))
    return [
        *headroom(here, setting, guard_bytes, path, bytes_each),
        memory_rules.swap(here.meminfo, here.swapped_in_per_s, unified=unified),
        memory_rules.pressure(here.full_avg10),
        memory_rules.page_cache(here.meminfo, unified=unified, weights_bytes=weights),
    ]


def headroom(
    here: Machine, setting: Setting | None, guard_bytes: int, path: str, bytes_each: float | None
) -> list[Check]:
    """Whether the largest chunk fits. Where it cannot be known, why.

    path: the engine's attention path, as for `plan`. bytes_each: what a row and key takes, where that was measured.
    Without either, DYNCHUNK_REPORT counts, and then the model's own path.
    """
    name = "memory for long prompts"
    limits = None if setting is None else setting.limits()
    if setting is None or limits is None or setting.settings.budget == "auto":
        return [not_checked(name, no_size(setting, path, bytes_each))]
    launch = setting.launch
    each, base_bytes, guessed = _cost(setting, path, bytes_each, cost.score_limit_bytes(setting.settings))
    pairs = most_pairs(partial(chunk_tokens, limits), launch.context_length) // _ranks(setting, each)
    needs = [(f"for a chunk of {pairs:,} token^2 ({each.source})", paths.transient_bytes(each, 1, pairs))]
    if base_bytes:
        needs.append(("held beside it however small the chunk", base_bytes))
    share = launch.mem_fraction_static
    available = here.meminfo["MemAvailable"]
    if here.unified is False:
        if share is None:
            return [not_checked(name, "MEM_FRACTION_STATIC is not set; the engine keeps room of its own choosing")]
        total = min(device["total_bytes"] for device in here.devices["devices"])
        needs.insert(0, (f"static (MEM_FRACTION_STATIC={share:g})", int(total * share)))
        return [memory_rules.headroom(total, needs, 0, what="GPU memory", guessed=guessed)]
    if here.unified and here.engine_pid is None:
        if share is None:
            return [
                not_checked(
                    name, "the engine does not run yet and MEM_FRACTION_STATIC is not set; ask again when it serves"
                )
            ]
        needs.insert(0, (f"static (MEM_FRACTION_STATIC={share:g})", int(available * share)))
        if launch.node_rank == 0:
            needs.append(("for what runs on the head only", memory_rules.HEAD_BYTES))
    running = "MemAvailable beside the running engine" if here.engine_pid else "MemAvailable"
    return [memory_rules.headroom(available, needs, guard_bytes, what=running, guessed=guessed)]


def no_size(setting: Setting | None, path: str, bytes_each: float | None) -> str:
    """Why there is no largest chunk to hold against the memory. path, bytes_each: as for headroom."""
    if setting is None:
        return "the settings cannot be read; the settings check says why"
    if setting.settings.mode == "off":
        off = "DYNCHUNK_MODE=off, so no budget bounds a chunk"
        return f"{off}, and {setting.no_chunk}" if setting.no_chunk else f"{off}; {stock(setting, path, bytes_each)}"
    if setting.limits() is None:
        return "the settings leave no chunk size to go by; the settings check says why"
    return "DYNCHUNK_BUDGET=auto is worked out from the memory that is free at the start"


def stock(setting: Setting, path: str, bytes_each: float | None) -> str:
    """What the fixed chunk of the engine without DynChunk may come to at the longest prompt."""
    chunk, longest = setting.chunk, setting.launch.context_length
    # DynChunk's limit on the scores is not in force either, and the engine's own one is not known here.
    each, base_bytes, _ = _cost(setting, path, bytes_each, 0)
    pairs = max(longest // chunk * chunk * chunk, longest % chunk * longest) // _ranks(setting, each)
    most = gib(paths.transient_bytes(each, 1, pairs) + base_bytes)
    return (
        f"the stock engine's chunks of {chunk:,} reach {pairs:,} token^2 at CONTEXT_LENGTH={longest:,}, which hold up "
        f"to {most} ({each.source})"
    )


def _ranks(setting: Setting, each: paths.Cost) -> int:
    """Ranks that share the rows of a chunk; what was measured is of whole rows."""
    return 1 if each.measured else setting.context_parallel


def _cost(
    setting: Setting, path: str, bytes_each: float | None, score_limit_bytes: int
) -> tuple[paths.Cost, int, bool]:
    """What a row and key holds, as `plan` counts, the bytes held beside it, and whether that is a guess."""
    if bytes_each is not None:
        return cost.given(bytes_each), 0, False
    if path:
        return paths.of_path(path, score_limit_bytes), 0, False
    found, base_bytes = cost.of_setting(setting, score_limit_bytes, [])
    return found or paths.of_path(DEAREST, score_limit_bytes), base_bytes, found is None


def around(here: Machine, guard_bytes: int) -> list[Check]:
    """What else acts on memory here, and the container around the engine."""
    if here.container is not None:
        return [
            *containers.inside(here.container, unified=here.unified),
            not_checked("out-of-memory killers", "this is a container; run doctor on the host as well"),
        ]
    found = killers.lines_of(here.killers, here.killer_configs, here.meminfo["MemTotal"], guard_bytes)
    for inspected in docker_containers():
        if containers.runs_engine(inspected):
            found += containers.from_outside(inspected, unified=here.unified)
    return found


def weight_bytes(model_path: str) -> int | None:
    """The size of the weight files; None where they are not here."""
    files = [*Path(model_path).glob("*.safetensors"), *Path(model_path).glob("*.bin")]
    return sum(file.stat().st_size for file in files) or None
