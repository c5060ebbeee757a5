"""One side of a comparison: a live server, asked one prompt at a time, each token's arrival noted."""

from __future__ import annotations

import json
import time
import uuid
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from scripts.verify import engine
from scripts.verify.compare_prompts import Prompt
from scripts.verify.compare_results import TOO_LONG, Answer, Candidate
from scripts.verify.errors import RefusedError
from scripts.verify.redact import without_password
from scripts.verify.server import Server
from scripts.verify.sources import ChunkSource

PROGRAM = "compare"
# How the engine says so, for text that only it can count: its tokenizer manager, and its scheduler.
_TOO_LONG_WORDS = ("context length", "maximum allowed length")
# What changes answers and is no business of chunk sizes. The flags that a report shows anyway are in engine.FLAGS.
_MORE_FLAGS = ("dtype", "load_format", "speculative_algorithm", "weight_version", "random_seed")


@dataclass
class Side:
    """A live server. engine: what of /server_info belongs into a report. new_only: its streams repeat nothing."""

    name: str
    server: Server
    engine: dict[str, Any]
    longest_prompt: tuple[int, str] | None
    source: ChunkSource
    new_only: bool = False
    keep_cache: bool = False
    timeout_s: float = 600.0
    url: str = field(init=False)

    def __post_init__(self) -> None:
        self.url = without_password(self.server.url)

    def close(self) -> None:
        """Close the connections."""
        self.server.close()


def connect(
    name: str,
    url: str,
    api_key: str | None,
    *,
    trace: Path | None = None,
    keep_cache: bool = False,
    timeout_s: float = 600.0,
) -> Side:
    """Ask a server what it is. trace: its DYNCHUNK_TRACE as seen from here, where it does not name one that is."""
    server = Server(url, api_key, option=f"--{name}", program=PROGRAM)
    try:
        info = server.info()
        context = None if info.get("context_length") else server.context_tokens()
    except BaseException:
        server.close()
        raise
    facts = engine_facts(info)
    source = ChunkSource(trace or engine.trace_path(facts), None)
    new_only = bool(info.get("incremental_streaming_output"))
    return Side(name, server, facts, engine.longest_prompt(info, context), source, new_only, keep_cache, timeout_s)


def engine_facts(info: Mapping[str, Any]) -> dict[str, Any]:
    """What a report says of an engine, and what tells whether two serve one model."""
    facts = engine.facts(info)
    facts["model_path"] = info.get("model_path")
    facts["flags"] |= {name: info[name] for name in _MORE_FLAGS if info.get(name) is not None}
    return facts


def ask(side: Side, prompt: Prompt) -> Answer:
    """One prompt to its end. A prompt that the engine refuses is an answer too, what else goes wrong is raised."""
    if prompt.ids is not None and side.longest_prompt is not None and len(prompt.ids) > side.longest_prompt[0]:
        limit_tokens, binding = side.longest_prompt
        return Answer(prompt.line, f"{TOO_LONG}: {len(prompt.ids):,} tokens, at most {limit_tokens:,} fit ({binding})")
    if not side.keep_cache:
        side.server.flush_cache()
    rid = f"compare-{side.name}-{prompt.line}-{uuid.uuid4().hex}"
    body = json.dumps(prompt.request() | {"rid": rid}).encode()
    side.source.begin(rid, len(prompt.ids or ()), time.time())
    heard = _Heard(started_s=time.perf_counter(), new_only=side.new_only)
    try:
        for event in side.server.stream(body, side.timeout_s):
            heard.add(event, time.perf_counter())
    except RefusedError as error:
        return Answer(prompt.line, _refusal(str(error)))
    if heard.aborted is not None:
        return Answer(prompt.line, _refusal(f"aborted: {heard.aborted}"))
    read_tokens = int(heard.meta.get("prompt_tokens") or 0)
    if prompt.ids is not None and read_tokens < len(prompt.ids):
        return Answer(prompt.line, f"{TOO_LONG}: the server cut {len(prompt.ids):,} tokens to {read_tokens:,}")
    return heard.answer(prompt.line, tuple(chunk.tokens for chunk in side.source.poll(time.time())))


@dataclass
class _Heard:
    """A stream so far. Times are of time.perf_counter."""

    started_s: float
    new_only: bool
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    candidates: list[tuple[Candidate, ...]] = field(default_factory=list)
    arrivals_s: list[float] = field(default_factory=list)
    meta: dict[str, Any] = field(default_factory=dict)
    aborted: str | None = None

    def add(self, event: Mapping[str, Any], now_s: float) -> None:
        """One event: all tokens so far, or only the new ones."""
        meta = event.get("meta_info") or {}
        finish = meta.get("finish_reason") or {}
        if finish.get("type") == "abort":
            self.aborted = str(finish.get("message") or "no reason given")
        ids = event.get("output_ids") or []
        n_before = len(self.tokens)
        text = event.get("text") or ""
        tops = [
            tuple(Candidate(int(token), logprob) for logprob, token, *_ in position)
            for position in meta.get("output_top_logprobs") or []
        ]
        logprobs = [entry[0] for entry in meta.get("output_token_logprobs") or []]
        if self.new_only:
            self.text += text
            self.tokens += ids
            self.logprobs += logprobs
            self.candidates += tops
        else:
            self.text = text or self.text
            self.tokens, self.logprobs, self.candidates = list(ids), logprobs, tops
        self.arrivals_s += [now_s] * (len(self.tokens) - n_before)
        self.meta = meta

    def answer(self, line: int, chunk_tokens: tuple[int, ...]) -> Answer:
        """What was heard in the end."""
        return Answer(
            line,
            text=self.text,
            tokens=tuple(self.tokens),
            logprobs=tuple(self.logprobs),
            candidates=tuple(self.candidates),
            prompt_tokens=int(self.meta.get("prompt_tokens") or 0),
            cached_tokens=int(self.meta.get("cached_tokens") or 0),
            ttft_ms=round((self.arrivals_s[0] - self.started_s) * 1000, 3) if self.arrivals_s else 0.0,
            itl_ms=tuple(round(gap * 1000, 3) for gap in _gaps_s(self.arrivals_s)),
            chunk_tokens=chunk_tokens,
        )


def _gaps_s(arrivals_s: list[float]) -> list[float]:
    """Seconds before each token but the first. Tokens that came together share the time since the ones before."""
    together = sorted(Counter(arrivals_s).items())
    gaps = (((now - before) / n_tokens, n_tokens) for (before, _), (now, n_tokens) in pairwise(together))
    return [gap for gap, n_tokens in gaps for _ in range(n_tokens)]


def _refusal(words: str) -> str:
    return f"{TOO_LONG}: {words}" if any(said in words.lower() for said in _TOO_LONG_WORDS) else words
