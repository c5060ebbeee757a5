"""What the guard would have done: the same decisions, on readings from a file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from dynchunk.values import parsed
from scripts.verify.decide import Action, Decision, Limits, Sample, by_phase, decide
from scripts.verify.errors import EXIT_GUARD, EXIT_PASSED, MemguardError, RecordError
from scripts.verify.records import sample_from_json

_LONGEST_LOOK_BACK = 2_000  # samples; more than any rule looks at, so that a long file is read in linear time


def run(path: Path, console: Console, *, guard_bytes: int, start_guard_bytes: int) -> int:
    """Say every change of mind -> EXIT_GUARD where the guard would have tripped, EXIT_PASSED where not."""
    samples = load(path)
    limits = by_phase(guard_bytes, start_guard_bytes)
    hardest = before = Action.CONTINUE
    for sample, decision in decisions(samples, limits):
        if decision.action is not before:
            seconds = sample.t_s - samples[0].t_s
            said = f"{seconds:9,.1f} s  {sample.phase:5}  {decision.action.value:8}  {decision.reason}"
            console.print(escape(said.rstrip()), highlight=False, soft_wrap=True)
        before = decision.action
        hardest = max(hardest, before, key=lambda action: action.severity)
    tripped = hardest.severity >= Action.ABORT.severity
    console.print(
        f"{len(samples):,} readings over {samples[-1].t_s - samples[0].t_s:,.1f} s: "
        + ("the guard would have tripped" if tripped else "quiet"),
        highlight=False,
    )
    return EXIT_GUARD if tripped else EXIT_PASSED


def decisions(samples: Sequence[Sample], limits: Mapping[str, Limits]) -> Iterator[tuple[Sample, Decision]]:
    """Each sample with what was decided when it was the newest, as the sampler does it."""
    for end in range(1, len(samples) + 1):
        yield samples[end - 1], decide(samples[max(0, end - _LONGEST_LOOK_BACK) : end], limits)


def load(path: Path) -> list[Sample]:
    """The samples of a file. Raises RecordError that names the line.

    A last one that was cut off, which no JSON is then, is left out; one that is whole and wrong is wrong anywhere.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise RecordError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise RecordError(f"{path} is no text") from None
    samples: list[Sample] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            values = parsed(line)
        except ValueError as error:
            if number == len(lines):
                break
            raise RecordError(f"{path}, line {number}: {error}") from None
        try:
            sample = sample_from_json(values)
        except ValueError as error:
            raise RecordError(f"{path}, line {number}: {error}") from None
        if samples and sample.t_s < samples[-1].t_s:
            raise RecordError(f"{path}, line {number}: t goes back from {samples[-1].t_s:g} to {sample.t_s:g}")
        samples.append(sample)
    if not samples:
        raise MemguardError(f"{path} holds no readings")
    return samples
