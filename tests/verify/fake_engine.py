"""A stand-in for a running SGLang server: real HTTP, made-up chunks, and the /proc/meminfo they would leave behind."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime, timezone
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.verify.counted_host import until_read

GIB = 2**30


@dataclass
class FakeEngine:
    """Computes a prompt in chunks of `static_tokens`, or under `budget`; each takes `bytes_per_pair` * T * (L + T).

    stalls_at_tokens: there a prompt waits to be aborted. pid: its process, whose memory stands in the made-up /proc as
    well. neighbour: what other programs hold of the host's memory, in GiB, one of them at a time, over and over.
    """

    folder: Path
    available_gib: float = 8.0
    static_tokens: int = 1_000
    budget: int | None = None
    chunk_s: float = 0.01
    bytes_per_pair: int = 400
    leaks: bool = False
    context: int | None = 131_072
    api_key: str | None = None
    abort_key: str | None = None
    writes_trace: bool = True
    writes_log: bool = False
    dies_at_tokens: int | None = None
    stalls_at_tokens: int | None = None
    hears_aborts: bool = True
    port: int = 0
    pid: int | None = None
    neighbour: tuple[float, ...] = (0.0,)
    info: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.connections: set[tuple[str, int]] = set()
        self.prompts: list[list[int]] = []
        self.aborted: set[str] = set()
        self.open_tokens: dict[str, int] = {}
        self.over = threading.Event()
        self._memory = threading.RLock()
        self.meminfo = self.folder / "meminfo"
        self.trace = self.folder / "trace.jsonl"
        self.log = self.folder / "server.log"
        self._neighbour = itertools.cycle(self.neighbour)
        self.set_available(self.available_gib * GIB)
        if self.writes_trace:
            self.trace.touch()
        if self.writes_log:
            self.log.touch()
        self._http = ThreadingHTTPServer(("127.0.0.1", self.port), _handler(self))
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        self.over.set()
        self._http.shutdown()
        self._http.server_close()

    def set_available(self, n_bytes: float) -> None:
        if self.pid is not None:
            write_process(self.folder / str(self.pid), self.available_gib * GIB - n_bytes)
        write_meminfo(self.meminfo, n_bytes - next(self._neighbour) * GIB)

    def leave(self, n_bytes: float) -> None:
        """Give the memory back, for good: what still runs takes none any more."""
        with self._memory:
            self.over.set()
            write_meminfo(self.meminfo, n_bytes)

    def _take(self, n_bytes: float) -> None:
        with self._memory:
            if not self.over.is_set():
                self.set_available(self.available_gib * GIB - n_bytes)

    def chunk_tokens(self, prefix: int) -> int:
        if self.budget is None or prefix == 0:
            return self.static_tokens
        return max(64, min(self.static_tokens, self.budget // prefix // 64 * 64))

    def server_info(self) -> dict[str, Any]:
        effective = {"summary": f"budget {self.budget:,} token^2"} if self.budget else {}
        hooks = {"trace": {"outcome": "applied", "detail": str(self.trace)}} if self.writes_trace else {}
        dynchunk = {"version": "0.1.0", "mode": "on", "rank": "", "hooks": hooks, "effective": effective}
        return {
            "version": "0.5.23",
            "model_path": "fake-model",
            "chunked_prefill_size": self.static_tokens,
            "context_length": self.context,
            "page_size": 64,
            "attention_backend": "fa3",
            "tp_size": 1,
            "pp_size": 1,
            "api_key": self.api_key,
            "launch_command": f"sglang --api-key {self.api_key}",
            "internal_states": [{"dynchunk": dynchunk} if self.budget else {}],
            **self.info,
        }

    def answer(self, method: str, path: str, body: Any, authorization: str | None) -> tuple[int, Any] | None:
        """(status, body) of one call. None: the server died."""
        if method == "POST":
            self.calls.append((path, None if path == "/generate" else body))
        wanted = self.abort_key if path == "/abort_request" and self.abort_key else self.api_key
        if wanted is not None and authorization != f"Bearer {wanted}":
            return 401, {"error": "Unauthorized"}
        if path == "/generate":
            generated = self.generate(body)
            return None if generated is None else (200, generated)
        if path == "/abort_request":
            self.aborted |= set(self.open_tokens) if body.get("abort_all") else {body["rid"]}
        # As the real one: a request between two of its chunks is neither running nor waiting.
        load = {"num_running_reqs": 0, "num_waiting_reqs": 0}
        load["num_waiting_uncached_tokens"] = sum(self.open_tokens.values())
        answers = {
            "/v1/loads": {"loads": [load]},
            "/server_info": self.server_info(),
            "/v1/models": {"data": [{"id": "fake", "max_model_len": 4_096}]},
        }
        known = path in answers or path in ("/abort_request", "/flush_cache", "/health")
        return 200 if known else 404, answers.get(path)

    def generate(self, request: dict[str, Any]) -> dict[str, Any] | None:
        """Run one request. None: the server died."""
        try:
            return self._generate(request)
        finally:
            self.open_tokens.pop(request["rid"], None)

    def _generate(self, request: dict[str, Any]) -> dict[str, Any] | None:
        rid, ids = request["rid"], request["input_ids"]
        self.prompts.append(ids)
        prefix = 0
        while prefix < len(ids):
            self.open_tokens[rid] = len(ids) - prefix
            if rid in self.aborted and self.hears_aborts:
                return {"text": "", "meta_info": {"id": rid, "finish_reason": {"type": "abort", "message": "Aborted"}}}
            if self.dies_at_tokens is not None and prefix >= self.dies_at_tokens:
                return None
            if self.stalls_at_tokens is not None and prefix >= self.stalls_at_tokens and not self.over.is_set():
                time.sleep(self.chunk_s)
                continue
            tokens = min(self.chunk_tokens(prefix), len(ids) - prefix)
            launched_s = time.time()
            taken = self.bytes_per_pair * tokens * (prefix + tokens)
            self._take(taken)
            time.sleep(self.chunk_s * tokens / self.static_tokens)
            until_read(self.folder, self.over.is_set)
            if not self.leaks:
                self._take(0)
            self._write_lines(rid, launched_s, prefix, tokens)
            prefix += tokens
        return {
            "text": "x",
            "meta_info": {"finish_reason": {"type": "length"}, "prompt_tokens": len(ids), "cached_tokens": 0},
        }

    def _write_lines(self, rid: str, launched_s: float, prefix: int, tokens: int) -> None:
        took_s = time.time() - launched_s
        if self.writes_trace:
            line = {"t": launched_s, "ms": took_s * 1000, "mode": "extend", "rows": tokens, "longest": prefix}
            with self.trace.open("a") as file:
                file.write(json.dumps(line | {"reqs": [[rid, prefix, tokens]]}) + "\n")
        if self.writes_log:
            with self.log.open("a") as file:
                file.write(log_line(tokens, tokens / took_s) + "\n")


def write_meminfo(path: Path, available_bytes: float) -> None:
    """Write MemAvailable in place: the sampler keeps the file open."""
    lines = {"MemTotal": 16 * GIB, "MemFree": 100 * 2**20, "MemAvailable": available_bytes, "SwapFree": 0}
    _write_in_place(path, "".join(f"{name + ':':<16}{max(0, int(n)) // 1024:>12} kB\n" for name, n in lines.items()))


def write_process(folder: Path, taken_bytes: float) -> None:
    """A process of a made-up /proc that holds so much on top of 1 GiB."""
    folder.mkdir(exist_ok=True)
    _write_in_place(folder / "stat", f"{folder.name} (python) S 1 1 1\n")
    _write_in_place(folder / "status", f"Name:\tpython\nRssAnon:\t{int(GIB + taken_bytes) // 1024:>12} kB\n")


def _write_in_place(path: Path, text: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT)
    try:
        os.pwrite(fd, text.encode(), 0)
    finally:
        os.close(fd)


def log_line(tokens: int, tokens_per_s: float, *, cached: int = 0, rank: str = "") -> str:
    """A line as SGLang 0.5.23 writes it (metrics_reporter.report_prefill_stats)."""
    now = datetime.now(tz=timezone.utc).strftime("%Y-%m-%d %H:%M:%S")
    return (
        f"[{now}{rank}] Prefill batch, #new-seq: 1, #new-token: {tokens}, #cached-token: {cached}, token usage: 0.07, "
        f"#running-req: 0, #queue-req: 0, #pending-token: 0, cuda graph: False, "
        f"input throughput (token/s): {tokens_per_s:.2f}"
    )


def _stream(handler: BaseHTTPRequestHandler, events: Iterator[str | None]) -> None:
    """Server-sent events, each in a piece of its own. None: the server dies."""
    handler.send_response(200)
    handler.send_header("Content-Type", "text/event-stream")
    handler.send_header("Transfer-Encoding", "chunked")
    handler.end_headers()
    with contextlib.suppress(OSError):  # nobody waits for it any more
        for event in events:
            if event is None:
                handler.close_connection = True
                return
            piece = f"data: {event}\n\n".encode()
            handler.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece))
        handler.wfile.write(b"0\r\n\r\n")


def _handler(engine: FakeEngine) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # as the engine's server: tokens leave one by one

        def do_GET(self) -> None:
            self._respond("GET")

        def do_POST(self) -> None:
            self._respond("POST")

        def _respond(self, method: str) -> None:
            engine.connections.add(self.client_address)
            data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            path = urlsplit(self.path).path
            answer = engine.answer(method, path, json.loads(data) if data else None, self.headers.get("Authorization"))
            if answer is None:
                self.close_connection = True
                return
            status, body = answer
            if isinstance(body, Iterator):
                _stream(self, body)
                return
            out = b"" if body is None else json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(out)))
            self.end_headers()
            with contextlib.suppress(OSError):  # nobody waits for it any more
                self.wfile.write(out)

        def log_message(self, *arguments: object) -> None:
            pass

    return Handler
