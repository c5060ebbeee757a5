"""What DynChunk claims about a GPU, checked on this one: one table, under ten minutes, torch and no engine.

    python -m scripts.verify.gpu_check [--out FOLDER]      on a machine with an NVIDIA GPU
    python -m scripts.verify.gpu_check --cpu-self-test     the same steps without one; its figures are of no GPU

Reserve growth over a ramp with each remedy, timing by events without waiting, selection in row tiles and key blocks,
the cost of releasing cached memory. Each part is a process of its own, so that no part finds another's memory. The
allocator is capped, where a GPU shares the host's memory well below what is available: a check must not freeze a host.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime as dt
import json
import os
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from dynchunk.cache_release import GIB
from launcher.allocator import FIRST_WITH_FRACTION, FRACTION, THRESHOLD, VARIABLES
from scripts.provenance import provenance
from scripts.verify import gpu_parts
from scripts.verify.gpu_parts import Row, Size

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 540
LIMITS_MIB = (2048, 256)
SHARED_MEMORY_KEPT_BYTES = 8 * GIB
MOST_CAP_BYTES = 160 * GIB
FULL = Size(rows=2048, keys=262_144, repeats=5)
SMALL = Size(rows=2048, keys=65_536, repeats=5)
ROOM_FOR_FULL_BYTES = 12 * GIB
SELF_TEST = Size(rows=128, keys=16_384, repeats=3)
SELF_TEST_SAYS = (
    "> **A self-test without a GPU.** The reserve is that of a model of torch's allocator, the rest ran on the CPU. It "
    "shows that the script works, and nothing about any GPU."
)
ANSWER = "gpu-check-row: "


def main(argv: list[str]) -> int:
    """Run everything and write the report. Exit code 0: nothing failed; 1: something did; 2: there is no GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu-self-test", action="store_true", help="run without a GPU; proves the script, not a GPU")
    parser.add_argument("--out", type=Path, help="where the report goes (default: logs/gpu-check-DATE)")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--cap-bytes", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    on_cpu: bool = options.cpu_self_test
    if options.part:
        for row in run_part(options.part, options.cap_bytes, on_cpu=on_cpu):
            print(ANSWER + json.dumps(row), flush=True)
        return 0
    facts, failure = _facts(on_cpu=on_cpu)
    if facts is None:
        print(failure or "There is no GPU that torch can use here. --cpu-self-test runs the same steps without one.")
        return 2
    rows = run_all(facts, on_cpu=on_cpu)
    report = render(facts, rows, on_cpu=on_cpu)
    print(report)
    folder = options.out or (
        None if on_cpu else ROOT / "logs" / f"gpu-check-{dt.datetime.now(dt.timezone.utc):%Y-%m-%d}"
    )
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "REPORT.md").write_text(report, encoding="utf-8")
        data = {"device": facts["device"], "self_test": on_cpu, "passed": passed(rows), "facts": facts}
        data["rows"] = [dataclasses.asdict(row) for row in rows]
        (folder / "gpu-check.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
        print(f"report: {folder}")
    return 0 if passed(rows) else 1


def passed(rows: list[Row]) -> bool:
    """Whether every row that checks something says yes. Nothing measured is no pass."""
    return any(row.ok for row in rows) and all(row.ok is not False for row in rows)


def run_all(facts: dict[str, Any], *, on_cpu: bool) -> list[Row]:
    """Every part in a process of its own, as long as there is time."""
    end = time.monotonic() + DEADLINE_S
    parts = [f"reserve:{limit}:{remedy}" for limit in LIMITS_MIB for remedy in gpu_parts.REMEDIES]
    parts += ["timing", "selection", *([] if on_cpu else ["empty_cache"])]
    rows: list[Row] = []
    for part in parts:
        # Other allocator settings than the part's own would be measured along with it.
        environ = {k: v for k, v in os.environ.items() if k not in VARIABLES}
        if part.endswith(gpu_parts.FRACTION) and not on_cpu:
            if not facts["has_fraction"]:
                rows.append(Row("reserve", part, note=f"not run: torch {facts['torch']} has no memory fraction"))
                continue
            limit_bytes = int(part.split(":")[1]) * gpu_parts.MIB
            share = min(facts["cap_bytes"], gpu_parts.SHORT_AT_LIMITS * limit_bytes) / facts["total_bytes"]
            environ[VARIABLES[0]] = f"{FRACTION}:{share:.6f},{THRESHOLD}:{gpu_parts.GC_THRESHOLD}"
        rows += _run(part, facts["cap_bytes"], environ, end - time.monotonic(), on_cpu=on_cpu)
    return rows


def run_part(part: str, cap_bytes: int, *, on_cpu: bool) -> list[dict[str, Any]]:
    """One part, in this process: plain JSON values."""
    if part == "facts":
        return [_gpu_facts()]
    size = SELF_TEST if on_cpu else FULL if cap_bytes > ROOM_FOR_FULL_BYTES else SMALL
    name, _, rest = part.partition(":")
    if name == "reserve":
        limit, _, remedy = rest.partition(":")
        # The ramp needs no room of its own: what does not fit under the cap is flushed.
        rows = gpu_parts.reserve(remedy, int(limit), FULL, cap_bytes, on_cpu=on_cpu)
    else:
        if not on_cpu:
            gpu_parts.cap_allocator(cap_bytes)
        if name == "timing":
            rows = gpu_parts.timing(size, on_cpu=on_cpu)
        elif name == "selection":
            rows = gpu_parts.selection(size, on_cpu=on_cpu)
        else:
            rows = gpu_parts.empty_cache(size)
    return [dataclasses.asdict(row) for row in rows]


def render(facts: dict[str, Any], rows: list[Row], *, on_cpu: bool) -> str:
    """REPORT.md."""
    verdict = "passed" if passed(rows) else "FAILED"
    lines = [f"# gpu_check: {facts['device']}: {verdict}", "", provenance(), ""]
    if on_cpu:
        lines += [SELF_TEST_SAYS, ""]
    lines += [f"torch {facts['torch']}, allocator capped at {facts['cap_bytes'] / GIB:.1f} GiB", ""]
    head = ["check", "variant", "reserved MiB", "peak MiB", "device calls", "flushes", "ms", "result", "note"]
    lines += ["| " + " | ".join(head) + " |", "| --- | --- |" + " --: |" * 5 + " --- | --- |"]
    words = {True: "ok", False: "**FAILED**", None: ""}
    for row in rows:
        cells = [row.check, row.variant]
        cells += [_number(n, 1) for n in (row.reserved_mib, row.live_mib)]
        cells += [_number(n, 0) for n in (row.device_calls, row.flushes)]
        cells += [_number(row.ms, 2), words[row.ok], row.note.replace("|", "/")]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:,.{digits}f}"


def _facts(*, on_cpu: bool) -> tuple[dict[str, Any] | None, str]:
    if on_cpu:
        return {"device": "CPU, self-test", "torch": version("torch"), "cap_bytes": MOST_CAP_BYTES}, ""
    answers, failure = _ask("facts", 0, dict(os.environ), DEADLINE_S, on_cpu=False)
    return (answers[0] if answers and answers[0] else None), failure


def _gpu_facts() -> dict[str, Any]:
    import torch

    if not torch.cuda.is_available():
        return {}
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    cap_bytes = int(free_bytes * 0.85)
    if properties.is_integrated:
        from dynchunk.patches.cuda_memory import CudaMemory

        available = CudaMemory(torch.cuda.current_device(), None).available_bytes()
        cap_bytes = min(cap_bytes, available - SHARED_MEMORY_KEPT_BYTES)
        if cap_bytes < 4 * GIB:
            raise SystemExit(f"only {available / GIB:.1f} GiB available; free some memory, the host would freeze")
    numbers = tuple(int(part) for part in torch.__version__.split(".")[:2])
    return {
        "device": properties.name,
        "torch": torch.__version__,
        "has_fraction": numbers >= FIRST_WITH_FRACTION,
        "total_bytes": total_bytes,
        "integrated": bool(properties.is_integrated),
        "multiprocessors": properties.multi_processor_count,
        "cap_bytes": min(cap_bytes, MOST_CAP_BYTES),
    }


def _run(part: str, cap_bytes: int, environ: dict[str, str], left_s: float, *, on_cpu: bool) -> list[Row]:
    if left_s < 1:
        return [Row(part, "", ok=False, note=f"not run: {DEADLINE_S} s are over")]
    answers, failure = _ask(part, cap_bytes, environ, left_s, on_cpu=on_cpu)
    rows = [Row(**answer) for answer in answers]
    return rows if not failure else [*rows, Row(part, "", ok=False, note=failure)]


def _ask(
    part: str, cap_bytes: int, environ: dict[str, str], left_s: float, *, on_cpu: bool
) -> tuple[list[dict[str, Any]], str]:
    """(the rows of a part, what went wrong or nothing)."""
    command = [sys.executable, "-W", "ignore", "-m", "scripts.verify.gpu_check", "--part", part]
    command += ["--cap-bytes", str(cap_bytes), *(["--cpu-self-test"] if on_cpu else [])]
    paths = [str(ROOT / "adapter"), str(ROOT), *filter(None, [environ.get("PYTHONPATH")])]
    environ = environ | {"PYTHONPATH": os.pathsep.join(paths)}
    if on_cpu:
        # Buffers of the C library that stay would hide what a step holds.
        environ |= {"MALLOC_MMAP_THRESHOLD_": str(gpu_parts.MIB // 8)}
    try:
        done = subprocess.run(
            command, env=environ, capture_output=True, text=True, timeout=left_s, check=False, cwd=ROOT
        )
    except subprocess.TimeoutExpired:
        return [], f"not through after {left_s:.0f} s"
    answers = [json.loads(line[len(ANSWER) :]) for line in done.stdout.splitlines() if line.startswith(ANSWER)]
    last = (done.stderr.strip().splitlines() or ["no message"])[-1]
    return answers, "" if done.returncode == 0 else f"exit code {done.returncode}: {last}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
