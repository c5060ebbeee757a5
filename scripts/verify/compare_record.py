"""A side's answers in a file, one JSON line each behind a first line that says whose they are.

Each answer is written when it comes: a server that dies after hours leaves what it had said.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from dynchunk.values import parsed
from scripts.verify.compare_errors import CompareError
from scripts.verify.compare_results import Answer, Candidate
from scripts.verify.errors import RecordError

SCHEMA = 1


@dataclass(frozen=True)
class About:
    """Whose answers, to what, and from where. prompts: the digest of what was asked."""

    side: str
    url: str
    engine: dict[str, Any]
    prompts: str
    n_prompts: int
    keep_cache: bool
    warmup_prompts: int
    provenance: dict[str, Any]


@dataclass
class Recorded:
    """One side of a comparison, live or from a file."""

    about: About
    answers: list[Answer] = field(default_factory=list)


class Recorder:
    """Writes one side into a new file; None as its path keeps the answers in memory only."""

    def __init__(self, path: Path | None, about: About) -> None:
        self.recorded = Recorded(about)
        self._path = path
        self._file = None
        if path is not None:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                self._file = path.open("x", encoding="utf-8")
            except FileExistsError:
                raise RecordError(f"{path} is there already and is not overwritten; name another file") from None
            except OSError as error:
                raise RecordError(f"cannot write {path}: {error.strerror}") from None
            self._write({"schema": SCHEMA, **asdict(about)})

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def add(self, answer: Answer) -> None:
        """Keep one answer."""
        self.recorded.answers.append(answer)
        self._write(asdict(answer))

    def _write(self, value: Mapping[str, Any]) -> None:
        if self._file is None:
            return
        try:
            self._file.write(json.dumps(value, separators=(",", ":")) + "\n")
            self._file.flush()
        except OSError as error:
            raise RecordError(f"cannot write {self._path}: {error.strerror}") from None


def load(path: Path) -> Recorded:
    """Read a recording. Raises CompareError where it is none, or not whole."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise CompareError(f"cannot read {path}: {reason}") from None
    try:
        head, *rest = map(parsed, lines)
        if head.pop("schema") != SCHEMA:
            raise CompareError(f"{path} was recorded by another version of compare; record it again")
        recorded = Recorded(About(**head), [_answer(value) for value in rest])
    except (ValueError, KeyError, TypeError, AttributeError):
        raise CompareError(f"{path} is no recording of compare, or its end is cut off; record it again") from None
    if len(recorded.answers) < recorded.about.n_prompts:
        raise CompareError(
            f"{path} holds {len(recorded.answers):,} of {recorded.about.n_prompts:,} answers: the recording did not "
            "end; record it again"
        )
    return recorded


def _answer(value: Mapping[str, Any]) -> Answer:
    lists: Iterable[str] = ("tokens", "logprobs", "itl_ms", "chunk_tokens")
    answer = Answer(**{**value, **{name: tuple(value[name]) for name in lists}})
    candidates = tuple(tuple(Candidate(*pair) for pair in position) for position in value["candidates"])
    return replace(answer, candidates=candidates)
