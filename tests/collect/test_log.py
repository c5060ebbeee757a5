"""Of a log only what DynChunk and Python wrote about themselves is kept; what people asked and were answered is not."""

from __future__ import annotations

import pytest

from scripts.collect.log import log_text
from scripts.collect.scrub import scrub

STAMP = "[2026-11-29 10:00:06 TP0] "
OURS = "dynchunk [pid 7, pp0tp0]: request 5f3: prefill of 48,000 tokens"
JSON = 'dynchunk-json: {"version": "0.1.0", "hooks": {}}'
PREFILL = STAMP + "Prefill batch, #new-seq: 1, #new-token: 2048, #cached-token: 0, input throughput (token/s): 17481.61"
REQUESTS = [
    STAMP + "Receive: obj=GenerateReqInput(rid='1', text='my private prompt about dynchunk [pid 7]: x')",
    STAMP + "Receive: obj=GenerateReqInput(text='private: Prefill batch, #new-seq: 1')",
    STAMP + "Finish: obj=GenerateReqInput(text='private'), out={'text': 'private answer'}",
    STAMP + '{"text": "private dynchunk-json: {}"}',
    "private text of several lines, dynchunk: in it",
    STAMP + "Receive: obj=GenerateReqInput(text='private Traceback (most recent call last):",
]
TRACEBACK = """\
Traceback (most recent call last):
  File "/x/scheduler.py", line 10, in run
    self.step(batch)
    ~~~~~~~~~^^^^^^^
  [Previous line repeated 3 more times]
torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB""".splitlines()
CAUSE = ["", "The above exception was the direct cause of the following exception:", ""]


def kept(*lines: str, secrets: tuple[str, ...] = ()) -> list[str]:
    return log_text(lines, lambda text: scrub(text, secrets)).splitlines()


def traceback(*lines: str) -> list[str]:
    text = kept(*lines)
    return text[text.index("The last traceback:") + 1 :]


@pytest.mark.parametrize("line", [OURS, JSON, PREFILL, "dynchunk: the adapter did not start in pid 7: OSError: x"])
@pytest.mark.parametrize(
    "before",
    [
        "",
        "server-1  | ",
        "2026-11-29T10:00:06.123456789Z ",
        "server-1  | 2026-11-29T10:00:06.1Z ",
        "\x1b[36mserver-1  | \x1b[0m",
    ],
)
def test_what_is_ours_stays_as_it_is(before: str, line: str) -> None:
    """Whatever carried the log; colours go."""
    assert kept(before + line) == [(before + line).replace("\x1b[36m", "").replace("\x1b[0m", "")]


@pytest.mark.parametrize("line", REQUESTS)
@pytest.mark.parametrize("before", ["", "server-1  | "])
def test_no_request_is_kept(before: str, line: str) -> None:
    """Neither on its own, nor around or within a traceback, whatever words are in it."""
    lines = [line, *TRACEBACK[:3], line, *TRACEBACK[3:], line, *["    " + line] * 3, line]
    assert "private" not in "\n".join(kept(*(before + one for one in lines)))


def test_a_traceback_ends_at_its_exception() -> None:
    """What comes behind it is not part of it, indented or not."""
    assert traceback(STAMP + "Scheduler hit an exception: " + TRACEBACK[0], *TRACEBACK[1:], "  private", "private") == [
        STAMP + TRACEBACK[0],
        *TRACEBACK[1:],
    ]


def test_other_processes_lines_within_a_traceback() -> None:
    """They are left out, and do not end it."""
    assert traceback(*TRACEBACK[:3], REQUESTS[0], OURS, *TRACEBACK[3:]) == TRACEBACK


def test_the_last_of_tracebacks_with_its_cause() -> None:
    """An earlier one is left out, unless Python says that the last follows from it."""
    last = ["Traceback (most recent call last):", '  File "y.py", line 1, in g', "ValueError: last"]
    assert traceback(*TRACEBACK, "", "something", *last) == last
    assert traceback(*TRACEBACK, *CAUSE, *last) == [*TRACEBACK, CAUSE[1], *last]


def test_an_exception_group() -> None:
    """The exception inside of it is what went wrong."""
    inner = ["Traceback (most recent call last):", '  File "y.py", line 1, in g', "ValueError: last"]
    outer = ["  + Exception Group Traceback (most recent call last):", "  | ExceptionGroup: errors (1 sub-exception)"]
    assert traceback(*outer, "  +-+---- 1 ----", *("    | " + line for line in inner), "    | private") == inner


def test_a_message_is_cut_after_its_secrets_are_out() -> None:
    """It may quote a prompt, and half a secret is one as well."""
    secret = "key-of-the-server-77"
    line = "ValueError: " + "x" * 180 + secret + " private prompt" * 50
    (message,) = [text for text in kept(*TRACEBACK[:2], line, secrets=(secret,)) if text.startswith("ValueError")]
    assert len(message) < 220
    assert "key-of" not in message
    assert message.endswith("...")


@pytest.mark.parametrize("line", ["Receive: private", "private", "private.example: x", "Boom: private"])
def test_what_is_no_exception_is_not_kept(line: str) -> None:
    """A line that comes where the exception's is expected."""
    assert traceback(*TRACEBACK[:3], line) == TRACEBACK[:3]
