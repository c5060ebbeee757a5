"""No secret leaves the machine, and figures do."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynchunk.settings import PREFIX, Settings, env_name, knob_fields
from launcher.redaction import is_secret_name
from scripts.collect.scrub import known_secrets, scrub, scrub_data, scrub_json

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
        "server_args=ServerArgs(tokenizer_path='/m', max_total_num_tokens=140000, api_key=None, admin_api_key='')",
        "[2026-11-29 10:00:06] Prefill batch, #new-token: 2048, input throughput (token/s): 17481.61",
        "dynchunk [pid 7]: rows x keys: 5e9, one of prefill, 12 tokens, DYNCHUNK_INDEXER=keys",
        "API_KEY = not set  (default)",
        "API_KEY = set, not shown  (given)",
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
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
    assert secret not in scrub_json(json.dumps({"text": [text]}), [secret])


HEADERS = """\
X-API-Key: S3cret
x-api-key:S3cret
Authorization: Basic S3cret
Authorization: S3cret
> Proxy-Authorization: Digest username="S3cret", response="S3cret"
curl -H "Authorization: Basic S3cret" -H 'X-API-Key: S3cret S3cret' http://h
api_key: S3cret
token: S3cret
server-1  | password: S3cret, S3cret S3cret
Cookie: a=S3cret; b=S3cret
headers=[(b'authorization', b'Bearer S3cret'), (b'x-api-key', b'S3cret S3cret')]"""
COMMANDS = """\
['--api-key', 'S3cret', '--port', '1']
["--api-key","S3cret"]
['--api-key', "S3cret'S3cret S3cret", 1]
['python', '--admin-api-key=S3cret S3cret', '--x']
--api-k S3cret --port 1
--api-key 'S3cret S3cret' --port 1
env HF_TOKEN='S3cret'"'"'s S3cret' sh
docker run -eHF_TOKEN=S3cret -e MY_PASSWORD=S3cret "--env=HF_TOKEN=S3cret S3cret" x"""
MEMBERS = """\
{"api_key": 50912345099}
{"api_key":["S3cret"]}
{"api_key": ["S3]cret", {"S": "S3cret"}], "n": 1}
{"accessKey": ["S3cret"]}
a log of {\\"token\\": \\"S3cret\\", \\"n\\": 1}
a log of {\\"token\\": \\"S3cret\\\\\\" S3cret\\"}
{"api_key": "S3cret\\"S3cret"}
{'password': b'S3cret S3cret', 'n': 1}"""
ASSIGNMENTS = """\
OPENAI_APIKEY=S3cret
DB_PASS=S3cret
- DB_PASS=S3cret S3cret
f(apiKey=S3cret, n=1)
api_key='S3cret,S3cret,x'
ServerArgs(admin_api_key='S3cret S3cret', port=1)
os.environ["API_KEY"] = "S3cret"
GET /x?token=S3cret&n=1
AWS_ACCESS_KEY_ID=S3cret"""
SHAPES = """\
redis://:S3cret@host
http://user:S3cret@S3cret@host/x
NCCL_X=redis://:S3cret/S3cret?S3cret@h
nvapi-S3cret1234567890
ghs_S3cret1234567890
gho_S3cret1234567890
github_pat_S3cret1234567890
hf_S3cret1234567890
sk-proj-S3cret1234567890
eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiJS3cretIn0.S3cret-_x
AKIAS3CRET1234567890
-----BEGIN RSA PRIVATE KEY-----S3cret-----END RSA PRIVATE KEY-----"""


@pytest.mark.parametrize("text", f"{HEADERS}\n{COMMANDS}\n{MEMBERS}\n{ASSIGNMENTS}\n{SHAPES}".splitlines())
def test_no_part_of_a_secret_is_left(text: str) -> None:
    """However it is written, whatever is in it, in the middle of a text too; a second time nothing changes."""
    shown = scrub(f"first\n{text}\nlast", [])
    assert shown.startswith("first\n")
    assert shown.endswith("\nlast")
    assert "***" in shown
    assert "cret" not in shown.lower().replace("secret", "")
    assert "50912345099" not in shown
    assert scrub(shown, []) == shown


def test_lists_and_figures_of_json() -> None:
    """A command line in a list, a key that is a number, a known secret among figures; counts of keys stay."""
    data = {
        "argv": ["--api-key", "S", "--port", 1],
        "api_key": 509,
        "n": 12345,
        "keys": 100_000,
        "auth": ["S"],
        "x": 1.5,
    }
    assert json.loads(scrub_json(json.dumps(data), {"12345"})) == {
        "argv": ["--api-key", "***", "--port", 1],
        "api_key": "***",
        "n": "***",
        "keys": 100_000,
        "auth": "***",
        "x": 1.5,
    }


def test_rows_of_json_and_what_is_none() -> None:
    """Each line by itself."""
    assert scrub_json('{"api_key": "S", "n": 1}\n{"n": 2}\nno answer, token=S\n', []) == (
        '{"api_key": "***", "n": 1}\n{"n": 2}\nno answer, token=***\n'
    )


@pytest.mark.parametrize("depth", [50, 400, 100_000])
def test_deep_json_keeps_no_secret(depth: int) -> None:
    """However deep, and whether or not it can be read as JSON."""
    text = "[" * depth + '{"api_key": "S46b"}' + "]" * depth
    for written in (text, text + "\n" + text):
        shown = scrub_json(written, [])
        assert "S46b" not in shown
        assert "***" in shown


def test_secrets_in_a_list_of_extra_args() -> None:
    """Each is known, so that it is found elsewhere too; what a switch says is none."""
    environ = {"EXTRA_ARGS": """--x '{"accessKey": ["S46b", 12345], "n": 1}'""", "A_KEY": "true", "PWD": "/work"}
    assert known_secrets(environ) == {"S46b", "12345"}


@pytest.mark.parametrize("piece", ["\\", "a", "key=", "key: ", "token='", "key=[", "--", "eyJabcdefg.", "://a", '"x" '])
def test_a_long_line_takes_no_long_time(piece: str) -> None:
    """Nothing is tried again from every character on."""

    def cpu_s(characters: int) -> float:
        began_s = time.process_time()
        scrub(piece * (characters // len(piece)), [])
        return time.process_time() - began_s

    # 25 times as long a line: 25 times the work, or 625 times where every character begins it anew.
    assert cpu_s(50_000) < 125 * min(cpu_s(2_000) for _ in range(5))


def test_names() -> None:
    """Whole words of a name count, and those written together; what is counted, a path and our settings are none."""
    secret = "api_key token HF-TOKEN OPENAI_APIKEY DB_PASS SGLANG_AUTH apiKey X-API-Key PGPASSWORD TOKEN_2 SECRET_NAME"
    open_ = (
        "tokenizer_path max_tokens tokens passed bypass author HF_TOKENIZER keyboard SGLANG_NEW_TOKEN_RATIO token_ids"
    )
    ours = [env_name(f, PREFIX) for f in knob_fields(Settings)]
    assert [name for name in secret.split() if not is_secret_name(name)] == []
    assert [name for name in [*open_.split(), *ours] if is_secret_name(name)] == []
