"""The stock engine's answers, asked once for each engine, model and flags, and kept in .cache/stock.

Whoever is first asks all of them, of one server; the others read. test_off.py asks in every run and holds what is kept
against that.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import json
import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.console import Console

from scripts import reference
from scripts.reference import Server
from scripts.verify import compare
from tests.engine import asks, traffic
from tests.engine.warm import serving

FOLDER = reference.ROOT / ".cache" / "stock"
ANSWERS, RECORD = "answers.json", "record.jsonl"


def answers() -> dict[str, dict[str, Any]]:
    """What the stock engine answers to everything in `asks`, by request id."""
    return read_answers(_kept())


def record() -> Path:
    """The stock engine's answers to the many prompts of `asks`, as `compare --record` writes them."""
    return _kept() / RECORD


def read_answers(folder: Path) -> dict[str, dict[str, Any]]:
    """The answers that `ask_everything` wrote."""
    found: dict[str, dict[str, Any]] = json.loads((folder / ANSWERS).read_text(encoding="utf-8"))
    return found


@contextlib.contextmanager
def serving_stock(folder: Path) -> Iterator[Server]:
    """A server without DynChunk, and the engine's log and trace in `folder`."""
    with serving(folder, *asks.STATIC, DYNCHUNK_MODE="off") as server:
        yield server


def ask_everything(server: Server) -> Path:
    """Ask a stock server all that is ever compared with. -> a new folder with what it said."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=FOLDER))
    questions = asks.write_many(made / "prompts.jsonl")
    options = compare.Options(questions, a=server.url, record=made / RECORD)
    assert compare.run(options, Console(file=io.StringIO(), width=200)) == 0
    said = {ask.rid: traffic.answer(server, ask) for ask in asks.EVERY}
    # Hundreds of steps each; together they take as many as one.
    said |= traffic.answer_all(server, asks.GROWING)
    (made / ANSWERS).write_text(json.dumps(said), encoding="utf-8")
    return made


@contextlib.contextmanager
def only_one() -> Iterator[None]:
    """One process at a time asks; the kernel lets the next one in, however this one ends."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def kept_in() -> Path:
    """The folder for this engine, model, flags and set of questions."""
    said = [*(f"{name} {metadata.version(name)}" for name in ("sglang", "torch", "transformers")), *asks.STATIC]
    digest = hashlib.sha256("\n".join(said).encode())
    for file in (reference.make_model() / "model.safetensors", Path(asks.__file__), Path(__file__)):
        digest.update(file.read_bytes())
    return FOLDER / digest.hexdigest()[:16]


def _kept() -> Path:
    kept = kept_in()
    if not kept.is_dir():
        with only_one():
            if not kept.is_dir():
                with tempfile.TemporaryDirectory() as folder, serving_stock(Path(folder)) as server:
                    ask_everything(server).rename(kept)
    return kept
