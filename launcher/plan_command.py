"""`./dynchunk plan`: the command line of plan."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from dynchunk import values
from dynchunk.policy import paths
from dynchunk.policy.auto_budget import MARGIN_PERCENT, QUANTUM
from dynchunk.settings import SettingsError
from launcher import dotenv, tables
from launcher import plan as planning
from launcher.plan_inputs import GIB, Flags, Inputs, read

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def _option(text: str, *names: str) -> object:
    return typer.Option(*names, help=text, show_default=False)


def main(arguments: list[str]) -> None:
    """Run the command; it ends the process."""
    app(arguments, prog_name="dynchunk plan")


@app.command()
def plan(
    *,
    prompt: Annotated[
        list[str] | None, typer.Option(help="Tokens of a prompt: 128k, 1M. More than once for several.")
    ] = None,
    cached: Annotated[str, _option("Tokens of it that are cached already.")] = "",
    budget: Annotated[str, _option("token^2, as DYNCHUNK_BUDGET.")] = "",
    rule: Annotated[str, _option("prefix or sequence, as DYNCHUNK_RULE.")] = "",
    page: Annotated[str, _option("Tokens, as DYNCHUNK_PAGE.")] = "",
    least: Annotated[str, _option("The smallest chunk, as DYNCHUNK_CHUNK_MIN.", "--min")] = "",
    most: Annotated[
        str, _option("The largest chunk, as DYNCHUNK_CHUNK_MAX; above CHUNKED_PREFILL_SIZE, that too.", "--max")
    ] = "",
    latency: Annotated[str, _option("off, equal, pipeline or a time such as 200ms, as DYNCHUNK_LATENCY.")] = "",
    model: Annotated[str, _option("Coefficients in ms and tokens: a=..,b=..,c=..,gamma=..")] = "",
    base: Annotated[str, _option("With equal: the first chunk, which the others take as long as.")] = "",
    align: Annotated[str, _option("Chunks that latency sizes are multiples of this, or of the page.")] = "",
    pp: Annotated[str, _option("Pipeline stages, as PP_SIZE.")] = "",
    rates: Annotated[str, _option("Without a model: measured tokens/s by chunk, 256=389,1024=594.")] = "",
    path: Annotated[str, _option(f"The engine's attention path: {', '.join(paths.PATHS)}.")] = "",
    bytes_each: Annotated[float | None, _option("Measured bytes for each row and key, instead.", "--bytes")] = None,
    report: Annotated[Path | None, _option("A memguard report with a measured coefficient, instead.")] = None,
    score_mib: Annotated[str, _option("Limit of the score buffers, as DYNCHUNK_INDEXER_SCORE_MIB; 0: none.")] = "",
    headroom: Annotated[float | None, _option("GiB that are free: say whether it fits.")] = None,
    max_budget_for: Annotated[
        float | None, _option("GiB that are free: find the budget that fits, and plan it.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The plan as data.")] = False,
    plot: Annotated[Path | None, _option("Draw chunk, transient and time against the prefix: FILE.png.")] = None,
    env_file: Annotated[Path | None, _option("Settings in a file; the environment comes first.", "--env-file")] = None,
) -> None:
    """What will this setting cost? The chunks of a prompt, their memory and time, before anything is started.

    What is not given comes from the environment, .env and the model's config.json, as for serve. Nothing is measured:
    memory follows from the engine's path or from --bytes, time from --model or --rates.
    """
    flags = Flags(
        budget,
        rule,
        page,
        least,
        most,
        pp,
        score_mib,
        latency,
        prompt or (),
        cached,
        align,
        base,
        model,
        rates,
        path,
        bytes_each,
        report,
    )
    try:
        free = _gib_bytes("--headroom", headroom)
        fitting = _gib_bytes("--max-budget-for", max_budget_for)
        _check_plot(plot)
        inputs = read(flags, dotenv.merged(os.environ, env_file).environ)
        solved = None
        if fitting is not None:
            inputs = _with_budget_for(inputs, fitting)
            solved = inputs.resolved.limits.budget
        plans = [planning.plan(inputs, prompt) for prompt in inputs.prompts]
    except SettingsError as error:
        print(f"dynchunk plan: {error}", file=sys.stderr)
        raise typer.Exit(2) from error
    _publish(inputs, plans, solved, fitting if free is None else free, as_json=as_json, plot=plot)


def _gib_bytes(flag: str, gib: float | None) -> int | None:
    """Bytes. Raises SettingsError for what is no amount of memory."""
    try:
        return None if gib is None else round(values.number(gib, 0, values.MOST_GIB) * GIB)
    except ValueError as error:
        raise SettingsError([f"{flag} {error} GiB"]) from None


def _check_plot(plot: Path | None) -> None:
    """Raises SettingsError for a name under which the drawing would not be found."""
    if plot is None:
        return
    if plot.is_dir():
        raise SettingsError([f"--plot {plot}: it is a folder; name a file in it: {plot / 'plan.png'}"])
    if plot.suffix.lower() != ".png":
        raise SettingsError([f"--plot {plot}: what is drawn is a PNG; write --plot {plot.with_suffix('.png')}"])


def _with_budget_for(inputs: Inputs, free_bytes: int) -> Inputs:
    """The inputs with the largest budget that fits. Raises SettingsError where none does."""
    if inputs.cost is None:
        raise SettingsError(["--max-budget-for needs --path, --bytes or --report: what a row and key costs"])
    found = planning.budget_for(inputs, free_bytes)
    if found is not None:
        return planning.with_budget(inputs, found)
    least = planning.least(inputs)
    problem = (
        f"--max-budget-for {free_bytes / GIB:g}: under the smallest budget a prompt of {least.prompt:,} tokens has "
        f"chunks of {least.top.tokens:,} on a prefix of {least.top.prefix:,}, which hold "
        f"{(least.peak_bytes or 0) / GIB:.3g} GiB; {planning.usable_bytes(free_bytes) / GIB:.3g} GiB of what is free "
        f"are to be used, {MARGIN_PERCENT} % are left for the allocator and others; lower DYNCHUNK_CHUNK_MIN or "
        "CONTEXT_LENGTH, or free memory"
    )
    raise SettingsError([problem])


def _publish(
    inputs: Inputs,
    plans: Sequence[planning.Plan],
    solved: int | None,
    free_bytes: int | None,
    *,
    as_json: bool,
    plot: Path | None,
) -> None:
    from launcher import plan_report

    if plot is not None:
        try:
            plan_report.draw(max(plans, key=lambda one: one.prompt), plot)
        except (OSError, ValueError, ImportError) as error:
            cure = "; requirements/tools.txt names what plots need" if isinstance(error, ImportError) else ""
            print(f"dynchunk plan: --plot {plot}: {error}{cure}", file=sys.stderr)
            raise typer.Exit(2) from error
    if as_json:
        found = [planning.as_data(inputs, one) | ({} if solved is None else {"max_budget": solved}) for one in plans]
        print(json.dumps(found[0] if len(found) == 1 else found))
        return
    if solved is not None:
        # A multiple of QUANTUM: a million.
        print(f"budget: {solved:,} token^2 fit; DYNCHUNK_BUDGET={solved // QUANTUM}M")
    print(inputs.resolved.describe())
    for note in inputs.notes:
        print(tables.printable(f"note: {note}"))
    for one in plans:
        print()
        plan_report.show(inputs, one, free_bytes)
    if plot is not None:
        print(f"drawn: {plot}")
