"""The ramp: one prompt after the other, each larger than the last, until all are through or the guard ends it."""

from __future__ import annotations

import random
import statistics
import time
import traceback
import uuid
from collections.abc import Callable
from dataclasses import dataclass

from scripts.verify import chunks, engine, prompts
from scripts.verify.call import Call
from scripts.verify.decide import IDLE, RAMP, Limits, gib
from scripts.verify.errors import (
    EXIT_ERROR,
    EXIT_GUARD,
    EXIT_INTERRUPTED,
    EXIT_PASSED,
    MemguardError,
    RefusedError,
    ServerTimeoutError,
)
from scripts.verify.options import Options, Surroundings
from scripts.verify.progress import Now
from scripts.verify.projection import largest_product, projected_low_bytes
from scripts.verify.recovery import note_trip, recover
from scripts.verify.report import NO_CHUNKS
from scripts.verify.results import Outcome, Probe, Verdict
from scripts.verify.server import Server
from scripts.verify.sources import ChunkSource
from scripts.verify.watch import Watch

_SETTLE_S = 1.0
_LATE_LINES_TICKS = 3
_ABORT_AGAIN_S = 0.5
_GIVE_UP_S = 10.0  # for a request to end that nobody watches any more
_EXIT_CODES = {
    Outcome.PASSED: EXIT_PASSED,
    Outcome.GUARD: EXIT_GUARD,
    Outcome.PROJECTED: EXIT_GUARD,
    Outcome.INTERRUPTED: EXIT_INTERRUPTED,
}


@dataclass(frozen=True)
class Target:
    """What the server takes: the longest prompt and what makes it so, and safe token ids. Where chunk sizes come from.

    aborted_tokens: the smallest size that the guard has ended before under the very same conditions.
    """

    longest: tuple[int, str] | None
    ids: range
    source: ChunkSource
    aborted_tokens: int | None = None


class Ramp:
    """One run in progress. However it ends, `watch.run` holds what was measured and why it ended."""

    def __init__(
        self, options: Options, around: Surroundings, *, server: Server, watch: Watch, begin: Callable[[], Target]
    ) -> None:
        """begin: called when memory is being read; returns when the server serves, or the guard has tripped."""
        self._options = options
        self._around = around
        self._server = server
        self._begin = begin
        self._target = Target(None, range(0), ChunkSource(None, None))
        self._watch = watch
        self._run = watch.run
        self._request_ended = True
        self._mark = 0

    def go(self) -> None:
        """Measure."""
        run, watch = self._run, self._watch
        try:
            watch.recorder.run(run)
            watch.start()
            self._target = self._begin()
            if not watch.guard.tripped:
                self._take_baseline()
                self._all_sizes()
            if watch.guard.tripped:
                self._recover()
        except KeyboardInterrupt:
            run.outcome = Outcome.GUARD if watch.guard.tripped else Outcome.INTERRUPTED
            watch.note("It was interrupted.")
        except MemguardError as error:
            run.outcome = Outcome.GUARD if watch.guard.tripped else Outcome.FAILED
            watch.note(f"{error}.")
            watch.display.problem(str(error))
        except Exception as error:
            run.outcome = Outcome.GUARD if watch.guard.tripped else Outcome.FAILED
            watch.note(f"memguard itself failed: {type(error).__name__}: {error}.")
            watch.display.problem(traceback.format_exc())
        finally:
            run.exit_code = _EXIT_CODES.get(run.outcome, EXIT_ERROR)
            source = self._target.source
            run.chunk_source = source.name
            if source.followed and run.chunk_source == NO_CHUNKS and any(p.start_s for p in run.probes):
                watch.note(f"No line about the prompts came in {source.followed}.")
            note_trip(watch, request_ended=self._request_ended)
            watch.end()

    def _take_baseline(self) -> None:
        run, watch = self._run, self._watch
        self._server.flush_cache()
        watch.phase(IDLE)
        mark = watch.mark()
        watch.wait(self._around.baseline_s, lambda: False, "reading the baseline")
        run.baseline_bytes = int(statistics.median(watch.readings(mark) or [0]))
        headroom = self._options.headroom_bytes
        if headroom is not None:
            run.guard_bytes = max(0, run.baseline_bytes - headroom)
        if headroom is not None and run.guard_bytes == 0:
            raise MemguardError(
                f"MemAvailable is {gib(run.baseline_bytes)}, which has no headroom of {gib(headroom)} to take; nothing "
                "was sent. Lower --headroom-gib"
            )
        if run.baseline_bytes <= run.guard_bytes:
            raise MemguardError(
                f"MemAvailable is {gib(run.baseline_bytes)} before the first prompt, and the guard "
                f"{gib(run.guard_bytes)}; nothing was sent. Free memory, lower --guard-gib or raise --headroom-gib"
            )
        watch.arm(run.guard_bytes, run.start_guard_bytes)
        watch.display.head(run, str(watch.recorder.folder))

    def _all_sizes(self) -> None:
        run, watch = self._run, self._watch
        for index, probe in enumerate(run.probes):
            try:
                self._one_size(index, probe)
            finally:
                if probe.verdict is not Verdict.NOT_RUN:
                    watch.display.row(probe)
            watch.recorder.run(run)
            if watch.guard.tripped:
                return
            if probe.verdict is Verdict.PROJECTED:
                run.outcome = Outcome.PROJECTED
                return
        run.outcome = Outcome.PASSED if all(probe.passed for probe in run.probes) else Outcome.INCOMPLETE

    def _recover(self) -> None:
        self._run.outcome = Outcome.GUARD
        recover(
            self._watch,
            self._server,
            request_ended=self._request_ended,
            since=self._mark,
            at_most_s=self._around.recovery_s,
        )

    def _refused(self, probe: Probe) -> str:
        """Why a size is not even tried; empty if it may be."""
        longest, aborted_tokens = self._target.longest, self._target.aborted_tokens
        if longest is not None and probe.size_tokens > longest[0]:
            return f"above {longest[1]}, which takes prompts of up to {longest[0]:,} tokens"
        if aborted_tokens is not None and probe.size_tokens >= aborted_tokens:
            return (
                f"{aborted_tokens:,} tokens were ended by the guard before with this very chunk; lower DYNCHUNK_BUDGET "
                "or the chunk first"
            )
        return ""

    def _one_size(self, index: int, probe: Probe) -> None:
        watch = self._watch
        probe.detail = self._refused(probe)
        if probe.detail:
            probe.verdict = Verdict.REFUSED
            return
        if index:
            self._server.flush_cache()
        self._project(probe)
        if probe.detail and not self._options.past_projection:
            probe.verdict = Verdict.PROJECTED
            return
        probe.detail = ""
        probe.rid = f"memguard-{probe.size_tokens}-{uuid.uuid4().hex[:12]}"
        rng = random.Random(uuid.uuid4().int)  # noqa: S311 - tokens, not secrets
        body = prompts.body(probe.rid, prompts.token_ids(probe.size_tokens, self._target.ids, index, rng))
        watch.guard.watch(probe.rid)
        if watch.guard.tripped:  # before there was a request it could have aborted
            watch.guard.release()
            return
        call = Call(lambda: self._server.generate(body, self._options.timeout_s))
        self._mark = watch.mark()
        watch.devices.mark()
        probe.start_s = watch.now_s()
        watch.phase(RAMP, running=1)
        self._target.source.begin(probe.rid, probe.size_tokens, probe.start_s)
        try:
            call.start()
            self._follow(call, probe)
        except BaseException as error:
            interrupted = isinstance(error, KeyboardInterrupt)
            probe.verdict = Verdict.INTERRUPTED if interrupted else Verdict.FAILED
            probe.detail = "" if interrupted else str(error)
            self._give_up(probe.rid, call)
            raise
        finally:
            self._request_ended = call.done.is_set() and not isinstance(call.error, ServerTimeoutError)
            watch.guard.release()
            watch.phase(IDLE, running=0 if self._request_ended else None)
            probe.end_s = watch.now_s()
            self._collect(probe)
            probe.low_water_bytes = watch.low_bytes(self._mark)
            probe.host_low_water_bytes = watch.host_low_bytes(self._mark)
            probe.gpu_free_low_bytes = watch.devices.low_bytes()
        self._judge(call, probe)
        if watch.devices.present and probe.passed:
            probe.gpu_unused_bytes = engine.unused_reserved_bytes(self._server.info())

    def _follow(self, call: Call, probe: Probe) -> None:
        """Until the request is over, or does not end although it was aborted."""
        watch = self._watch
        tripped_s: float | None = None
        while not call.done.wait(self._around.tick_s):
            now_s = watch.now_s()
            probe.chunks = self._target.source.poll(now_s)
            probe.low_water_bytes = watch.low_bytes(self._mark)
            trip = watch.guard.trip_seen
            if trip is not None:
                tripped_s = now_s if tripped_s is None else tripped_s
                if now_s - tripped_s > self._around.abort_wait_s:
                    return
            watch.tick(self._moment(probe, now_s))

    def _moment(self, probe: Probe, now_s: float) -> Now:
        watch = self._watch
        done = chunks.tokens_at(probe.chunks) if probe.chunks else None
        elapsed_s = now_s - (probe.start_s or now_s)
        return Now(
            watch.available_bytes(),
            probe.low_water_bytes or 0,
            self._run.guard_bytes,
            size_tokens=probe.size_tokens,
            elapsed_s=elapsed_s,
            done_tokens=done,
            tokens_per_s=done / elapsed_s if done and elapsed_s > 0 else None,
            left_s=chunks.seconds_left(probe.chunks, probe.size_tokens),
            warning=watch.warning(),
            figure=self._run.figure,
            doing="waiting for the aborted prompt to end" if watch.guard.tripped else "",
        )

    def _collect(self, probe: Probe) -> None:
        """The last lines may reach their file a moment after the answer."""
        for _ in range(_LATE_LINES_TICKS):
            probe.chunks = self._target.source.poll(probe.end_s or 0.0)
            complete = chunks.tokens_at(probe.chunks) >= probe.size_tokens
            if complete or not self._target.source.followed or self._watch.guard.tripped:
                return
            time.sleep(self._around.tick_s)

    def _judge(self, call: Call, probe: Probe) -> None:
        """The verdict on a size. Raises where the next one should not be tried."""
        meta = call.answer.get("meta_info") or {}
        finish = meta.get("finish_reason") or {}
        aborted = isinstance(finish, dict) and finish.get("type") == "abort"
        probe.prompt_tokens, probe.cached_tokens = meta.get("prompt_tokens"), meta.get("cached_tokens")
        error = call.error
        if self._watch.guard.tripped:
            probe.verdict = Verdict.GUARDED
            if not self._request_ended:
                probe.detail = f"the request did not end. {self._watch.guard.last_error}".rstrip()
            elif error is None and not aborted:
                probe.detail = "the prompt was through before the abort came"
            elif probe.chunks:
                probe.detail = f"at {chunks.tokens_at(probe.chunks):,} tokens"
        elif isinstance(error, RefusedError):
            probe.verdict, probe.detail = Verdict.REFUSED, f"the server says: {error}"
        elif isinstance(error, ServerTimeoutError):
            probe.verdict = Verdict.TIMED_OUT
            probe.detail = f"no answer within {self._options.timeout_s:g} s; --timeout gives it longer"
            self._give_up(probe.rid, call)
            raise MemguardError(f"{probe.size_tokens:,} tokens: {probe.detail}")
        elif error is not None:
            probe.verdict, probe.detail = Verdict.FAILED, str(error)
            raise error
        elif aborted:
            probe.verdict, probe.detail = Verdict.FAILED, f"aborted by somebody else: {finish.get('message')}"
            raise MemguardError(f"{probe.size_tokens:,} tokens: {probe.detail}")
        else:
            close = (probe.low_water_bytes or 0) < Limits.at(self._run.guard_bytes).warn_bytes
            probe.verdict = Verdict.CLOSE if close else Verdict.PASSED

    def _project(self, probe: Probe) -> None:
        """Say beforehand where the sizes before lead to; in `detail` if that is below the guard."""
        run = self._run
        taken = [
            (largest_product(p.size_tokens, run.engine), p.before_bytes - p.low_water_bytes)
            for p in run.probes
            if p.passed and p.before_bytes is not None and p.low_water_bytes is not None
        ]
        mark = self._watch.mark()
        # Not the last prompt's dip, which the reading that is being taken may still be of.
        self._watch.wait(_SETTLE_S, lambda: self._watch.mark() > mark + 1, "reading memory")
        probe.before_bytes = self._watch.available_bytes()
        product = largest_product(probe.size_tokens, run.engine)
        probe.projected_low_bytes = projected_low_bytes(taken, product, probe.before_bytes)
        if probe.projected_low_bytes is not None and probe.projected_low_bytes < run.guard_bytes:
            low = gib(max(0, probe.projected_low_bytes))
            probe.detail = f"the sizes before lead to {run.figure} {low}, the guard is at {gib(run.guard_bytes)}"
            if self._options.past_projection:
                self._watch.display.say(f"[yellow]{probe.size_tokens:,} tokens: {probe.detail}[/]")

    def _give_up(self, rid: str, call: Call) -> None:
        """Nobody watches from here on: the request must not go on. (After a timeout the call is over, it is not.)"""
        deadline_s = time.monotonic() + _GIVE_UP_S
        while time.monotonic() < deadline_s:
            try:
                self._server.abort(rid)
            except MemguardError as error:
                self._watch.note(f"The request in flight could not be aborted: {error}.")
                return
            if call.done.wait(_ABORT_AGAIN_S):
                return
