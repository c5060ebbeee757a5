"""No secret leaves the machine, and figures do."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts.collect.scrub import is_secret_name, known_secrets, scrub, scrub_data

ENVIRON = {
    "API_KEY": "local-key-1",
    "HF_TOKEN": "hf-token-2",
    "MY_DB_PASSWORD": "pass word 3",
    "MAX_TOTAL_TOKENS": "131072",
    "DYNCHUNK_BUDGET": "2e8",
    "EXTRA_ARGS": "--admin-api-key admin-key-4 --ssl-keyfile-password=ssl-pass-5 --enable-metrics",
}
SECRETS = {"local-key-1", "hf-token-2", "pass word 3", "admin-key-4", "ssl-pass-5"}


def test_known_secrets() -> None:
    """By the names of variables and flags; counts of tokens are none."""
    assert known_secrets(ENVIRON) == SECRETS


def test_quotes_that_do_not_match() -> None:
    """What cannot be told apart is hidden whole."""
    assert known_secrets({"EXTRA_ARGS": "--api-key 'x y"}) == {"--api-key 'x y"}


@pytest.mark.parametrize(
    "text",
    [
        "Authorization: Bearer abc.def-123",
        "token hf_abcdefghijklmnopqrstuv",
        "sk-abcdefghijklmnopqrstuvwx",
        "http://user:secret-pw@10.0.0.1:3128/x",
        "{'api_key': 'abc.def-123', 'port': 1}",
        '"admin_api_key": "abc.def-123"',
        "server_args=ServerArgs(model_path='/m', api_key='abc.def-123', port=30000)",
        "export OPENAI_API_KEY=abc.def-123",
        "--api-key abc.def-123 --port 1",
        "--api-key=abc.def-123",
    ],
)
def test_what_looks_like_a_secret(text: str) -> None:
    """In headers, URLs, JSON, Python's own notation, shells and command lines, known or not."""
    shown = scrub(text, [])
    assert "***" in shown
    for secret in ("abc.def-123", "hf_abcdef", "sk-abcdef", "secret-pw"):
        assert secret not in shown


@pytest.mark.parametrize(
    "text",
    [
        "MAX_TOTAL_TOKENS = 131,072  (default)",
        "#new-token: 2048, #cached-token: 0, token usage: 0.12",
        "dynchunk [pid 7, pp0tp0]: request 5f3: prefill of 48,000 tokens, 3,453 tokens/s",
        'dynchunk_batch_rows{model_name="m",tp_rank="0"} 1024.0',
        '{"rows": 512, "tokens_per_s": 3453.2, "keys": 100000}',
        "http://127.0.0.1:30000/server_info",
    ],
)
def test_figures_stay(text: str) -> None:
    """A report without its figures would help nobody."""
    assert scrub(text, SECRETS) == text


def test_members_of_json() -> None:
    """Wherever they are; None says that no key was set, which is worth knowing."""
    data = {"api_key": "k", "admin_api_key": None, "list": [{"hf_token": "t"}], "n": 3, "text": "x local-key-1 y"}
    shown = scrub_data(data, SECRETS)
    assert shown == {
        "api_key": "***",
        "admin_api_key": None,
        "list": [{"hf_token": "***"}],
        "n": 3,
        "text": "x *** y",
    }


@given(st.text("abcxyz012", min_size=4), st.text(), st.text())
def test_a_known_secret_is_gone_wherever_it_stands(secret: str, before: str, after: str) -> None:
    """Also inside of words and beside itself, and in what JSON makes of it."""
    text = before + secret + after
    assert secret not in scrub(text, [secret])
    assert secret not in json.dumps(scrub_data({"text": [text]}, [secret]), ensure_ascii=False)


def test_names() -> None:
    """A member called `key` holds one, `keys` of a cache counted as well to be safe, `tokenizer_path` does not."""
    assert [n for n in ("api_key", "token", "HF-TOKEN", "tokenizer_path", "max_tokens") if is_secret_name(n)] == [
        "api_key",
        "token",
        "HF-TOKEN",
    ]
