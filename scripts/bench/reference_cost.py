"""What prompts take on the CPU reference platform: seconds, and memory for a moment.

`python -m scripts.bench.reference_cost`: the stock engine with two chunk sizes and DynChunk, one server after the
other. Memory is the scheduler process's own high-water mark, reset before each prompt, above what it held then.
"""

from __future__ import annotations

import time
from pathlib import Path

import psutil
import typer

from scripts.provenance import provenance
from scripts.reference import Server, prompt, serving

LENGTHS = (8_192, 16_384, 32_768, 49_152)
ARMS = (
    ("stock, chunk 2048", 2048, {"DYNCHUNK_MODE": "off"}),
    ("stock, chunk 512", 512, {"DYNCHUNK_MODE": "off"}),
    ("DynChunk, chunk 2048, budget 16M", 2048, {"DYNCHUNK_BUDGET": "16M"}),
)
MIB = 1 << 20


def main() -> None:
    """Print one table."""
    print(provenance())
    print("CPU reference platform, one process, first token included; MiB above what the process held before.\n")
    print("| prompt | " + " | ".join(f"{name} | MiB" for name, _, _ in ARMS) + " |")
    print("| --: |" + " --: | --: |" * len(ARMS))
    rows: dict[int, list[str]] = {length: [] for length in LENGTHS}
    for name, chunk, environ in ARMS:
        folder = Path(".cache", "bench-reference", name.replace(" ", "-").replace(",", ""))
        flags = ("--chunked-prefill-size", str(chunk))
        with serving(folder, *flags, engine_path=(), **environ) as server:
            server.tokens(prompt(4_000, 1))  # kernels and allocator warm up
            for length in LENGTHS:
                took_s, transient_bytes = _measure(server, length)
                rows[length] += [f"{took_s:.1f} s", f"{transient_bytes / MIB:,.0f}"]
    for length, cells in rows.items():
        print(f"| {length:,} | " + " | ".join(cells) + " |")


def _measure(server: Server, length: int) -> tuple[float, int]:
    server.flush()
    [scheduler] = [
        child
        for child in psutil.Process(server.process.pid).children(recursive=True)
        if "scheduler" in " ".join(child.cmdline())
    ]
    Path(f"/proc/{scheduler.pid}/clear_refs").write_text("5", encoding="ascii")
    before_bytes = _status(scheduler.pid, "VmRSS")
    start = time.monotonic()
    server.tokens(prompt(length, length))
    return time.monotonic() - start, _status(scheduler.pid, "VmHWM") - before_bytes


def _status(pid: int, name: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace").splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/{pid}/status has no {name}")


if __name__ == "__main__":
    typer.run(main)
