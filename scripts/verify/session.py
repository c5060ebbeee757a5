"""A ramp without its command line: ask or start the server, choose the folder, run the ramp, write the report."""

from __future__ import annotations

import os
import statistics
import time
import uuid
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import httpx
from rich.markup import escape

from scripts.verify import engine, launch, machine, place, prompts, records
from scripts.verify.decide import START
from scripts.verify.engine_process import EngineProcess
from scripts.verify.errors import EXIT_ERROR, MemguardError
from scripts.verify.host import Host
from scripts.verify.options import Options, Surroundings
from scripts.verify.own_memory import OwnMemory
from scripts.verify.progress import Display
from scripts.verify.publish import REPORT, publish
from scripts.verify.ramp import Ramp, Target
from scripts.verify.redact import without_password
from scripts.verify.results import Probe, Run, smallest_aborted_tokens
from scripts.verify.server import Server
from scripts.verify.sources import ChunkSource
from scripts.verify.watch import Watch


@dataclass(frozen=True)
class _Parts:
    """What a ramp is made of. earlier: the runs that the report's folder holds already. own: of the engine that runs
    already, where that is what is judged.
    """

    options: Options
    around: Surroundings
    server: Server
    watch: Watch
    earlier: list[Run]
    own: OwnMemory | None


def run_memguard(options: Options, around: Surroundings) -> int:
    """-> the exit code. Raises MemguardError where nothing was measured."""
    _refuse_no_files(trace=options.trace, server_log=options.server_log)
    niceness = os.getpriority(os.PRIO_PROCESS, 0)
    with ExitStack() as stack:
        server = stack.enter_context(closing(Server(options.url, options.api_key)))
        facts = engine.NOTHING_KNOWN if options.launch else _ask(server)
        found = _engine_process(options)
        own = stack.enter_context(closing(_own(options, around))) if options.own_memory and not options.launch else None
        host = Host(around.proc, around.kmsg)
        machine_facts = machine.facts()
        earlier = records.load(options.append) if options.append else []
        recorder = stack.enter_context(closing(records.Recorder(_folder(options, around, earlier, machine_facts))))
        display = stack.enter_context(closing(Display(around.console)))
        run = _new_run(options, around, facts, machine_facts, recorder)
        run.signals = place.reach(found)
        watch = Watch(run, around, host=host, post_abort=server.abort, engine=found, recorder=recorder, display=display)
        parts = _Parts(options, around, server, watch, earlier, own)
        with ExitStack() as started:  # the engine ends before the report is drawn
            Ramp(options, around, server=server, watch=watch, begin=lambda: _begin(parts, started, niceness)).go()
            with suppress(MemguardError):  # a server that does not answer any more has been reported already
                run.coefficient = engine.coefficient(server.info())
        return _finish(run, recorder, display)


def _ask(server: Server) -> dict[str, Any]:
    info = server.info()
    # The guard's only tool must work before it is needed; the engine takes an unknown request for an ended one.
    server.abort(f"memguard-check-{uuid.uuid4().hex}")
    return engine.facts(info)


def _begin(parts: _Parts, started: ExitStack, niceness: int) -> Target:
    """With memory being read: have a server, and know what it takes."""
    options, run = parts.options, parts.watch.run
    log = options.server_log
    if options.launch:
        log = _launch(parts, started, niceness)
        if parts.watch.guard.tripped:
            return Target(None, range(0), ChunkSource(None, None))
        run.engine = _ask(parts.server)
    if parts.own is not None:
        parts.watch.judge_own(parts.own)
    run.label = _free_label(options, run.engine, parts.earlier)
    run.notes += _warnings(options.url, run.engine)
    info = parts.server.info()
    return Target(
        engine.longest_prompt(info, None if info.get("context_length") else parts.server.context_tokens()),
        prompts.id_range(engine.vocab_size(info)),
        ChunkSource(options.trace or engine.trace_path(run.engine), log),
        smallest_aborted_tokens(parts.earlier, run),
    )


def _launch(parts: _Parts, started: ExitStack, niceness: int) -> Path:
    """Start the engine under the guard, until it serves or the guard has tripped -> its log."""
    options, around, watch = parts.options, parts.around, parts.watch
    run = watch.run
    log = watch.recorder.folder / run.samples_file.replace("samples", "server").replace(".jsonl", ".log")
    mark = watch.mark()
    watch.wait(around.baseline_s, lambda: False, "reading memory before the engine starts")
    run.baseline_bytes = int(statistics.median(watch.readings(mark) or [0]))
    watch.phase(START)
    watch.arm(options.guard_bytes or options.start_guard_bytes, options.start_guard_bytes)
    watch.display.say(f"the engine starts; its log: {escape(str(log))}")
    process = started.enter_context(launch.launched(options.launch, log, niceness))
    if options.signals:
        watch.guard.engine = launch.held(process)
    run.signals = place.reach(watch.guard.engine)

    def tick(phase: str) -> None:
        watch.phase(phase)
        watch.tick(watch.moment("waiting for the engine"))

    launch.wait_until_serving(
        process, parts.server.healthy, tripped=lambda: watch.guard.tripped, tick=tick, at_most_s=around.start_s, log=log
    )
    if options.own_memory and not watch.guard.tripped:  # while it started, the host was judged
        watch.judge_own(started.enter_context(closing(OwnMemory(process.pid, around.proc))))
    return log


def _engine_process(options: Options) -> EngineProcess | str:
    """The process that the guard may signal if an abort is not enough, or why none."""
    if options.launch:
        return "it has not been started yet" if options.signals else place.SIGNALS_OFF
    return place.engine_process(options.url) if options.signals else place.SIGNALS_OFF


def _own(options: Options, around: Surroundings) -> OwnMemory:
    """What the engine that runs already takes. Raises MemguardError where its process is not to be seen."""
    found = place.engine_process(options.url)
    if isinstance(found, str):
        raise MemguardError(
            f"--own-memory counts what the engine's processes take, and {found}; run memguard beside the engine and "
            "as its user, start the engine with --launch, or leave --own-memory out"
        )
    return OwnMemory(found.pid, around.proc)


def _refuse_no_files(**options: Path | None) -> None:
    """A pipe gives its lines once, to whoever reads first; a folder has none."""
    for name, path in options.items():
        if path is not None and path.exists() and not path.is_file():
            raise MemguardError(f"--{name.replace('_', '-')} {path}: not a file; name the one the server writes to")


def _folder(options: Options, around: Surroundings, earlier: list[Run], machine_facts: dict[str, Any]) -> Path:
    if options.append is not None:
        for run in earlier:
            if run.machine.get("machine_id") != machine_facts["machine_id"]:
                raise MemguardError(
                    f"{options.append} holds a run of another machine ({run.label}); figures of two machines do not "
                    "belong side by side. Give this one a report of its own with --out"
                )
        return options.append
    if options.out is not None:
        return records.named_folder(options.out)
    return records.new_folder(around.logs, _today())


def _new_run(
    options: Options,
    around: Surroundings,
    facts: dict[str, Any],
    machine_facts: dict[str, Any],
    recorder: records.Recorder,
) -> Run:
    return Run(
        label=options.label or engine.label(facts),
        started_s=time.time(),
        date=_today(),
        command=options.command,
        url=without_password(options.url),
        machine=machine_facts,
        engine=facts,
        sizes_tokens=list(options.sizes_tokens),
        image=options.image,
        guard_bytes=options.guard_bytes or 0,
        start_guard_bytes=options.start_guard_bytes,
        headroom_bytes=options.headroom_bytes,
        sample_interval_s=around.sample_interval_s,
        probes=[Probe(size) for size in options.sizes_tokens],
        samples_file=recorder.samples_file,
    )


def _free_label(options: Options, facts: dict[str, Any], earlier: list[Run]) -> str:
    label = options.label or engine.label(facts)
    taken = {run.label for run in earlier}
    number = 1
    free = label
    while free in taken:
        number += 1
        free = f"{label}-{number}"
    return free


def _warnings(url: str, facts: dict[str, Any]) -> list[str]:
    """What the guard cannot see."""
    warnings = []
    if int(facts["flags"].get("nnodes", 1)) > 1:
        warnings.append("The server runs on several machines; memory was watched on this one only.")
    host = httpx.URL(url).host
    if not place.in_container() and not place.is_here(host):
        warnings.append(
            f"Memory was watched on the machine that memguard ran on, and {host} is none of its addresses: run it on "
            "the server's."
        )
    return warnings


def _finish(run: Run, recorder: records.Recorder, display: Display) -> int:
    """Write the report. A full disk costs the report, not the verdict."""
    exit_code = run.exit_code
    try:
        recorder.run(run)
        published = publish(recorder.folder)
    except MemguardError as error:
        display.problem(str(error))
        exit_code = exit_code or EXIT_ERROR
    else:
        for remark in published.remarks:
            display.say(f"[yellow]{escape(remark)}[/]")
        display.say(f"Report: {escape(str(recorder.folder / REPORT))}")
    display.say(f"[bold]{escape(run.label)}: {run.outcome.value}[/]")
    return exit_code


def _today() -> str:
    return datetime.now(tz=timezone.utc).astimezone().strftime("%Y-%m-%d")
