"""The whole of compare against fake servers: what it asks, what it finds, what it writes, how it ends."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from scripts.verify import compare, compare_record
from scripts.verify.compare_errors import CompareError
from scripts.verify.errors import MemguardError, RecordError, ServerGoneError, ServerTimeoutError, WrongKeyError
from tests.conftest import ROOT, clean_environ
from tests.verify.engine_programs import AT_MOST_S, until
from tests.verify.fake_streams import FakeStreams

pytestmark = pytest.mark.slow

KEY = "s3cret-key"
WORDS = "one two three four five six seven"
Start = Callable[..., FakeStreams]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start fake servers; they end with the test."""
    started: list[FakeStreams] = []

    def one(**how: Any) -> FakeStreams:
        folder = tmp_path / f"engine{len(started)}"
        folder.mkdir()
        started.append(FakeStreams(folder, **{"static_tokens": 4, **how}))
        return started[-1]

    yield one
    for engine in started:
        engine.stop()


@dataclass
class Ran:
    """One run: its exit code, what the terminal showed, the folder it wrote."""

    code: int
    shown: str
    folder: Path

    @property
    def summary(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "compare.json").read_text())
        return found

    @property
    def report(self) -> str:
        return (self.folder / "COMPARE.md").read_text()


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """Ten prompts of 7 words, and of 2."""
    path = tmp_path / "prompts.jsonl"
    lines = [f"{WORDS} {n}" if n % 2 else f"short {n}" for n in range(10)]
    path.write_text("".join(json.dumps({"prompt": line, "max_new_tokens": 6}) + "\n" for line in lines))
    return path


@pytest.fixture
def run(tmp_path: Path, prompts: Path) -> Callable[..., Ran]:
    """Run compare; its folder is new each time unless named."""
    folders = iter(tmp_path / f"out{n}" for n in range(9))

    def go(**how: Any) -> Ran:
        sides = {name: side.url for name in ("a", "b") if isinstance(side := how.pop(name, None), FakeStreams)}
        if "record" not in how:
            how.setdefault("out", next(folders))
        output = io.StringIO()
        options = compare.Options(**{"prompts": prompts, **sides, **how})
        code = compare.run(options, Console(file=output, width=250))
        return Ran(code, output.getvalue(), how.get("out", Path()))

    return go


def test_two_servers_that_agree(start: Start, run: Callable[..., Ran]) -> None:
    """Exit code 0; asked in turns with the first place changing; all counts and times in table, data and report."""
    a, b = start(), start(budget=300, token_s=0.002)
    ran = run(a=a, b=b, warmup=2)
    assert ran.code == 0
    agreed = ran.summary["agreement"]
    assert (agreed["compared"], agreed["tokens_equal"], agreed["apart"]) == (10, 10, 0)
    assert agreed["common_tokens"] == 60
    assert agreed["logprob_gap_max"] == 0
    assert [len(side.asked) for side in (a, b)] == [12, 12]
    assert [side.calls.count(("/flush_cache", None)) for side in (a, b)] == [12, 12]
    assert all(request["sampling_params"]["temperature"] == 0 for request in a.asked)
    # 8 tokens in chunks of 4: computed for the one, traced for the other, and both know.
    sides = ran.summary["sides"]
    assert [side["chunks"]["prompts"] for side in sides.values()] == [5, 5]
    assert sides["a"]["chunks"]["source"].startswith("computed")
    assert sides["b"]["chunks"]["source"] == "DynChunk's trace"
    assert [side["name"] for side in sides.values()] == ["a: fixed", "b: dynamic"]
    assert sides["b"]["latency"]["itl_median_ms"] > 2
    assert sides["b"]["latency"]["ttft_median_ms"] > 2
    for text in (ran.shown, ran.report):
        assert "The answers are the same: 10 of 10 answers have equal tokens." in text
        assert "prompts in more than one chunk" in text
    assert "| `chunked_prefill_size` | `4` | `4` |" in ran.report
    assert "budget 300 token^2" in ran.report
    assert {path.name for path in ran.folder.iterdir()} == {"a.jsonl", "b.jsonl", "compare.json", "COMPARE.md"}


def test_a_side_is_asked_over_one_connection(start: Start, run: Callable[..., Ran]) -> None:
    """The time to the first token has no connecting in it."""
    a, b = start(), start()
    run(a=a, b=b)
    assert [len(side.connections) for side in (a, b)] == [1, 1]


def test_sides_take_turns(start: Start, run: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch) -> None:
    """a, b, then b, a: neither is always the one that comes second on a machine that warms up or slows down."""
    order = []
    ask = compare.ask
    monkeypatch.setattr(
        compare, "ask", lambda side, prompt: (order.append((prompt.line, side.name)), ask(side, prompt))[1]
    )
    run(a=start(), b=start(), warmup=0, limit=3)
    assert order == [(1, "a"), (1, "b"), (2, "b"), (2, "a"), (3, "a"), (3, "b")]


def test_one_server_after_the_other(start: Start, run: Callable[..., Ran], tmp_path: Path) -> None:
    """Recorded and compared with later, the figures are those of two servers at once, and the report says it."""
    a, b = start(), start(budget=300, forks={"short 4": 3})
    file = tmp_path / "fixed.jsonl"
    recorded = run(a=a, record=file)
    assert recorded.code == 0
    assert f"--against {file}" in recorded.shown
    a.stop()
    later = run(b=b, against=file)
    assert later.code == 0
    assert [pair["line"] for pair in later.summary["pairs_not_equal"]] == [5]
    assert later.summary["agreement"]["counts"]["equal up to a tie"] == 1
    assert "asked at different times" in later.report
    assert a.url in later.report
    assert {path.name for path in later.folder.iterdir()} == {"b.jsonl", "compare.json", "COMPARE.md"}
    # Answers are the same to the last digit after a way through the file.
    assert (
        compare_record.load(file).answers[4].logprobs[:3]
        == compare_record.load(later.folder / "b.jsonl").answers[4].logprobs[:3]
    )


def test_a_tie_is_none_where_the_second_token_is_far(start: Start, run: Callable[..., Ran]) -> None:
    """Exit code 1 with the line, the position and both tokens' log probabilities."""
    ran = run(a=start(second_nats=3.0), b=start(second_nats=3.0, forks={"short 4": 3}))
    assert ran.code == 1
    (pair,) = ran.summary["pairs_not_equal"]
    assert (pair["line"], pair["likeness"], pair["first_different"]) == (5, "different", 3)
    assert "line 5: different: at token 3: " in ran.shown
    assert "1 differ by more than rounding explains (0 allowed)" in ran.report
    assert run(a=start(second_nats=3.0), b=start(second_nats=3.0, forks={"short 4": 3}), allowed_apart=1).code == 0


def test_log_probabilities_apart(start: Start, run: Callable[..., Ran]) -> None:
    """Equal tokens do not make up for them; a wider tolerance does."""
    a, b = start(), start(shift_nats=0.3)
    ran = run(a=a, b=b)
    assert ran.code == 1
    assert ran.summary["agreement"]["tokens_equal"] == 10
    assert ran.summary["agreement"]["counts"]["equal tokens, log probabilities apart"] == 10
    assert run(a=a, b=b, tolerance=0.5).code == 0


def test_questions(start: Start, run: Callable[..., Ran], tmp_path: Path) -> None:
    """Exact match by side, who alone was right, and a significant loss is exit code 1 even where all may differ."""
    path = tmp_path / "questions.jsonl"
    lines = [{"question": f"Question number {n}?", "answer": f"#### {n}"} for n in range(8)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    right = {f"number {n}?\nAnswer:": f"It is #### {n}" for n in range(8)}
    wrong = {**right, **{f"number {n}?\nAnswer:": "It is 77" for n in range(2, 8)}}
    ran = run(a=start(says=right), b=start(says=wrong), prompts=path, shots=0, new_tokens=4, allowed_apart=99)
    assert ran.summary["exact_match"] == {
        "questions": 8,
        "a_right": 8,
        "b_right": 2,
        "only_a_right": 6,
        "only_b_right": 0,
        "mcnemar_p": 2 / 64,
    }
    assert ran.code == 1
    assert "exact match has shifted (p = 0.0312)" in ran.shown
    assert "8 of 8 (100.0%)" in ran.report
    assert run(a=start(says=right), b=start(says=right), prompts=path, shots=2, new_tokens=4).code == 0


def test_prompts_above_the_context_length_are_counted(start: Start, run: Callable[..., Ran], tmp_path: Path) -> None:
    """Ids are not even sent, text is refused by the engine; both are in the counts and the list, and no difference."""
    path = tmp_path / "long.jsonl"
    path.write_text(
        json.dumps([0]) and json.dumps({"input_ids": [9] * 40}) + "\n" + json.dumps("w " * 40) + '\n"fine"\n'
    )
    a, b = start(context=30), start(context=30)
    ran = run(a=a, b=b, prompts=path, warmup=0, new_tokens=2)
    assert ran.code == 0
    counts = ran.summary["agreement"]["counts"]
    assert (counts["equal"], counts["above the context length"]) == (1, 2)
    assert len(a.asked) == 2
    assert "40 tokens, at most 29 fit" in ran.report
    assert "longer than the model's context length" in ran.report
    assert "| above the context length | 2 |" in ran.report
    one_sided = run(a=start(context=99), b=b, prompts=path, new_tokens=2)
    assert one_sided.code == 1
    assert one_sided.summary["agreement"]["counts"]["answered by one side only"] == 2


def test_a_prompt_that_the_server_cuts_is_counted(start: Start, run: Callable[..., Ran], tmp_path: Path) -> None:
    """A server with automatic truncation answers something else than was asked."""
    path = tmp_path / "ids.jsonl"
    path.write_text(json.dumps({"input_ids": [9] * 40}) + "\n" + json.dumps({"input_ids": [8] * 5}) + "\n")
    ran = run(a=start(cuts_to=20), b=start(cuts_to=20), prompts=path, new_tokens=2)
    assert ran.summary["agreement"]["counts"]["above the context length"] == 1
    assert "the server cut 40 tokens to 20" in ran.report


@pytest.mark.parametrize("how", [{"refuses": "no log probabilities here"}, {"aborts": "too hot"}])
def test_nothing_to_compare(start: Start, run: Callable[..., Ran], how: dict[str, str]) -> None:
    """When no prompt was answered by both, that is an error with the engine's words, and no verdict."""
    with pytest.raises(CompareError, match=r"none of the 10 prompts was answered by both sides; line 1: ") as refused:
        run(a=start(), b=start(**how))
    assert next(iter(how.values())) in str(refused.value)


@pytest.mark.parametrize("how", [{"new_only": True}, {"together": 4}, {"new_only": True, "together": 4}])
def test_however_a_server_streams(start: Start, run: Callable[..., Ran], how: dict[str, Any]) -> None:
    """All so far or only what is new, one token an event or several: the same answers, a gap for every later token."""
    b = start(token_s=0.004, says={"short": "said"}, **how)
    ran = run(a=start(says={"short": "said"}), b=b)
    assert ran.code == 0
    assert ran.summary["agreement"]["tokens_equal"] == 10
    answer = compare_record.load(ran.folder / "b.jsonl").answers[0]
    assert answer.text == "said"
    n_first = how.get("together", 1)
    assert len(answer.itl_ms) == 6 - n_first
    if n_first > 1:
        assert answer.itl_ms[0] == answer.itl_ms[1]


def test_two_models_are_refused(start: Start, run: Callable[..., Ran], tmp_path: Path) -> None:
    """Live or recorded; one model under two paths can be said to be one."""
    a, b = start(), start(info={"model_path": "other-model"})
    with pytest.raises(CompareError, match=r"different models: a fake-model, b other-model; .*--same-model"):
        run(a=a, b=b)
    run(a=a, record=tmp_path / "r.jsonl")
    with pytest.raises(CompareError, match="different models"):
        run(b=b, against=tmp_path / "r.jsonl")
    assert run(a=a, b=b, same_model=True).code == 0


def test_what_the_sides_differ_in_is_said(start: Start, run: Callable[..., Ran]) -> None:
    """Another backend, a side that is not what its letter says, one server twice: in the report."""
    other = run(a=start(budget=100), b=start(info={"attention_backend": "triton", "dtype": "float16"}))
    assert "The engines differ in `attention_backend`, `dtype`." in other.report
    assert "Side a runs DynChunk" in other.report
    assert "Side b does not run DynChunk" in other.report
    one = start()
    assert "Both sides are one server" in run(a=one, b=one).report


def test_servers_that_cannot_be_asked(start: Start, run: Callable[..., Ran], tmp_path: Path) -> None:
    """Nobody there, a wrong key, other people's requests, a death in an answer, a long silence: which and why."""
    a, recorded = start(), tmp_path / "recorded.jsonl"
    assert run(a=a, record=recorded).code == 0
    gone = start()
    gone.stop()
    with pytest.raises(ServerGoneError, match="say where it is with --b"):
        run(a=a, b=gone)
    with pytest.raises(WrongKeyError, match="API_KEY"):
        run(a=a, b=start(api_key=KEY))
    with pytest.raises(MemguardError, match="busy with other requests; compare needs it to itself"):
        run(a=a, b=start(busy=True))
    assert run(a=a, b=start(busy=True), keep_cache=True).code == 0
    with pytest.raises(ServerGoneError):
        run(a=a, b=start(dies_after=2))
    with pytest.raises(ServerTimeoutError, match=r"did not answer within 0\.2 s"):
        run(b=start(token_s=600.0), against=recorded, timeout_s=0.2)


def test_answers_before_a_failure_are_kept(start: Start, run: Callable[..., Ran], tmp_path: Path) -> None:
    """A server that dies leaves what it had said; such a recording is not compared with."""
    a = start()
    file = tmp_path / "fixed.jsonl"
    asked = a.generate

    def die_later(request: dict[str, Any]) -> Any:
        if len(a.asked) >= 4:
            a.dies_after = 0
        return asked(request)

    a.generate = die_later  # type: ignore[method-assign]
    with pytest.raises(ServerGoneError):
        run(a=a, record=file, warmup=0)
    assert len(file.read_text().splitlines()) == 5
    with pytest.raises(CompareError, match="holds 4 of 10 answers"):
        run(b=start(), against=file)


def test_files_that_do_not_fit(start: Start, run: Callable[..., Ran], tmp_path: Path, prompts: Path) -> None:
    """Another recording's prompts, another way to ask, no recording, a file that is there: refused by name."""
    a = start()
    file = tmp_path / "fixed.jsonl"
    run(a=a, record=file)
    with pytest.raises(RecordError, match="is there already and is not overwritten"):
        run(a=a, record=file)
    with pytest.raises(CompareError, match="and not to the 3 of"):
        run(b=a, against=file, limit=3)
    with pytest.raises(CompareError, match="was recorded without --keep-cache"):
        run(b=a, against=file, keep_cache=True)
    with pytest.raises(CompareError, match="is no recording of compare"):
        run(b=a, against=prompts)
    file.write_text(file.read_text()[:-20])
    with pytest.raises(CompareError, match="its end is cut off"):
        run(b=a, against=file)
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "mine").touch()
    with pytest.raises(RecordError, match="is not empty"):
        run(a=a, b=a, out=taken)
    assert [path.name for path in taken.iterdir()] == ["mine"]


@pytest.mark.parametrize("given", [(), ("a",), ("b",), ("a", "against"), ("b", "record"), ("a", "b", "record")])
def test_unclear_options_are_refused(prompts: Path, given: tuple[str, ...]) -> None:
    """Anything but two sides, or one and a file for the other."""
    values: dict[str, Any] = {"a": "http://x", "b": "http://y", "record": Path("f"), "against": Path("f")}
    options = compare.Options(prompts, **{name: values[name] for name in given})
    with pytest.raises(CompareError, match=r"give --a URL and --b URL, two servers; or"):
        compare.refuse_unclear(options)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_none_are_refused(prompts: Path, value: float) -> None:
    """With a tolerance of nan nothing would ever be apart."""
    for name in ("tolerance", "timeout_s"):
        with pytest.raises(CompareError, match="not a number"):
            compare.refuse_unclear(compare.Options(prompts, a="http://x", b="http://y", **{name: value}))


def program(*arguments: object, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run compare as people do."""
    return subprocess.run(
        [sys.executable, "-m", "scripts.verify.compare", *map(str, arguments)],
        cwd=ROOT,
        env=clean_environ(**environ),
        capture_output=True,
        text=True,
        timeout=AT_MOST_S,
        check=False,
    )


def test_the_program(start: Start, prompts: Path, tmp_path: Path) -> None:
    """Exit codes as documented, one line for an error, and the key in no file and on no screen."""
    a, b = start(api_key=KEY), start(api_key=KEY, forks={"short 4": 0}, second_nats=5.0)
    out = tmp_path / "out"
    same = program(prompts, "--a", a.url, "--b", a.url, "--api-key", KEY, "--out", out)
    assert same.returncode == 0, same.stderr
    assert "The answers are the same" in same.stdout
    different = program(prompts, "--a", a.url, "--b", b.url, API_KEY=KEY)
    assert different.returncode == 1, different.stderr
    assert "Nothing was written" in different.stdout
    refused = program(prompts, "--a", a.url, "--b", b.url, "--api-key", "other")
    assert refused.returncode == 2
    assert refused.stderr.startswith("compare: the server at ")
    assert len(refused.stderr.splitlines()) == 1
    assert program(prompts, "--a", a.url).returncode == 2
    assert program("--nonsense").returncode == 2
    assert program(tmp_path / "missing", "--a", a.url, "--b", b.url).returncode == 2
    written = "".join(path.read_text() for path in out.iterdir())
    assert "--api-key" in written
    assert KEY not in written + same.stdout + different.stdout + refused.stderr


def test_an_interrupted_run_reports_what_it_has(start: Start, prompts: Path, tmp_path: Path) -> None:
    """Told to end: exit code 130, and a report of the prompts that both sides had answered."""
    a, b = start(), start(token_s=0.05)
    out = tmp_path / "out"
    command = [sys.executable, "-m", "scripts.verify.compare", prompts, "--a", a.url, "--b", b.url, "--out", out]
    with subprocess.Popen(command, cwd=ROOT, env=clean_environ(), stdout=subprocess.PIPE, text=True) as process:
        assert until(lambda: len(b.asked) >= 5)
        os.kill(process.pid, signal.SIGTERM)
        shown, _ = process.communicate(timeout=AT_MOST_S)
    assert process.returncode == 130
    summary = json.loads((out / "compare.json").read_text())
    assert summary["interrupted"]
    assert 3 <= summary["asked"] < 10
    assert f"Interrupted after {summary['asked']} of 10 prompts" in shown
