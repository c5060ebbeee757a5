"""`python -m dynchunk.patches.check FOLDER`: a folder without an engine is no engine with a few contracts missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from dynchunk.patches import check
from dynchunk.patches.contracts import CONTRACTS
from tests.conftest import fake_source


@pytest.mark.parametrize("made", [None, "", "sglang"])
def test_a_folder_without_an_engine(tmp_path: Path, capsys: pytest.CaptureFixture[str], made: str | None) -> None:
    """Whether it does not exist, is empty or holds an empty `sglang`: one line that says so, exit code 1."""
    folder = tmp_path / "site"
    if made is not None:
        (folder / made).mkdir(parents=True)
    assert check.main([str(folder)]) == 1
    said = capsys.readouterr().out
    assert said == f"dynchunk: there is no sglang in {folder}; name the folder that holds sglang/\n"


def test_the_package_itself_is_not_the_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The natural mistake, one folder too deep, is answered with the right one."""
    (tmp_path / "sglang" / "srt").mkdir(parents=True)
    assert check.main([str(tmp_path / "sglang")]) == 1
    assert f"it is in {tmp_path};" in capsys.readouterr().out


def test_a_missing_module_counts_with_all_its_contracts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With one module of the engine there, only its contracts are met."""
    total = sum(len(contracts) for contracts in CONTRACTS.values())
    module, contracts = max(CONTRACTS.items(), key=lambda item: len(item[1]))
    path = tmp_path.joinpath(*module.split(".")).with_suffix(".py")
    path.parent.mkdir(parents=True)
    path.write_text(fake_source(module))
    assert check.main([str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert f"{len(contracts)} of {total} contracts met" in said
    assert said.count("no such module") == total - len(contracts)
