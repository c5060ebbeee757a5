"""What compare asks: prompts and questions from a file of JSON lines, and the number that an answer ends with.

A line is a string; {"prompt": text or token ids}; {"text": ...}; {"input_ids": [...]}; or a question as GSM8K writes
them, {"question": ..., "answer": "... #### 42"}. Each may have "max_new_tokens". Blank lines are skipped.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from dynchunk.values import parsed
from scripts.verify.compare_errors import CompareError

DEFAULT_SHOTS = 5
NEW_TOKENS_QUESTION = 512  # a worked answer to a school problem ends well before
NEW_TOKENS_PROMPT = 64
MARK = "####"
_STOP = ("\nQuestion:",)
_PROMPT_KEYS = ("prompt", "text", "input_ids")
_MOST_NAMED = 5
# A minus that follows a letter or digit is a dash: "10-5" ends with 5.
_NUMBER = re.compile(r"(?:(?<![\w.,])-)?\d[\d,]*(?:\.\d+)?")


@dataclass(frozen=True)
class Prompt:
    """One thing to ask. Exactly one of text and ids is given. expected: the right number, None where nobody says it."""

    line: int
    new_tokens: int
    text: str | None = None
    ids: tuple[int, ...] | None = None
    expected: str | None = None
    stop: tuple[str, ...] = ()

    def request(self) -> dict[str, Any]:
        """What both sides are asked: greedy, with the log probabilities of the two likeliest tokens."""
        return {
            **({"text": self.text} if self.ids is None else {"input_ids": list(self.ids)}),
            "sampling_params": {
                "temperature": 0,
                "max_new_tokens": self.new_tokens,
                **({"stop": list(self.stop)} if self.stop else {}),
            },
            "return_logprob": True,
            "top_logprobs_num": 2,
            "stream": True,
        }


class _LineError(Exception):
    """What is wrong with a line."""


@dataclass(frozen=True)
class _Question:
    """A line with its answer as the file has it."""

    line: int
    question: str
    answer: str
    expected: str
    new_tokens: int


def load(
    path: Path, *, shots: int = DEFAULT_SHOTS, limit: int | None = None, new_tokens: int | None = None
) -> list[Prompt]:
    """Read a file. shots: questions at its start that are put, solved, before each of the others.

    new_tokens: for lines that say nothing; None: 512 for questions, 64 for prompts.
    Raises CompareError where the file has no prompts or lines are wrong, all of them in one message.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # a JSON string may hold other line ends
    except OSError as error:
        raise CompareError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise CompareError(f"{path} is not UTF-8 text (byte {error.start:,}); write one JSON value a line") from None
    found: list[Prompt | _Question] = []
    wrong = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                found.append(_parse(number, line, new_tokens))
            except _LineError as error:
                wrong.append(f"{path}:{number}: {error}")
    if wrong:
        more = f"\nand {len(wrong) - _MOST_NAMED:,} more lines" if len(wrong) > _MOST_NAMED else ""
        raise CompareError("\n".join(wrong[:_MOST_NAMED]) + more)
    if not found:
        raise CompareError(f"{path} holds no prompts; write one JSON value a line, such as {{'prompt': 'text'}}")
    return _with_shots(found, shots, path)[:limit]


def digest(prompts: Iterable[Prompt]) -> str:
    """Tells whether two runs asked the same, in the same way."""
    asked = [[prompt.request(), prompt.expected] for prompt in prompts]
    return hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:16]


def final_number(text: str) -> str | None:
    """The number behind the last ####, else the last one in the text, in one spelling: '1,000.0' is '1000'."""
    _, mark, behind = text.rpartition(MARK)
    numbers = _NUMBER.findall(behind)
    if not numbers:
        return None
    return format(Decimal((numbers[0] if mark else numbers[-1]).replace(",", "")).normalize(), "f")


def _with_shots(found: Sequence[Prompt | _Question], shots: int, path: Path) -> list[Prompt]:
    questions = [item for item in found if isinstance(item, _Question)]
    if questions and shots >= len(questions):
        raise CompareError(
            f"--shots {shots} leaves none of the {len(questions)} questions of {path} to ask; give a smaller number"
        )
    solved = questions[:shots]
    examples = "".join(f"Question: {item.question}\nAnswer: {item.answer}\n\n" for item in solved)
    return [
        Prompt(
            item.line,
            item.new_tokens,
            text=f"{examples}Question: {item.question}\nAnswer:",
            expected=item.expected,
            stop=_STOP,
        )
        if isinstance(item, _Question)
        else item
        for item in found
        if item not in solved
    ]


def _parse(number: int, line: str, new_tokens: int | None) -> Prompt | _Question:
    """Raises _LineError with what is wrong."""
    try:
        value = parsed(line)
    except json.JSONDecodeError as error:
        raise _LineError(f"not JSON ({error.msg} at column {error.colno})") from None
    except ValueError as error:
        raise _LineError(f"not JSON ({error})") from None
    if isinstance(value, str):
        value = {"prompt": value}
    if not isinstance(value, dict):
        raise _LineError('neither text nor an object with "prompt", "text", "input_ids" or "question"')
    own = value.get("max_new_tokens", new_tokens)
    if own is not None and not (_is_count(own) and own > 0):
        raise _LineError(f'"max_new_tokens" is {json.dumps(own)}, not a number of at least 1')
    if "question" in value:
        return _question(number, value, own or NEW_TOKENS_QUESTION)
    given = [key for key in _PROMPT_KEYS if key in value]
    if len(given) != 1:
        wanted = "one of " + ", ".join(f'"{key}"' for key in (*_PROMPT_KEYS, "question"))
        raise _LineError(f"needs {wanted}; it has {', '.join(given) or 'none of them'}")
    prompt = value[given[0]]
    if isinstance(prompt, str) and prompt and given[0] != "input_ids":
        return Prompt(number, own or NEW_TOKENS_PROMPT, text=prompt)
    if isinstance(prompt, list) and prompt and given[0] != "text" and all(map(_is_count, prompt)):
        return Prompt(number, own or NEW_TOKENS_PROMPT, ids=tuple(prompt))
    raise _LineError(f'"{given[0]}" is neither text nor a list of token ids, or is empty')


def _question(number: int, value: Mapping[str, Any], new_tokens: int) -> _Question:
    question, answer = value["question"], value.get("answer")
    if not isinstance(question, str) or not question.strip():
        raise _LineError('"question" is no text')
    if not isinstance(answer, (str, int, float)) or isinstance(answer, bool):
        raise _LineError('"answer" is missing; it ends with the right number, such as "#### 42"')
    expected = final_number(str(answer))
    if expected is None:
        raise _LineError(f'"answer" has no number: {str(answer)[:60]!r}')
    return _Question(number, question, str(answer), expected, new_tokens)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
