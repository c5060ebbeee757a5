"""Mode `report` in a scheduler process: say which sizes would be in force, without touching a function of the engine.

Nothing of ours is called there, so a thread waits until the engine has published its settings, reads them once, and
ends. Sizes that the engine still changes while it loads the model are not seen.
"""

from __future__ import annotations

import multiprocessing
import threading
import time

from sglang.srt.runtime_context import get_model, get_schedule

from dynchunk import effective, journal, settings
from dynchunk.settings import SettingsError

ASK_AGAIN_S = 0.5
GIVE_UP_S = 600
CHUNKING_OFF = "chunked prefill is off, so no prefill can be bounded; start with --chunked-prefill-size 2048"


def start() -> None:
    """Begin to wait, in the processes that get a scheduler: the engine spawns those."""
    if multiprocessing.current_process().name != "MainProcess":
        threading.Thread(target=_wait_and_say, name="dynchunk-report", daemon=True).start()


def _wait_and_say() -> None:
    try:
        for _ in range(int(GIVE_UP_S / ASK_AGAIN_S)):
            if (sizes := _published()) is not None:
                _say(*sizes)
                return
            time.sleep(ASK_AGAIN_S)
        journal.say("the engine has published no settings; which sizes would be in force is not known")
    except Exception as error:
        journal.refuse(error)


def _published() -> tuple[int | None, int, int | None] | None:
    """(chunk size, page, context length) as the engine has settled them; None before that."""
    try:
        schedule, model = get_schedule(), get_model()
    except ValueError:  # not published
        return None
    return schedule.chunked_prefill_size, schedule.page_size, model.context_length


def _say(static_tokens: int | None, page: int, context_tokens: int | None) -> None:
    if static_tokens is None or static_tokens <= 0:
        raise SettingsError([CHUNKING_OFF])
    resolved = effective.resolve(
        settings.current(), engine_page=page, static_tokens=static_tokens, context_tokens=context_tokens
    )
    journal.set_effective("", {"summary": resolved.describe()})
    journal.say(f"in mode on: {resolved.describe()}")
    for sentence in resolved.notes + [f"warning: {w}" for w in resolved.warnings]:
        journal.say(sentence)
