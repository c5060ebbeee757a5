"""Programs that end others when memory is short: at what line they act. Pure.

They choose by resident memory or by cgroup, and what CUDA allocates is in neither: the engine may be the wrong choice
or the one that is missed. What matters here is whether they act before memguard does.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from scripts.doctor.verdict import Check, gib, ok, warn

EARLYOOM_DEFAULT_PERCENT = 10.0
NOHANG_DEFAULT_PERCENT = 5.0
OOMD_DEFAULTS = {
    "SwapUsedLimit": "90%",
    "DefaultMemoryPressureLimit": "60%",
    "DefaultMemoryPressureDurationSec": "30s",
}


def earlyoom_bytes(arguments: Sequence[str], total_bytes: int) -> int:
    """The line below which earlyoom ends a process: -M (KiB) or -m (percent of memory), the higher where both are."""
    lines = []
    for index, word in enumerate(arguments):
        for flag, unit_bytes in (("-M", 1024.0), ("-m", total_bytes / 100)):
            if word.startswith(flag):
                text = word[2:] or (arguments[index + 1] if index + 1 < len(arguments) else "")
                found = re.match(r"[\d.]+", text)
                if found:
                    lines.append(int(float(found[0]) * unit_bytes))
    return max(lines, default=int(EARLYOOM_DEFAULT_PERCENT * total_bytes / 100))


def nohang_bytes(config: str, total_bytes: int) -> int:
    """The line below which nohang sends SIGTERM: soft_threshold_min_mem, in percent or MiB."""
    found = re.search(r"^\s*soft_threshold_min_mem\s*=\s*([\d.]+)\s*(%|M)", config, re.MULTILINE)
    if not found:
        return int(NOHANG_DEFAULT_PERCENT * total_bytes / 100)
    return int(float(found[1]) * (total_bytes / 100 if found[2] == "%" else 1 << 20))


def oomd_settings(config: str) -> dict[str, str]:
    """systemd-oomd's limits: those of its configuration, else the built-in ones."""
    given = dict(re.findall(r"^\s*(\w+)\s*=\s*(\S+)", config, re.MULTILINE))
    return {name: given.get(name, default) for name, default in OOMD_DEFAULTS.items()}


def lines_of(
    running: Mapping[str, Sequence[str]], configs: Mapping[str, str], total_bytes: int, guard_bytes: int
) -> list[Check]:
    """A check for each such program that runs. running: its name -> its arguments; configs: name -> its file's text."""
    found = []
    if "earlyoom" in running:
        found.append(_against_guard("earlyoom", earlyoom_bytes(running["earlyoom"], total_bytes), guard_bytes))
    if "nohang" in running:
        found.append(_against_guard("nohang", nohang_bytes(configs.get("nohang", ""), total_bytes), guard_bytes))
    if "systemd-oomd" in running:
        limits = oomd_settings(configs.get("systemd-oomd", ""))
        figures = ", ".join(f"{name}={value}" for name, value in limits.items())
        found.append(
            warn(
                "systemd-oomd",
                f"runs with {figures}: it acts on pressure and swap, chooses by cgroup and does not see CUDA's memory, "
                "so it may end the wrong process",
                "systemctl mask --now systemd-oomd, or ManagedOOMPreference=avoid for the container's unit",
            )
        )
    return found or [ok("out-of-memory killers", "none of earlyoom, nohang and systemd-oomd runs")]


def _against_guard(name: str, line_bytes: int, guard_bytes: int) -> Check:
    reason = f"ends a process below {gib(line_bytes)} available; memguard aborts the request at {gib(guard_bytes)}"
    if line_bytes < guard_bytes:
        return ok(name, reason)
    return warn(
        name,
        f"{reason}, so {name} comes first, and it does not see CUDA's memory when it chooses whom to end",
        f"a line of {name} below {gib(guard_bytes)}, or a higher guard for memguard",
    )
