"""The report's folder: what is measured reaches the disk while it is measured, and nothing there is overwritten.

The first run of a folder is run.json and samples.jsonl, the second run-2.json and samples-2.jsonl, and so on.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dynchunk import values as json_values
from dynchunk.shortened import shortened
from scripts.verify.decide import PHASES, RAMP, Sample
from scripts.verify.errors import RecordError
from scripts.verify.results import LARGEST, Run, from_json, to_json

RUN_GLOB = "run*.json"
_SYNC_S = 2.0
# Field of a sample -> its name in a file.
_NAMES = {
    "t_s": "t",
    "available_bytes": "mem_available_bytes",
    "free_bytes": "mem_free_bytes",
    "swap_in_pages": "swap_in",
    "psi_full_avg10": "psi_full_avg10",
    "kernel_oom": "kernel_oom",
    "running": "running",
    "phase": "phase",
    "host_available_bytes": "host_mem_available_bytes",
}
_MOST_RUNS = 1_000


def new_folder(logs: Path, date: str, kind: str = "profile") -> Path:
    """Make logs/KIND-DATE, or the first of -2, -3, ... that is not there yet."""
    for number in range(1, _MOST_RUNS):
        folder = logs / (f"{kind}-{date}" if number == 1 else f"{kind}-{date}-{number}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise RecordError(f"cannot make {folder}: {error.strerror}; name another folder with --out") from None
        return folder
    raise RecordError(f"{logs} holds {_MOST_RUNS:,} reports of {date}; name another folder with --out")


def named_folder(folder: Path) -> Path:
    """Make the folder of --out, or take it if it is empty."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        taken = any(folder.iterdir())
    except OSError as error:
        raise RecordError(f"cannot make {folder}: {error.strerror}") from None
    if taken:
        raise RecordError(f"{folder} is not empty; --append {folder} adds a run to a report, --out wants a new folder")
    return folder


def load(folder: Path) -> list[Run]:
    """The runs of a report, in the order they were made. Raises RecordError where there is none or one is broken."""
    files = sorted(folder.glob(RUN_GLOB), key=lambda path: _number(path.stem))
    if not files:
        raise RecordError(f"{folder} holds no run.json; is it a folder that memguard wrote?")
    return [_load_run(file) for file in files]


def load_named(path: Path) -> list[Run]:
    """The runs of a report by its folder, or one of them by its run.json. Raises RecordError as `load` does."""
    return [_load_run(path)] if path.is_file() else load(path)


def sample_to_json(sample: Sample) -> dict[str, Any]:
    """As a line of samples.jsonl, and of any file that `--replay` takes. What is not known is left out."""
    values = sample._asdict() | {"t_s": round(sample.t_s, 3)}
    return {name: values[key] for key, name in _NAMES.items() if values[key] is not None}


def sample_from_json(values: Any) -> Sample:
    """The sample of such a line. Raises ValueError on anything else."""
    if not isinstance(values, dict):
        raise ValueError("not an object")  # noqa: TRY004 - the caller has one case
    # Reports of the first version had the names of the fields.
    given: dict[str, Any] = {key: values.get(name, values.get(key)) for key, name in _NAMES.items()}
    given = {"free_bytes": 0} | {key: value for key, value in given.items() if value is not None}
    missing = [_NAMES[key] for key in ("t_s", "available_bytes") if key not in given]
    if missing:
        raise ValueError(f"{' and '.join(missing)} missing")
    phase = given.get("phase", RAMP)
    if phase not in PHASES:
        raise ValueError(f"phase {phase!r} is none of {', '.join(PHASES)}")
    for key, value in given.items():
        if key != "phase" and (
            isinstance(value, bool) or not isinstance(value, (int, float)) or not -LARGEST < value < LARGEST
        ):
            raise ValueError(f"{_NAMES[key]} is {shortened(repr(value))}, which is no number")
    return Sample(**given)


def load_samples(folder: Path, run: Run) -> list[Sample]:
    """The memory readings of a run; a last line that was cut off is left out."""
    try:
        lines = (folder / run.samples_file).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    return [sample for sample in map(_load_sample, lines) if sample is not None]


class Recorder:
    """Writes one run into a folder."""

    def __init__(self, folder: Path) -> None:
        suffix = _free_suffix(folder)
        self.folder = folder
        self.samples_file = f"samples{suffix}.jsonl"
        self._run_path = folder / f"run{suffix}.json"
        self._written = 0
        self._synced_s = time.monotonic()
        try:
            # Unbuffered: what a full disk did not take must not come up again when the file is closed.
            self._samples = (folder / self.samples_file).open("xb", buffering=0)
        except OSError as error:
            raise self._full(folder / self.samples_file, error) from None

    def close(self) -> None:
        """Nothing is recorded any more."""
        self._samples.close()

    def samples(self, samples: Sequence[Sample]) -> None:
        """Append the readings that are new since the last call."""
        new = samples[self._written : len(samples)]
        data = "".join(json.dumps(sample_to_json(sample), separators=(",", ":")) + "\n" for sample in new).encode()
        try:
            while data:
                data = data[self._samples.write(data) or 0 :]
            if time.monotonic() - self._synced_s > _SYNC_S:
                os.fsync(self._samples.fileno())  # a host that freezes loses what only the page cache holds
                self._synced_s = time.monotonic()
        except OSError as error:
            raise self._full(self.folder / self.samples_file, error) from None
        self._written += len(new)

    def run(self, run: Run) -> None:
        """Write the run as it stands; the file before stays whole until the new one is."""
        temporary = self._run_path.with_suffix(".tmp")
        try:
            with temporary.open("w") as file:
                file.write(_one_line_a_list(json.dumps(to_json(run), indent=1)) + "\n")
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(self._run_path)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise self._full(self._run_path, error) from None

    @staticmethod
    def _full(path: Path, error: OSError) -> RecordError:
        return RecordError(f"cannot write {path}: {error.strerror}; make room there or name another folder with --out")


def _load_run(file: Path) -> Run:
    try:
        return from_json(json_values.parsed(file.read_text(encoding="utf-8")))
    except OSError as error:
        raise RecordError(f"cannot read {file}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise RecordError(f"{file} is not a run of this memguard ({error})") from None


def _load_sample(line: str) -> Sample | None:
    try:
        return sample_from_json(json_values.parsed(line))
    except ValueError:
        return None


def _free_suffix(folder: Path) -> str:
    for number in range(1, _MOST_RUNS):
        suffix = "" if number == 1 else f"-{number}"
        if not (folder / f"run{suffix}.json").exists() and not (folder / f"samples{suffix}.jsonl").exists():
            return suffix
    raise RecordError(f"{folder} holds {_MOST_RUNS:,} runs; name another folder with --out")


def _one_line_a_list(text: str) -> str:
    """Thousands of chunks are easier to read with a line each."""
    return re.sub(r"\[\s+([-\d.,\s]+?)\s+\]", lambda match: f"[{' '.join(match[1].split())}]", text)


def _number(stem: str) -> int:
    number = stem.partition("-")[2]
    return int(number) if number.isdecimal() else 1
