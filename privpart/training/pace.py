"""Pace: releases at fixed times, so that how long a round took tells nobody who was in it.

A round is released at the end of its slot, however early its sum was ready. One that is not ready
by then is released at the end of a later slot, and counted: that it was late can be seen from
outside, and the report says how often it happened. What a slot hides is the time of a release; the
machine's load, its traffic, and the messages of its clients have times of their own.
"""

import math
import time
from collections.abc import Callable

from privpart.run.folder import RunFolder
from privpart.server import RoundCounts, Server

Commit = Callable[[Server, RoundCounts], None]


def paced(
    run: RunFolder,
    commit: Commit,
    seconds: float,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Commit:
    """Return a commit that returns at the end of a slot, which begins where the last one ended.

    Args:
        run: keeps the number of rounds that were late.
        commit: makes a round durable.
        seconds: length of a slot, > 0.
        clock: seconds that never go back.
        sleep: waits so many seconds.
    """
    began = clock()
    run.is_paced = True

    def wait(server: Server, counts: RoundCounts) -> None:
        nonlocal began
        ready = clock()
        slots = max(1, math.ceil((ready - began) / seconds))
        if slots > 1:
            run.note_late()
        commit(server, counts)
        # A commit, too, may take longer than what is left of the slot.
        committed = max(slots, math.ceil((clock() - began) / seconds))
        if committed > slots == 1:
            run.note_late()
        end = began + seconds * committed
        while (left := end - clock()) > 0:
            sleep(left)
        began = end

    return wait
