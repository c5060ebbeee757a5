"""The launcher's table of flags against the engines' own, read as text."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from launcher import environment, flags, redaction
from scripts.engine_wheels import VERSIONS, unpacked


@pytest.fixture(scope="session", params=VERSIONS)
def declared(request: pytest.FixtureRequest) -> dict[str, list[str]]:
    """Every flag of one version with its aliases, from the annotations of its argument classes."""
    found: dict[str, list[str]] = {}
    for path in sorted(Path(unpacked(request.param), "sglang/srt/arg_groups/fields").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                keywords = [k for k in ast.walk(node.annotation) if isinstance(k, ast.keyword)]
                if any(k.arg == "no_cli" for k in keywords):
                    continue
                names = [k.value.value for k in keywords if k.arg == "cli_name" and isinstance(k.value, ast.Constant)]
                aliases = [ast.literal_eval(k.value) for k in keywords if k.arg == "aliases"]
                flag = str(names[0]) if names else "--" + node.target.id.replace("_", "-")
                found[flag] = [alias for group in aliases for alias in group]
    return found


def test_every_flag_of_ours_is_the_engines(declared: dict[str, list[str]]) -> None:
    """Each variable's flag exists, and every other name for it is in the table of aliases."""
    for flag in environment.VARIABLES:
        assert flag in declared
        assert [alias for alias in declared[flag] if environment.ALIASES.get(alias) != flag] == []


def test_no_flag_of_the_engines_is_the_beginning_of_ours(declared: dict[str, list[str]]) -> None:
    """Such a flag could not be given in EXTRA_ARGS: it would be taken for a shortened one of ours."""
    ours = [*environment.VARIABLES, *environment.ALIASES]
    theirs = {name for flag, aliases in declared.items() for name in (flag, *aliases)} - set(ours)
    assert len(theirs) > 300
    assert {name: meant for name in theirs if (meant := flags.could_mean(name, ours))} == {}


def test_flags_that_carry_a_secret_are_hidden(declared: dict[str, list[str]]) -> None:
    """Whatever the engine calls a key, a password or a token is not shown; the table names those it has."""
    secret = [flag for flag in declared if flag.endswith(("key", "password", "secret"))]
    assert set(secret) == set(redaction.SECRET_FLAGS)
    for flag in secret:
        assert redaction.without_secrets([flag, "s3cret"]) == [flag, "***"]
