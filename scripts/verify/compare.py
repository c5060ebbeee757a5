"""Whether a server answers with dynamic chunks what it answers with fixed ones: the same prompts to both."""

from __future__ import annotations

import datetime as dt
import json
import math
import os
import platform
import sys
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from scripts import provenance
from scripts.ending import end_once
from scripts.verify import compare_prompts, compare_record, compare_report
from scripts.verify.compare_ask import Side, ask, connect
from scripts.verify.compare_errors import EXIT_ERROR, EXIT_INTERRUPTED, EXIT_SAME, CompareError
from scripts.verify.compare_prompts import Prompt
from scripts.verify.compare_record import About, Recorded, Recorder
from scripts.verify.errors import MemguardError, RecordError
from scripts.verify.redact import redacted_command

PROGRAM = "python -m scripts.verify.compare"
JSON_FILE, REPORT_FILE = "compare.json", "COMPARE.md"
DEFAULT_TOLERANCE = 0.1

HELP = """Ask a server with fixed chunks (a) and one with dynamic chunks (b) the same, and lay the answers side by side.

PROMPTS is a file of JSON lines: text, {"prompt": text or token ids}, or questions as GSM8K has them ({"question": ...,
"answer": "... #### 42"}). Two servers at once are asked in turns:

\b
    compare PROMPTS --a http://host:30000 --b http://host:30001 --out logs/compare

With memory for one server only, record the first, then start the other:

\b
    compare PROMPTS --a http://host:30000 --record fixed.jsonl
    compare PROMPTS --b http://host:30000 --against fixed.jsonl --out logs/compare

Exit codes: 0 the answers are the same (or recorded); 1 they are different; 2 wrong options or files, or a server that
does not answer as it should; 130 interrupted. Answers that came are kept in each case.
"""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@dataclass(frozen=True)
class Options:
    """What the operator asked for: a and b; a and record; or b and against."""

    prompts: Path
    a: str | None = None
    b: str | None = None
    record: Path | None = None
    against: Path | None = None
    out: Path | None = None
    api_key: str | None = field(default=None, repr=False)
    trace: Path | None = None
    shots: int = compare_prompts.DEFAULT_SHOTS
    limit: int | None = None
    new_tokens: int | None = None
    tolerance: float = DEFAULT_TOLERANCE
    allowed_apart: int = 0
    warmup: int = 1
    keep_cache: bool = False
    same_model: bool = False
    timeout_s: float = 600.0
    command: str = PROGRAM


@app.command(help=HELP)
def compare(  # noqa: PLR0917 - typer makes an option of each
    prompts: Annotated[Path, typer.Argument(help="What to ask, one JSON value a line.", show_default=False)],
    a: Annotated[str | None, typer.Option(help="The server with fixed chunks.", show_default=False)] = None,
    b: Annotated[str | None, typer.Option(help="The server with dynamic chunks.", show_default=False)] = None,
    record: Annotated[
        Path | None, typer.Option(help="Keep a's answers in this file, for --against.", show_default=False)
    ] = None,
    against: Annotated[
        Path | None, typer.Option(help="Take a's answers from a file that --record wrote.", show_default=False)
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="A folder, new or empty, for the report and all answers.", show_default=False),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(envvar="API_KEY", help="The servers' API key. Never shown or written.", show_default=False),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="The file that b writes DYNCHUNK_TRACE to, as seen from here. Found by itself where the server names "
            "one that is on this machine.",
            show_default=False,
        ),
    ] = None,
    shots: Annotated[
        int, typer.Option(help="Questions of the file put before each of the others with their answers.", min=0)
    ] = compare_prompts.DEFAULT_SHOTS,
    limit: Annotated[int | None, typer.Option(help="Ask so many only.", min=1, show_default="all")] = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            help="The longest answer, for lines that say nothing.",
            min=1,
            show_default=f"{compare_prompts.NEW_TOKENS_QUESTION} for a question, {compare_prompts.NEW_TOKENS_PROMPT} "
            "for a prompt",
        ),
    ] = None,
    tolerance: Annotated[
        float, typer.Option(help="How far log probabilities may be apart, in nats.", min=0.0)
    ] = DEFAULT_TOLERANCE,
    allow_different: Annotated[
        int, typer.Option(help="So many different answers are no reason for exit code 1.", min=0)
    ] = 0,
    warmup: Annotated[
        int,
        typer.Option(
            help="Prompts asked of each side before, unmeasured. With DYNCHUNK_LATENCY, as many as it learns from.",
            min=0,
        ),
    ] = 1,
    keep_cache: Annotated[
        bool,
        typer.Option(
            "--keep-cache",
            help="Leave the prefix cache alone. Otherwise it is emptied for each prompt, which needs the server to "
            "yourself.",
        ),
    ] = False,
    same_model: Annotated[
        bool, typer.Option("--same-model", help="The two sides' models are one, though under two paths.")
    ] = False,
    timeout: Annotated[float, typer.Option(help="The longest silence of a server, in seconds.", min=1.0)] = 600.0,
) -> None:
    """Read the options; the work is in run()."""
    options = Options(
        prompts,
        a=a,
        b=b,
        record=record,
        against=against,
        out=out,
        api_key=api_key or None,
        trace=trace,
        shots=shots,
        limit=limit,
        new_tokens=max_new_tokens,
        tolerance=tolerance,
        allowed_apart=allow_different,
        warmup=warmup,
        keep_cache=keep_cache,
        same_model=same_model,
        timeout_s=timeout,
        command=redacted_command(PROGRAM, sys.argv[1:], api_key),
    )
    try:
        code = run(options, Console())
    except MemguardError as error:
        Console(stderr=True).print(f"[bold red]compare:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        code = EXIT_ERROR
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    raise typer.Exit(code)


def run(options: Options, console: Console) -> int:
    """The whole program without its command line. -> the exit code. Raises MemguardError where nothing was compared."""
    refuse_unclear(options)
    prompts = compare_prompts.load(
        options.prompts, shots=options.shots, limit=options.limit, new_tokens=options.new_tokens
    )
    recorded_a = None if options.against is None else fitting_record(options.against, prompts, options)
    with ExitStack() as stack:
        sides = []
        for name, url in (("a", options.a), ("b", options.b)):
            if url is not None:
                trace = options.trace if name == "b" else None
                side = connect(
                    name,
                    url,
                    options.api_key,
                    trace=trace,
                    keep_cache=options.keep_cache,
                    timeout_s=options.timeout_s,
                )
                sides.append(stack.enter_context(closing(side)))
        engines = [recorded_a.about.engine] if recorded_a else []
        refuse_other_model([*engines, *(side.engine for side in sides)], same_model=options.same_model)
        _empty(options.out)
        recorders = [
            stack.enter_context(closing(Recorder(_answers_file(side, options), about(side, prompts, options))))
            for side in sides
        ]
        interrupted = _interruptible(sides, recorders, prompts, options, console)
        live = [recorder.recorded for recorder in recorders]
    if options.record is not None:
        return _say_recorded(live[0], options.record, console, interrupted=interrupted)
    return _report(prompts, recorded_a or live[0], live[-1], options, console)


def ask_all(
    sides: Sequence[Side], recorders: Sequence[Recorder], prompts: Sequence[Prompt], *, warmup: int, console: Console
) -> None:
    """Every prompt to every side; two sides in turns, each of them first in every other pair."""
    columns = (TextColumn("{task.description}"), MofNCompleteColumn(), TimeRemainingColumn())
    turns = list(zip(sides, recorders, strict=True))
    with Progress(*columns, console=console, transient=True) as progress:
        for prompt in progress.track(prompts[:warmup], description="warming up"):
            for side in sides:
                ask(side, prompt)
        for number, prompt in enumerate(progress.track(prompts, description="prompts")):
            for side, recorder in turns if number % 2 == 0 else reversed(turns):
                recorder.add(ask(side, prompt))


def about(side: Side, prompts: Sequence[Prompt], options: Options) -> About:
    """The head of a side's recording."""
    return About(
        side=side.name,
        url=side.url,
        engine=side.engine,
        prompts=compare_prompts.digest(prompts),
        n_prompts=len(prompts),
        keep_cache=options.keep_cache,
        warmup_prompts=min(options.warmup, len(prompts)),
        provenance=origin(options.command),
    )


def origin(command: str) -> dict[str, Any]:
    """What stands beside every figure."""
    return {
        "command": command,
        "commit": provenance.commit(),
        "machine": provenance.machine(),
        "python": platform.python_version(),
        "date": f"{dt.datetime.now(dt.timezone.utc):%Y-%m-%d}",
    }


def refuse_unclear(options: Options) -> None:
    """Raises CompareError unless the options name two sides, or one and where the other's answers are or go.

    Also where a number is none.
    """
    given = tuple(name for name in ("a", "b", "record", "against") if getattr(options, name) is not None)
    if given not in {("a", "b"), ("a", "record"), ("b", "against")}:
        raise CompareError(
            "give --a URL and --b URL, two servers; or --a URL and --record FILE, then --b URL and --against FILE, one "
            f"after the other (given: {', '.join('--' + name for name in given) or 'none of them'})"
        )
    if options.record is not None and options.out is not None:
        raise CompareError("--out is for the comparison; --record writes its file only")
    for name, value in (("tolerance", options.tolerance), ("timeout", options.timeout_s)):
        if not math.isfinite(value):  # typer takes nan for a number, and nothing is ever above it
            raise CompareError(f"--{name} {value}: not a number; write one like {DEFAULT_TOLERANCE:g}")


def refuse_other_model(engines: Sequence[dict[str, Any]], *, same_model: bool) -> None:
    """Raises CompareError where two engines serve two models: nothing could be said about chunks."""
    models = [str(engine["model_path"] or engine["model"]) for engine in engines]
    if len(set(models)) > 1 and not same_model:
        raise CompareError(
            f"the sides serve different models: a {models[0]}, b {models[1]}; if they are one under two paths, "
            "say so with --same-model"
        )


def fitting_record(path: Path, prompts: Sequence[Prompt], options: Options) -> Recorded:
    """A recording of these prompts. Raises CompareError where it is of others, or was asked otherwise."""
    recorded = compare_record.load(path)
    if recorded.about.prompts != compare_prompts.digest(prompts):
        raise CompareError(
            f"{path} holds answers to {recorded.about.n_prompts:,} prompts, and not to the {len(prompts):,} of "
            f"{options.prompts} as they are asked now; use the same file, --shots, --limit and --max-new-tokens"
        )
    if recorded.about.keep_cache != options.keep_cache:
        raise CompareError(
            f"{path} was recorded {'with' if recorded.about.keep_cache else 'without'} --keep-cache; do the same here"
        )
    return recorded


def _interruptible(
    sides: Sequence[Side],
    recorders: Sequence[Recorder],
    prompts: Sequence[Prompt],
    options: Options,
    console: Console,
) -> bool:
    """Ask all. -> whether Ctrl-C ended it; what was answered until then can be reported."""
    try:
        ask_all(sides, recorders, prompts, warmup=options.warmup, console=console)
    except KeyboardInterrupt:
        return True
    return False


def _say_recorded(recorded: Recorded, path: Path, console: Console, *, interrupted: bool) -> int:
    answered = sum(not answer.refused for answer in recorded.answers)
    if interrupted:
        console.print(f"Interrupted: {escape(str(path))} is not whole and cannot be compared with.")
        return EXIT_INTERRUPTED
    if not answered:
        raise CompareError(f"a answered none of the prompts: {recorded.answers[0].refused}")
    console.print(
        f"{answered:,} of {len(recorded.answers):,} prompts were answered by {escape(recorded.about.url)} and are in "
        f"{escape(str(path))}. Now start the other server and compare: --b URL --against {escape(str(path))}",
        soft_wrap=True,
    )
    return EXIT_SAME


def _report(prompts: Sequence[Prompt], a: Recorded, b: Recorded, options: Options, console: Console) -> int:
    """Say, and write, what came out. Raises CompareError where no prompt was answered by both."""
    summary = compare_report.summarise(
        prompts,
        a,
        b,
        tolerance=options.tolerance,
        allowed_apart=options.allowed_apart,
        interleaved=options.against is None,
        provenance=origin(options.command),
    )
    if not summary["agreement"]["compared"]:
        if summary["interrupted"]:
            return EXIT_INTERRUPTED
        first = summary["pairs_not_equal"][0]
        raise CompareError(
            f"none of the {summary['asked']:,} prompts was answered by both sides; line {first['line']}: "
            f"{first['likeness']}: {first['detail']}"
        )
    console.print(compare_report.terminal(summary))
    if options.out is None:
        console.print("Nothing was written; --out FOLDER keeps the report and the answers.")
    else:
        _write(options.out / JSON_FILE, json.dumps(summary, indent=1) + "\n")
        _write(options.out / REPORT_FILE, compare_report.markdown(summary))
        console.print(f"Report: {escape(str(options.out / REPORT_FILE))}", soft_wrap=True)
    return int(summary["exit_code"])


def _answers_file(side: Side, options: Options) -> Path | None:
    if options.record is not None:
        return options.record
    return None if options.out is None else options.out / f"{side.name}.jsonl"


def _empty(folder: Path | None) -> None:
    """Raises RecordError where a report would be mixed with other files."""
    try:
        if folder is not None and folder.exists() and any(folder.iterdir()):
            raise RecordError(f"{folder} is not empty; --out wants a new folder")
    except OSError as error:
        raise RecordError(f"cannot use {folder}: {error.strerror}") from None


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise RecordError(f"cannot write {path}: {error.strerror}") from None


def main() -> NoReturn:
    """Run the program; told to end, it ends as on Ctrl-C, with what it has."""
    end_once()
    app(prog_name=PROGRAM)
    sys.exit(os.EX_OK)


if __name__ == "__main__":
    main()
