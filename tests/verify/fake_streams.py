"""A stand-in for two servers of one model: real HTTP, answers that follow from the prompt, planted differences."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.verify.fake_engine import FakeEngine


@dataclass
class FakeStreams(FakeEngine):
    """Answers a prompt with tokens drawn from it alone, so that two of these agree unless told otherwise.

    forks: prompt -> the position from which another token is taken, the one that was second likeliest, `second_nats`
    behind. shift_nats: added to every log probability. says: a part of a prompt -> the text of its answer.
    """

    second_nats: float = 0.02
    shift_nats: float = 0.0
    forks: dict[str, int] = field(default_factory=dict)
    says: dict[str, str] = field(default_factory=dict)
    token_s: float = 0.0
    together: int = 1
    new_only: bool = False
    busy: bool = False
    cuts_to: int | None = None
    refuses: str = ""
    aborts: str = ""
    dies_after: int | None = None

    def __post_init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        super().__post_init__()

    def server_info(self) -> dict[str, Any]:
        return {"incremental_streaming_output": self.new_only, **super().server_info()}

    def answer(self, method: str, path: str, body: Any, authorization: str | None) -> tuple[int, Any] | None:
        if path == "/flush_cache" and self.busy:
            return 400, {"error": {"message": "requests are running"}}
        return super().answer(method, path, body, authorization)

    def generate(self, request: dict[str, Any]) -> Any:
        """The events of one answer."""
        self.asked.append(request)
        return self._events(request)

    def _events(self, request: dict[str, Any]) -> Iterator[str | None]:
        prompt = request.get("text") or request["input_ids"]
        n_prompt = len(prompt.split()) if isinstance(prompt, str) else len(prompt)
        if self.refuses or (self.cuts_to is None and self.context and n_prompt >= self.context):
            words = f"The input ({n_prompt} tokens) is longer than the model's context length ({self.context} tokens)."
            yield json.dumps({"error": {"message": self.refuses or words, "code": 400}})
            yield "[DONE]"
            return
        n_prompt = min(n_prompt, self.cuts_to or n_prompt)
        self._prefill(request["rid"], n_prompt)
        tokens, tops = self._decode(prompt, request["sampling_params"]["max_new_tokens"])
        text = next((said for part, said in self.says.items() if part in str(prompt)), "")
        sent = 0
        while sent < len(tokens):
            time.sleep(self.token_s)
            if self.dies_after is not None and sent >= self.dies_after:
                yield None
            begin = sent if self.new_only else 0
            sent = min(sent + self.together, len(tokens))
            done = sent == len(tokens)
            finish = {"type": "length"} if done else None
            if done and self.aborts:
                finish = {"type": "abort", "message": self.aborts}
            meta = {
                "prompt_tokens": n_prompt,
                "cached_tokens": 0,
                "completion_tokens": sent,
                "finish_reason": finish,
                "output_token_logprobs": [[tops[i][0][0], tokens[i], None] for i in range(begin, sent)],
                "output_top_logprobs": tops[begin:sent],
            }
            said = text if done or not self.new_only else ""
            yield json.dumps({"text": said, "output_ids": tokens[begin:sent], "meta_info": meta})
        yield "[DONE]"

    def _prefill(self, rid: str, n_prompt: int) -> None:
        prefix = 0
        while prefix < n_prompt:
            tokens = min(self.chunk_tokens(prefix), n_prompt - prefix)
            self._write_lines(rid, time.time() - 0.001, prefix, tokens)
            prefix += tokens

    def _decode(self, prompt: str | list[int], n_tokens: int) -> tuple[list[int], list[list[list[Any]]]]:
        """-> tokens, and for each the two likeliest as the engine writes them: [log probability, token, text]."""
        draw = random.Random(str(prompt))
        fork = self.forks.get(prompt if isinstance(prompt, str) else str(prompt[0]))
        tokens, tops = [], []
        for position in range(n_tokens):
            first, logprob = draw.randrange(1_000, 9_000), -draw.random() + self.shift_nats
            second = first + 1
            if fork is not None and position >= fork:
                first, second = (second, first) if position == fork else (first + 10_000, second + 10_000)
            tokens.append(first)
            tops.append([[logprob, first, None], [logprob - self.second_nats, second, None]])
        return tokens, tops
