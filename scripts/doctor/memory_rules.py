"""What the machine's memory says. Pure; bytes in, checks out.

The lines come from what operators reported: a guard of 1.5 GiB, about 1.3 GiB for what runs on the head only, hosts
that swapped 3,000 pages a second just before they froze, stale weight files of 27 and 40 GiB in the page cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from scripts.doctor.verdict import GIB, Check, fail, gib, not_checked, ok, warn

GUARD_BYTES = 3 * GIB // 2
HEAD_BYTES = int(1.3 * GIB)

SWAP_INS_FAIL_PER_S = 1000
PSI_WARN_PERCENT, PSI_FAIL_PERCENT = 10.0, 50.0
PAGE_CACHE_WORTH_A_WORD = 0.2


def headroom(
    available_bytes: int, needs: Sequence[tuple[str, int]], guard_bytes: int, *, what: str, guessed: bool = False
) -> Check:
    """Whether what is available holds all of `needs` and stays above the guard. what: words for the memory meant.

    guessed: what a row and key costs is not known for this model, so that a no is no more than a warning.
    """
    name = "memory for long prompts"
    left = available_bytes - sum(need for _, need in needs)
    parts = ", ".join(f"{gib(need)} {why}" for why, need in needs)
    reason = f"{what} {gib(available_bytes)}, less {parts}, leaves {gib(left)}; memguard's line is {gib(guard_bytes)}"
    if left >= guard_bytes:
        return ok(name, reason)
    if guessed:
        return warn(name, reason, "--path or --bytes says what the model takes; memguard measures it")
    return fail(
        name,
        reason,
        "a lower DYNCHUNK_BUDGET, a lower MEM_FRACTION_STATIC or less beside the engine; "
        "memguard measures what a (row, key) really takes here",
    )


def swap(meminfo: Mapping[str, int], swapped_in_per_s: float, *, unified: bool) -> Check:
    """The swap's size and whether it is being used. swapped_in_per_s: pages."""
    name = "swap"
    total, used = meminfo.get("SwapTotal", 0), meminfo.get("SwapTotal", 0) - meminfo.get("SwapFree", 0)
    reason = f"{gib(total)}, {gib(used)} used, {swapped_in_per_s:,.0f} pages swapped in per second"
    cure = "stop what swaps; on serving hosts turn swap off (swapoff -a) or keep it small"
    if swapped_in_per_s >= SWAP_INS_FAIL_PER_S:
        return fail(name, reason + ": the host is thrashing", cure)
    if swapped_in_per_s > 0:
        return warn(name, reason, cure)
    if unified and total:
        return warn(
            name,
            f"{reason}; where GPU memory is host memory, a host with swap thrashes where one without ends a process",
            cure,
        )
    return ok(name, reason if total else "none")


def pressure(full_avg10: float | None) -> Check:
    """The share of time in which everything waited for memory. `some` pressure is harmless and not looked at."""
    name = "memory pressure"
    if full_avg10 is None:
        return not_checked(name, "this kernel has no /proc/pressure/memory")
    reason = f"everything waited for memory {full_avg10:.1f} % of the last 10 s"
    cure = "find out what takes the memory before the engine starts"
    if full_avg10 >= PSI_FAIL_PERCENT:
        return fail(name, reason, cure)
    return warn(name, reason, cure) if full_avg10 >= PSI_WARN_PERCENT else ok(name, reason)


def page_cache(meminfo: Mapping[str, int], *, unified: bool, weights_bytes: int | None) -> Check:
    """File pages that loading weights will displace, and add."""
    name = "page cache"
    cached = meminfo.get("Cached", 0) + meminfo.get("Buffers", 0) - meminfo.get("Shmem", 0)
    total = meminfo["MemTotal"]
    weights = "" if weights_bytes is None else f"; the weights are {gib(weights_bytes)}"
    reason = f"{gib(cached)} of files in memory{weights}"
    if not unified or cached < PAGE_CACHE_WORTH_A_WORD * total:
        return ok(name, reason)
    return warn(
        name,
        f"{reason}. CUDA counts them as taken where GPU memory is host memory, so they make the KV cache smaller",
        "before the start: sync; echo 1 > /proc/sys/vm/drop_caches; and --weight-loader-drop-cache-after-load",
    )


def memory_limit(limit_bytes: int | None, *, unified: bool | None) -> Check:
    """A cgroup's limit, which does not see what CUDA allocates. unified: None where it is not known."""
    name = "memory limit of the container"
    if limit_bytes is None:
        return ok(name, "none is set")
    where = "on unified memory " if unified is None else ""
    if unified is False:
        return ok(name, f"{gib(limit_bytes)}; it bounds host memory only, which is what it says on a discrete GPU")
    return warn(
        name,
        f"{gib(limit_bytes)}: {where}what CUDA allocates is in no cgroup, so the limit never fires while the host "
        "runs full; it protects nothing",
        "take mem_limit or --memory out, and let DYNCHUNK_BUDGET and memguard protect the host",
    )
