"""The profiles: settings that serve takes without a word, on every host they are meant for."""

from __future__ import annotations

import re
import subprocess

import pytest

from dynchunk.policy.budget import last_prefix_within
from launcher import serve
from launcher.setting import Setting
from scripts.doctor.settings_checks import read as read_settings
from scripts.doctor.verdict import Level
from tests.conftest import ROOT, clean_environ
from tests.launcher import profiles


def setting_of(environ: dict[str, str]) -> Setting:
    setting, checks = read_settings(environ)
    assert setting is not None
    assert [check.reason for check in checks if check.level is not Level.OK] == []
    return setting


def test_the_machines_people_have() -> None:
    """A profile for each kind of machine, and a line for each in the overview."""
    assert profiles.NAMES == ["gb10-tp3", "gb10-tp4", "hopper-tp8", "sm120-tp4"]
    overview = (profiles.IMAGES / "PROFILES.md").read_text()
    for name in profiles.NAMES:
        chunk, budget = (profiles.plain(name)[key] for key in ("CHUNKED_PREFILL_SIZE", "DYNCHUNK_BUDGET"))
        [row] = [line for line in overview.splitlines() if line.startswith(f"| [{name}]({name}/env)")]
        assert row.endswith(f"| {int(chunk):,}, {budget} |")


@pytest.mark.parametrize("name", profiles.NAMES)
def test_serve_dry_run(name: str) -> None:
    """`./dynchunk serve --dry-run --env-file ...` shows the engine's command, with no warning."""
    done = subprocess.run(
        [ROOT / "dynchunk", "serve", "--dry-run", "--env-file", profiles.file(name)],
        env=clean_environ(**profiles.HOST),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    # Where no Python here has SGLang, as in a clone without it, a dry run says so last.
    lines = [line for line in done.stdout.splitlines() if "SGLang is in none" not in line]
    for flag in ("--tp-size", "--chunked-prefill-size", "--context-length", "--enable-metrics"):
        assert flag in lines[-1]
    assert [line for line in lines if line.startswith("warning")] == []


@pytest.mark.parametrize("name", profiles.NAMES)
def test_the_floor_keeps_the_budget_over_the_whole_context(name: str) -> None:
    """No prompt that a profile admits is outside its budget."""
    setting = setting_of(profiles.plain(name))
    limits = setting.limits()
    assert limits is not None
    assert last_prefix_within(limits) >= setting.launch.context_length


@pytest.mark.parametrize("name", profiles.NAMES)
def test_context_parallel_prefill_is_counted_per_rank(name: str) -> None:
    """The opt-in lines divide the rows by cp_size, so chunk and budget are cp_size times those of the profile."""
    plain, opted = setting_of(profiles.plain(name)), setting_of(profiles.context_parallel(name))
    assert plain.context_parallel == 1
    assert opted.context_parallel == opted.launch.tp_size
    assert opted.settings.budget == plain.settings.budget * opted.context_parallel
    assert opted.chunk == plain.chunk * opted.context_parallel


@pytest.mark.parametrize("name", profiles.NAMES)
def test_every_value_has_a_reason(name: str) -> None:
    """A comment before each setting, sources named, lines that a reader sees whole."""
    text = profiles.file(name).read_text()
    assert re.search(r"^# Sources\. ", text, re.MULTILINE)
    head, _, body = text.partition("\n\n")
    sources = set(re.findall(r"\[(\w+)\]: ", head))
    assert set(re.findall(r"\[(\w+)\]", text)) == sources
    # The machines are what the profile is named after.
    settings = [block for block in body.split("\n\n") if not block.startswith("TP_SIZE=")]
    assert [block for block in settings if not block.startswith("#")] == []
    assert [line for line in text.splitlines() if len(line) > 120 and "EXTRA_ARGS" not in line] == []


def test_files_serve_docker_as_well() -> None:
    """`docker run --env-file` takes values as they stand, so there are neither quotes nor comments behind them."""
    for name in profiles.NAMES:
        for line in profiles.file(name).read_text().splitlines():
            if line and not line.startswith("#"):
                assert re.fullmatch(r"[A-Z_]+=[^'\"#$]+", line), line


def test_the_commands_in_the_overview() -> None:
    """What it tells to type exists."""
    assert serve.plan(profiles.plain("hopper-tp8")).argv
    overview = (profiles.IMAGES / "PROFILES.md").read_text()
    for path in re.findall(r"docker-images/[\w-]+/env|compose[\w.]*\.yaml", overview):
        assert (ROOT / path).is_file()
