"""The real SGLang on the reference platform, as a process with a client: what engine tests start and ask."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.conftest import BOOT, ROOT, clean_environ

REFERENCE = ROOT / "docker-images" / "cpu-reference"
MODEL = ROOT / ".cache" / "reference-model"
START_TIMEOUT_S = 400  # a pipeline of two boots in about 90 s on two idle cores; CI is not idle
FLAGS = (
    "--device cpu --skip-server-warmup --page-size 64 --context-length 131072 --max-total-tokens 140000 "
    "--max-running-requests 16 --random-seed 1"
).split()


@dataclass
class Server:
    """One running engine. `trace` and `log` grow while it serves."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path
    trace: Path
    client: httpx.Client = field(default_factory=lambda: httpx.Client(timeout=600))

    def generate(self, input_ids: Sequence[int], **wanted: Any) -> dict[str, Any]:
        """POST /generate greedily. `rid`, `return_logprob` go beside the prompt, everything else is sampling."""
        top = {k: wanted.pop(k) for k in ("rid", "return_logprob", "stream", "logprob_start_len") if k in wanted}
        sampling = {"temperature": 0, "ignore_eos": True, "max_new_tokens": 1} | wanted
        body = {"input_ids": list(input_ids), "sampling_params": sampling} | top
        response = self.client.post(f"{self.url}/generate", json=body)
        response.raise_for_status()
        answer: dict[str, Any] = response.json()
        return answer

    def tokens(self, input_ids: Sequence[int], **wanted: Any) -> list[int]:
        """The generated token ids."""
        return list(self.generate(input_ids, **wanted)["output_ids"])

    def flush(self) -> None:
        """Empty the prefix cache; waits until the engine is idle enough to do it."""
        deadline = time.monotonic() + 60
        while self.client.post(f"{self.url}/flush_cache").status_code != httpx.codes.OK:
            if time.monotonic() > deadline:
                raise AssertionError("the engine stayed too busy to flush its cache")
            time.sleep(0.2)

    def info(self) -> dict[str, Any]:
        """GET /server_info."""
        answer: dict[str, Any] = self.client.get(f"{self.url}/server_info").raise_for_status().json()
        return answer

    def state(self) -> dict[str, Any]:
        """DynChunk's part of /server_info; empty in a stock engine."""
        found: dict[str, Any] = self.info()["internal_states"][0].get("dynchunk", {})
        return found

    def batches(self, path: Path | None = None) -> list[dict[str, Any]]:
        """The trace so far, one entry a prefill batch."""
        path = path or self.trace
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def chunks(self, rid: str) -> list[tuple[int, int]]:
        """(prefix, new tokens) of each chunk of one request, from the trace."""
        return [
            (prefix, new) for batch in self.batches() for batch_rid, prefix, new in batch["reqs"] if batch_rid == rid
        ]


def make_model() -> Path:
    """The tiny model, written once."""
    subprocess.run([sys.executable, REFERENCE / "make_model.py", MODEL], check=True)
    return MODEL


@contextmanager
def serve(
    folder: Path, *flags: str, engine_path: Sequence[Path] = (), flags_base: Sequence[str] = FLAGS, **environ: str
) -> Iterator[Server]:
    """Start the engine with DynChunk's boot folder on PYTHONPATH; stop every process of it at the end.

    folder: where log and trace go. engine_path: an unpacked engine to run instead of the installed one.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folder.mkdir(parents=True, exist_ok=True)
    log, trace = folder / "server.log", folder / "trace.jsonl"
    path = os.pathsep.join(map(str, (BOOT, *engine_path, REFERENCE / "plugin")))
    settings = {"SGLANG_PLATFORM": "dynchunk_reference", "PYTHONPATH": path, "DYNCHUNK_TRACE": str(trace)} | environ
    argv = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(make_model()), "--port", str(port)]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*argv, *flags_base, *flags],
            env=clean_environ(**settings),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    server = Server(f"http://127.0.0.1:{port}", process, log, trace)
    try:
        _wait_until_healthy(server)
        yield server
    finally:
        stop(server)


def _wait_until_healthy(server: Server) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        if server.process.poll() is not None:
            raise AssertionError(f"the engine ended with {server.process.returncode}:\n{tail(server.log)}")
        try:
            if server.client.get(f"{server.url}/health", timeout=30).status_code == httpx.codes.OK:
                return
        except httpx.HTTPError:
            pass
        if time.monotonic() > deadline:
            raise AssertionError(f"the engine was not ready in {START_TIMEOUT_S} s:\n{tail(server.log)}")
        time.sleep(0.5)


def stop(server: Server) -> None:
    """End the engine and every process it started (they share its session)."""
    for how in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(server.process.pid, how)
        except ProcessLookupError:
            break
        try:
            server.process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            continue
    server.client.close()


def tail(path: Path, lines: int = 40) -> str:
    """The end of a log, for assertion messages."""
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])
