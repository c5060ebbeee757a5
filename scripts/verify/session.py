"""The whole program without its command line: ask the server, choose the folder, run the ramp, write the report."""

from __future__ import annotations

import socket
import time
import uuid
from contextlib import closing
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import httpx
import psutil
from rich.markup import escape

from scripts.verify import engine, machine, prompts, records
from scripts.verify.errors import EXIT_ERROR, MemguardError
from scripts.verify.guard import Guard
from scripts.verify.options import Options, Surroundings
from scripts.verify.progress import Display
from scripts.verify.publish import REPORT, publish
from scripts.verify.ramp import Ramp, Target
from scripts.verify.redact import without_password
from scripts.verify.results import Probe, Run
from scripts.verify.sampler import Meminfo
from scripts.verify.server import Server
from scripts.verify.sources import ChunkSource
from scripts.verify.watch import Watch


def run_memguard(options: Options, around: Surroundings) -> int:
    """-> the exit code. Raises MemguardError where nothing was measured."""
    _refuse_no_files(trace=options.trace, server_log=options.server_log)
    with closing(Server(options.url, options.api_key)) as server:
        info = server.info()
        # The guard's only tool must work before it is needed; the engine takes an unknown request for an ended one.
        server.abort(f"memguard-check-{uuid.uuid4().hex}")
        facts = engine.facts(info)
        target = Target(
            server,
            engine.longest_prompt(info, None if info.get("context_length") else server.context_tokens()),
            prompts.id_range(engine.vocab_size(info)),
        )
        meminfo = Meminfo(around.meminfo)
        machine_facts = machine.facts()
        folder = _folder(options, around, machine_facts)
        with closing(records.Recorder(folder)) as recorder, closing(Display(around.console)) as display:
            run = _new_run(options, around, facts, machine_facts, recorder)
            guard = Guard(server.abort)
            watch = Watch(run, around, meminfo=meminfo, guard=guard, recorder=recorder, display=display)
            source = ChunkSource(options.trace or engine.trace_path(facts), options.server_log)
            Ramp(options, around, target=target, watch=watch, source=source).go()
            return _finish(run, recorder, display)


def _refuse_no_files(**options: Path | None) -> None:
    """A pipe gives its lines once, to whoever reads first; a folder has none."""
    for name, path in options.items():
        if path is not None and path.exists() and not path.is_file():
            raise MemguardError(f"--{name.replace('_', '-')} {path}: not a file; name the one the server writes to")


def _folder(options: Options, around: Surroundings, machine_facts: dict[str, Any]) -> Path:
    if options.append is not None:
        for run in records.load(options.append):
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
        label=_free_label(options, facts),
        started_s=time.time(),
        date=_today(),
        command=options.command,
        url=without_password(options.url),
        machine=machine_facts,
        engine=facts,
        sizes_tokens=list(options.sizes_tokens),
        guard_bytes=options.guard_bytes or 0,
        headroom_bytes=options.headroom_bytes,
        sample_interval_s=around.sample_interval_s,
        probes=[Probe(size) for size in options.sizes_tokens],
        notes=_warnings(options.url, facts),
        samples_file=recorder.samples_file,
    )


def _free_label(options: Options, facts: dict[str, Any]) -> str:
    label = options.label or engine.label(facts)
    taken = {run.label for run in records.load(options.append)} if options.append else set()
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
    if not _in_container() and not _is_here(host):
        warnings.append(
            f"Memory was watched on the machine that memguard ran on, and {host} is none of its addresses: run it on "
            "the server's."
        )
    return warnings


def _in_container() -> bool:
    """A container has addresses of its own and the host's /proc/meminfo: the server's address says nothing there."""
    return Path("/.dockerenv").exists() or Path("/run/.containerenv").exists()


def _is_here(host: str) -> bool:
    try:
        addresses = {str(info[4][0]) for info in socket.getaddrinfo(host, None)}
    except OSError:
        return True  # nobody will answer there, and that is said elsewhere
    own = {address.address for addresses in psutil.net_if_addrs().values() for address in addresses}
    return any(a in own or a.startswith("127.") or a in ("::1", "0.0.0.0", "::") for a in addresses)  # noqa: S104


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
