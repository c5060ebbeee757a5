"""Hold the contracts against an engine's source files, without importing the engine or torch.

`python -m dynchunk.patches.check [FOLDER]`: FOLDER is an unpacked wheel or a site-packages; by default the engine
this Python would import. Exit code 1 when a contract is not met. The image build ends with it.
"""

from __future__ import annotations

import sys
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from dynchunk.contract import Contract, read_source
from dynchunk.patches.contracts import CONTRACTS, INDEXER_CONTRACTS


def problems_of(site_folder: Path) -> list[str]:
    """What is wrong with the engine under `site_folder` (the folder that holds `sglang/`): a sentence a contract."""
    problems = []
    for module, contracts in required(site_folder).items():
        path = _path(site_folder, module)
        if not path.is_file():
            problems += [f"{module}: no such module, so no {contract.target}" for contract in contracts]
            continue
        functions = read_source(path.read_text(encoding="utf-8"))
        for contract in contracts:
            problem = contract.problem(functions.get(contract.target))
            if problem:
                problems.append(f"{module}: {problem}")
    return problems


def required(site_folder: Path) -> dict[str, tuple[Contract, ...]]:
    """What is held against this engine, by module. Of the indexer's, what it has a module and a class for."""
    held = dict(CONTRACTS)
    for module, contracts in INDEXER_CONTRACTS.items():
        if (path := _path(site_folder, module)).is_file():
            text = path.read_text(encoding="utf-8")
            owners = [(contract, contract.target.rpartition(".")[0]) for contract in contracts]
            held[module] = tuple(contract for contract, owner in owners if f"class {owner}:" in text or not owner)
    return held


def _path(site_folder: Path, module: str) -> Path:
    return site_folder.joinpath(*module.split(".")).with_suffix(".py")


def engine_folder() -> Path:
    """Where this Python finds SGLang. Raises LookupError when it does not."""
    spec = find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        raise LookupError("sglang is not installed for " + sys.executable)
    return Path(spec.submodule_search_locations[0]).parent


def engine_version(site_folder: Path) -> str:
    """The version of the engine under `site_folder`, from the package metadata beside it.

    An editable install has its metadata elsewhere: there it is the version that this Python knows.
    """
    for found in metadata.distributions(name="sglang", path=[str(site_folder)]):
        return found.version
    try:
        return metadata.version("sglang") if site_folder == engine_folder() else "unknown"
    except (LookupError, metadata.PackageNotFoundError):
        return "unknown"


def main(argv: list[str]) -> int:
    """Print what is not met; 0 if every contract is met."""
    try:
        folder = Path(argv[0]) if argv else engine_folder()
    except LookupError as error:
        sys.stdout.write(f"dynchunk: {error}\n")
        return 1
    if not (folder / "sglang" / "srt").is_dir():
        inside = f"; it is in {folder.parent}" if (folder / "srt").is_dir() and folder.name == "sglang" else ""
        sys.stdout.write(f"dynchunk: there is no sglang in {folder}{inside}; name the folder that holds sglang/\n")
        return 1
    problems = problems_of(folder)
    total = sum(len(contracts) for contracts in required(folder).values())
    for problem in problems:
        sys.stdout.write(f"dynchunk: not met: {problem}\n")
    sys.stdout.write(f"dynchunk: sglang {engine_version(folder)}: {total - len(problems)} of {total} contracts met\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
