"""The real SGLang on the CPU reference platform, as a process with a client: for the quickstart, benches and tests."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random, SystemRandom
from typing import Any, NamedTuple

import httpx

from scripts.ending import asked, stop, undisturbed

ROOT = Path(__file__).resolve().parent.parent
BOOT = ROOT / "adapter" / "boot"
REFERENCE = ROOT / "docker-images" / "cpu-reference"
PLUGIN = REFERENCE / "plugin"
# Relative to the checkout, as everything that ends up in a report: whose folder it lies in is nobody's business.
MODEL = Path(".cache", "reference-model")
# The ports that the kernel gives to whoever asks for any. Engines take a few more, up to a thousand above theirs.
LOCAL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
FIRST_PORT, ENGINE_PORTS, PORTS_TRIED = 10_000, 1_000, 100
START_TIMEOUT_S = 400  # two ranks boot in half a minute on two idle cores; not every machine is idle
FLAGS = (
    "--device cpu --skip-server-warmup --page-size 64 --context-length 131072 --max-total-tokens 140000 "
    "--max-running-requests 16 --random-seed 1"
).split()
# What an engine of ours needs of the environment it is started in. Everything else, such as allocator settings, proxies
# and the settings of another server, would change what is measured without anybody seeing it.
_NEEDED = ("PATH", "HOME", "USER", "LOGNAME", "SHELL", "TERM", "TZ", "TMPDIR", "LANG", "LANGUAGE", "LD_LIBRARY_PATH")
_NEEDED_PREFIXES = ("LC_", "XDG_")


class EngineEndedError(AssertionError):
    """The engine did not come up; the message has the end of its log."""


@dataclass
class Server:
    """One running engine. `trace` and `log` grow while it serves."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path
    trace: Path
    # Proxies of the environment are for the outside.
    client: httpx.Client = field(default_factory=lambda: httpx.Client(timeout=900, trust_env=False))

    def generate(self, input_ids: Sequence[int], **wanted: Any) -> dict[str, Any]:
        """POST /generate greedily. `rid`, `return_logprob` go beside the prompt, everything else is sampling."""
        answer: dict[str, Any] = self._post("/generate", _body(input_ids, wanted)).json()
        return answer

    def tokens(self, input_ids: Sequence[int], **wanted: Any) -> list[int]:
        """The generated token ids."""
        return list(self.generate(input_ids, **wanted)["output_ids"])

    def stream(self, input_ids: Sequence[int], new_tokens: int, rid: str) -> list[float]:
        """Generate as a stream. -> when each token came, by the monotonic clock."""
        body = _body(input_ids, {"max_new_tokens": new_tokens, "rid": rid}) | {"stream": True}
        with self.client.stream("POST", f"{self.url}/generate", json=body) as response:
            response.raise_for_status()
            return [time.monotonic() for line in response.iter_lines() if line.startswith("data: {")]

    def abort(self, rid: str) -> None:
        """End one request."""
        self._post("/abort_request", {"rid": rid})

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

    def chunks(self, rid: str, since: int = 0) -> list[tuple[int, int]]:
        """(prefix, new tokens) of each chunk of one request, from the trace's since-th batch on."""
        batches = self.batches()[since:]
        return [(prefix, new) for batch in batches for batch_rid, prefix, new in batch["reqs"] if batch_rid == rid]

    def _post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        return self.client.post(self.url + path, json=body).raise_for_status()


def _body(input_ids: Sequence[int], wanted: dict[str, Any]) -> dict[str, Any]:
    beside = ("rid", "return_logprob", "logprob_start_len")
    sampling = {"temperature": 0, "ignore_eos": True, "max_new_tokens": 1}
    sampling |= {k: v for k, v in wanted.items() if k not in beside}
    top = {k: v for k, v in wanted.items() if k in beside}
    return {"input_ids": list(input_ids), "sampling_params": sampling} | top


def prompt(tokens: int, seed: int) -> list[int]:
    """Token ids that no other seed shares a prefix with."""
    draw = Random(seed)  # noqa: S311 - reproducible, not secret
    return [draw.randrange(1000, 9000) for _ in range(tokens)]


@functools.cache
def make_model() -> Path:
    """The tiny model, written once."""
    done = subprocess.run(
        [sys.executable, REFERENCE / "make_model.py", ROOT / MODEL], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise EngineEndedError(f"the model could not be made:\n{done.stdout}{done.stderr}")
    return ROOT / MODEL


def free_port() -> int:
    """A port that nobody listens on, and that the kernel gives to nobody while an engine takes its time to start."""
    first_given = int(LOCAL_PORTS.read_text(encoding="ascii").split()[0]) if LOCAL_PORTS.exists() else 0
    chance = SystemRandom()
    for _ in range(PORTS_TRIED):
        # Where the kernel gives away nearly all of them, its own choice is as good as any.
        wanted = chance.randrange(FIRST_PORT, first_given - ENGINE_PORTS) if first_given > 2 * FIRST_PORT else 0
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", wanted))
            return int(probe.getsockname()[1])
    raise OSError(f"none of {PORTS_TRIED} ports is free")


def platform_environ() -> dict[str, str]:
    """The reference platform's own environment file, and its plugin's folder as PYTHONPATH."""
    lines = (REFERENCE / "env").read_text(encoding="utf-8").splitlines()
    pairs = (line.partition("=") for line in lines if "=" in line and not line.startswith("#"))
    return {name.strip(): value.strip() for name, _, value in pairs} | {"PYTHONPATH": str(PLUGIN)}


def outer_environ() -> dict[str, str]:
    """What of this process's environment an engine is started with: nothing that changes how it serves."""
    kept = {k: v for k, v in os.environ.items() if k in _NEEDED or k.startswith(_NEEDED_PREFIXES)}
    # Two workers test at a time; more threads than cores would wait for each other at every barrier.
    return kept | ({"OMP_NUM_THREADS": "1"} if "PYTEST_XDIST_WORKER" in os.environ else {})


class Start(NamedTuple):
    """What `running` needs to start an engine."""

    command: list[str]
    environ: dict[str, str]
    log: Path
    trace: Path
    port: int


def engine(folder: Path, *flags: str, engine_path: Sequence[Path] = (), **environ: str) -> Start:
    """An engine with DynChunk's boot folder on PYTHONPATH. Log and trace go to `folder`; further flags to the engine.

    engine_path: an unpacked engine to run instead of the installed one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    trace = folder / "trace.jsonl"
    port = free_port()
    path = os.pathsep.join(map(str, (BOOT, *engine_path, PLUGIN)))
    settings = outer_environ() | platform_environ() | {"PYTHONPATH": path, "DYNCHUNK_TRACE": str(trace)} | environ
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(make_model()), "--port", str(port)]
    return Start([*command, *FLAGS, *flags], settings, folder / "server.log", trace, port)


@contextlib.contextmanager
def serving(folder: Path, *flags: str, engine_path: Sequence[Path] = (), **environ: str) -> Iterator[Server]:
    """That engine, started and ready."""
    with running(*engine(folder, *flags, engine_path=engine_path, **environ)) as server:
        yield server


@contextlib.contextmanager
def running(
    command: Sequence[str | Path],
    environ: dict[str, str],
    log: Path,
    trace: Path,
    port: int,
    *,
    start: Callable[..., subprocess.Popen[bytes]] = subprocess.Popen,
    end: Callable[[subprocess.Popen[bytes]], None] = stop,
) -> Iterator[Server]:
    """Run a command that serves on `port`; wait until it is healthy; in the end stop every process of it.

    start, end: what starts a process, and what stops it and its children.
    """
    process = None
    try:
        with log.open("wb") as output, undisturbed():
            process = start(
                command, env=environ, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
        server = Server(f"http://127.0.0.1:{port}", process, log, trace)
        with server.client:
            wait_until_healthy(server)
            yield server
    finally:
        if process is not None:
            end(process)


def wait_until_healthy(server: Server, timeout_s: float = START_TIMEOUT_S) -> None:
    """Raises EngineEndedError when the engine ends, or is not ready in time."""
    deadline = time.monotonic() + timeout_s
    while True:
        if asked():
            raise KeyboardInterrupt
        if server.process.poll() is not None:
            raise EngineEndedError(f"the engine ended with {server.process.returncode}:\n{tail(server.log)}")
        with contextlib.suppress(httpx.HTTPError):
            if server.client.get(f"{server.url}/health", timeout=30).status_code == httpx.codes.OK:
                return
        if time.monotonic() > deadline:
            raise EngineEndedError(f"the engine was not ready in {timeout_s:.0f} s:\n{tail(server.log)}")
        time.sleep(0.5)


def tail(path: Path, lines: int = 40) -> str:
    """The end of a log."""
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])
