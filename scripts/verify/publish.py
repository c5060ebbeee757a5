"""Writes REPORT.md and the plots of a folder from the data in it."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import NamedTuple

from scripts.verify.errors import RecordError
from scripts.verify.records import load, load_samples
from scripts.verify.report import render

REPORT = "REPORT.md"
_MARK = "\n<!-- memguard {}: when this folder is drawn again, an edited report is kept beside the new one -->\n"


class Published(NamedTuple):
    """The plots that were drawn, and sentences for the operator."""

    plot_files: list[str]
    remarks: list[str]


def publish(folder: Path) -> Published:
    """Draw what can be drawn, write the report. Raises RecordError where a folder has no runs or cannot be written."""
    runs = load(folder)
    plot_files: list[str] = []
    remarks = []
    try:
        from scripts.verify import figures
    except Exception as error:  # missing, or broken by another package: the report must come all the same
        remarks.append(
            f"Plots were not drawn: matplotlib cannot be imported ({error}). `python -m pip install matplotlib`, then "
            "`python -m scripts.verify.plots FOLDER` draws them from the data in this folder."
        )
    else:
        try:
            plot_files = figures.draw(folder, [(run, load_samples(folder, run)) for run in runs])
        except OSError as error:
            remarks.append(f"Plots were not drawn: cannot write into the folder ({error.strerror}).")
    path = folder / REPORT
    text = render(runs, plot_files, remarks)
    try:
        kept = _keep_edited(path)
        path.write_text(text + _MARK.format(_digest(text)))
    except OSError as error:
        raise RecordError(f"cannot write {path}: {error.strerror}") from None
    if kept is not None:
        remarks.append(f"The former {REPORT} had been edited; it is kept as {kept.name}.")
    return Published(plot_files, remarks)


def _keep_edited(path: Path) -> Path | None:
    """Move a report aside that is not as memguard wrote it."""
    if not path.exists():
        return None
    present = path.read_text()
    text = present[: present.rfind("\n<!-- memguard ")]
    if present == text + _MARK.format(_digest(text)):
        return None
    number = 1
    while (kept := path.with_name(f"{path.stem}.edited-{number}{path.suffix}")).exists():
        number += 1
    return path.rename(kept)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]
