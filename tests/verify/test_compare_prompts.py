"""What may stand in a file of prompts, and what is said of one that may not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts.verify.compare_errors import CompareError
from scripts.verify.compare_prompts import Prompt, digest, final_number, load


def written(folder: Path, *lines: object) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


QUESTIONS = [{"question": f"What is {n} + {n}?", "answer": f"It is <<{n}+{n}>>.\n#### {2 * n}"} for n in range(8)]


def test_every_kind_of_line(tmp_path: Path) -> None:
    """Text, token ids under either name, a question; blank lines are skipped and the file's line numbers kept."""
    path = written(
        tmp_path,
        '"plain text"',
        "",
        {"prompt": "named"},
        {"text": "also", "max_new_tokens": 3},
        {"prompt": [5, 6]},
        {"input_ids": [7]},
        {"question": "How many?", "answer": "#### 1,200"},
    )
    plain, named, also, ids, more_ids, question = load(path, shots=0)
    assert (plain.text, plain.line, plain.new_tokens) == ("plain text", 1, 64)
    assert (named.text, named.line) == ("named", 3)
    assert (also.text, also.new_tokens) == ("also", 3)
    assert (ids.ids, ids.text, more_ids.ids) == ((5, 6), None, (7,))
    assert question.text == "Question: How many?\nAnswer:"
    assert (question.expected, question.new_tokens, question.line) == ("1200", 512, 7)
    assert all(prompt.expected is None for prompt in (plain, named, also, ids))


def test_what_is_asked_is_greedy_and_shows_log_probabilities() -> None:
    """Temperature 0, the two likeliest tokens, a stream; ids or text, whichever the line has."""
    asked = Prompt(1, 9, ids=(1, 2)).request()
    assert asked["input_ids"] == [1, 2]
    assert "text" not in asked
    assert asked["sampling_params"] == {"temperature": 0, "max_new_tokens": 9}
    assert (asked["return_logprob"], asked["top_logprobs_num"], asked["stream"]) == (True, 2, True)
    assert Prompt(1, 9, text="x", stop=("\nQ",)).request()["sampling_params"]["stop"] == ["\nQ"]


def test_shots_come_from_the_file_and_are_not_asked(tmp_path: Path) -> None:
    """The first questions stand solved before each of the others; other lines are left as they are."""
    path = written(tmp_path, QUESTIONS[0], '"plain"', *QUESTIONS[1:])
    prompts = load(path, shots=2)
    assert [prompt.line for prompt in prompts] == [2, *range(4, 10)]
    plain, question, *_ = prompts
    assert plain.text == "plain"
    assert question.text is not None
    assert question.text.startswith(
        "Question: What is 0 + 0?\nAnswer: It is <<0+0>>.\n#### 0\n\nQuestion: What is 1 + 1?"
    )
    assert question.text.endswith("\n\nQuestion: What is 2 + 2?\nAnswer:")
    assert question.stop == ("\nQuestion:",)
    assert len(load(path, shots=2, limit=3)) == 3


def test_too_many_shots_are_refused(tmp_path: Path) -> None:
    """A file whose questions would all be examples has nothing to ask."""
    with pytest.raises(CompareError, match=r"--shots 8 leaves none of the 8 questions"):
        load(written(tmp_path, *QUESTIONS), shots=8)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"prompt": "cut', "not JSON"),
        ('{"prompt": "x", "n": ' + "[" * 100_000, "nested too deeply"),
        ('{"prompt": "x", "n": ' + "9" * 5000 + "}", "not JSON"),
        ("17", "neither text nor an object"),
        ("[1, 2]", "neither text nor an object"),
        ('{"prmpt": "x"}', 'needs one of "prompt", "text", "input_ids", "question"; it has none of them'),
        ('{"prompt": "x", "text": "y"}', "it has prompt, text"),
        ('{"prompt": ""}', "or is empty"),
        ('{"input_ids": []}', "or is empty"),
        ('{"input_ids": [1, -2]}', "neither text nor a list of token ids"),
        ('{"input_ids": [1, true]}', "neither text nor a list of token ids"),
        ('{"input_ids": "text"}', "neither text nor a list of token ids"),
        ('{"text": [1, 2]}', "neither text nor a list of token ids"),
        ('{"prompt": "x", "max_new_tokens": 0}', '"max_new_tokens" is 0'),
        ('{"question": "x"}', '"answer" is missing'),
        ('{"question": "", "answer": "1"}', '"question" is no text'),
        ('{"question": "x", "answer": "none"}', '"answer" has no number'),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: str, said: str) -> None:
    """The file, the line's number and what is wrong with it."""
    path = written(tmp_path, '"fine"', line)
    with pytest.raises(CompareError) as refused:
        load(path)
    assert f"{path}:2: " in str(refused.value)
    assert said in str(refused.value)


def test_all_wrong_lines_come_in_one_message(tmp_path: Path) -> None:
    """The first five with their numbers, the rest as a count."""
    with pytest.raises(CompareError) as refused:
        load(written(tmp_path, *["nonsense"] * 7))
    assert [f":{n}:" in str(refused.value) for n in range(1, 8)] == [True] * 5 + [False] * 2
    assert str(refused.value).endswith("and 2 more lines")


def test_a_file_without_prompts_is_refused(tmp_path: Path) -> None:
    """Empty, blank, missing, or no text at all."""
    with pytest.raises(CompareError, match="holds no prompts"):
        load(written(tmp_path))
    with pytest.raises(CompareError, match="holds no prompts"):
        load(written(tmp_path, "", "  "))
    with pytest.raises(CompareError, match=r"cannot read .*No such file"):
        load(tmp_path / "missing")
    (tmp_path / "binary").write_bytes(b'"\xff\xfe"\n')
    with pytest.raises(CompareError, match="not UTF-8"):
        load(tmp_path / "binary")


def test_a_line_may_hold_the_line_ends_of_other_alphabets(tmp_path: Path) -> None:
    """U+2028 inside a JSON string does not end the line."""
    path = tmp_path / "prompts.jsonl"
    path.write_text('"one\u2028line"\n"two"\n', encoding="utf-8")
    assert [prompt.line for prompt in load(path)] == [1, 2]


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("so 5 and 6 make\n#### 11", "11"),
        ("#### 11 and then 12", "11"),
        ("#### 1 is wrong, #### 2", "2"),
        ("it is $1,234.50.", "1234.5"),
        ("between 10-5", "5"),
        ("it is -5.", "-5"),
        ("42.0", "42"),
        ("no number", None),
        ("", None),
        ("5 ####", None),
    ],
)
def test_the_final_number(text: str, number: str | None) -> None:
    """Behind the last mark, else the last one; separators and trailing zeros do not count."""
    assert final_number(text) == number


@given(st.integers(-(10**12), 10**12))
def test_an_integer_reads_the_same_in_every_spelling(value: int) -> None:
    """Plain, with separators, with a decimal point of zeros."""
    assert {final_number(f"It is {spelt}.") for spelt in (str(value), f"{value:,}", f"{value:,}.00")} == {str(value)}


def test_the_digest_tells_prompts_and_settings_apart(tmp_path: Path) -> None:
    """The same file in the same way has one digest; another limit, length or number of shots has another."""
    path = written(tmp_path, *QUESTIONS)
    same = digest(load(path))
    assert digest(load(path)) == same
    others = [load(path, limit=1), load(path, new_tokens=7), load(path, shots=4)]
    assert len({same, *map(digest, others)}) == 4
