"""The command that a report shows, without the secrets of what it starts."""

from __future__ import annotations

import shlex

import pytest

from scripts.verify.redact import redacted_command


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        (
            "--launch -- env HF_TOKEN=S70tok MY_PASSWORD=S71 sh -c false",
            "--launch -- env HF_TOKEN=*** MY_PASSWORD=*** sh -c false",
        ),
        (
            "--launch -- docker run -e DB_PASS=S1 --env=API_KEY=S2 i",
            "--launch -- docker run -e DB_PASS=*** --env=API_KEY=*** i",
        ),
        ("--launch -- x hf_S123456789abcdef redis://:S@h", "--launch -- x *** redis://***@h"),
        ('--launch -- ./serve --json \'{"accessKey": ["S"]}\'', '--launch -- ./serve --json \'{"accessKey": "***"}\''),
        ("--launch -- env A=b ./dynchunk serve", "--launch -- env A=b ./dynchunk serve"),
    ],
)
def test_what_is_started_is_shown_without_its_secrets(given: str, shown: str) -> None:
    """In variables, flags, JSON and URLs, and by their shape; the rest as typed."""
    assert shlex.split(redacted_command("memguard", shlex.split(given), None)) == ["memguard", *shlex.split(shown)]
