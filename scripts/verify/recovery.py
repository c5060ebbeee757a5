"""After the guard has tripped: did the request end, did memory come back, does the server still serve?"""

from __future__ import annotations

from scripts.verify.decide import GIB, gib
from scripts.verify.errors import MemguardError
from scripts.verify.results import Abort, Probe
from scripts.verify.server import Server
from scripts.verify.watch import Watch

WITHIN_BYTES = GIB


def enough(baseline_bytes: int, guard_bytes: int) -> int:
    """MemAvailable that counts as recovered: within 1 GiB of the baseline.

    With less than 2 GiB between baseline and guard, within half of that: 1 GiB below would be no recovery.
    """
    return baseline_bytes - min(WITHIN_BYTES, (baseline_bytes - guard_bytes) // 2)


def note_trip(watch: Watch, *, request_ended: bool) -> tuple[Abort, Probe | None] | None:
    """Write the trip into the run, once. -> it and the size that ran; None where the guard has not tripped."""
    trip, run = watch.guard.trip_seen, watch.run
    if trip is None:
        return None
    probe = next((probe for probe in run.probes if trip.rid and probe.rid == trip.rid), None)
    if run.abort is None:
        run.abort = Abort(
            at_s=trip.sample.t_s,
            available_bytes=trip.sample.available_bytes,
            reason=trip.decision.reason,
            size_tokens=probe.size_tokens if probe else None,
            phase=trip.sample.phase,
            request_ended=request_ended,
        )
    return run.abort, probe


def recover(watch: Watch, server: Server, *, request_ended: bool, since: int, at_most_s: float) -> None:
    """Wait until MemAvailable is back near the baseline, emptying the server's cache half-way.

    since: the mark from which on the low water of the size that ran counts.
    """
    noted = note_trip(watch, request_ended=request_ended)
    if noted is None:
        return
    abort, probe = noted
    run = watch.run
    enough_bytes = enough(run.baseline_bytes, run.guard_bytes)
    doing = f"waiting for {run.figure} to be back at {gib(enough_bytes)}"

    def back() -> bool:
        return watch.available_bytes() >= enough_bytes

    watch.wait(at_most_s / 2, back, doing)
    watch.tick(watch.moment("emptying the server's cache"))
    try:
        server.flush_cache()
    except MemguardError as error:
        watch.note(f"The cache could not be emptied after the abort: {error}.")
    abort.recovered = watch.wait(at_most_s / 2, back, doing)
    abort.available_after_bytes = watch.available_bytes()
    abort.recovery_s = watch.now_s() - abort.at_s if abort.recovered else None
    watch.tick(watch.moment("asking whether the server is healthy"))
    abort.server_healthy = server.healthy()
    if probe is not None:  # the chunk that was in flight may have gone on after the answer to the abort
        probe.low_water_bytes = watch.low_bytes(since)
        probe.host_low_water_bytes = watch.host_low_bytes(since)
    if abort.recovered:
        watch.display.say(f"[green]recovered[/]: {run.figure} {gib(abort.available_after_bytes)}")
    else:
        watch.display.problem(
            f"not recovered: {run.figure} {gib(abort.available_after_bytes)}, before the ramp "
            f"{gib(run.baseline_bytes)}; restart the server before you go on"
        )
