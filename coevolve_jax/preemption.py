"""A run that is asked to end, by SIGTERM or SIGUSR1. Schedulers send SIGTERM before they take a machine.

Work that nothing has been learned from is given up at once: rollouts under way, D_0, the last evaluation. So
is an evolution whose explorer asks a model, which may take minutes; it begins again when the run goes on. An
update and what follows it are brought to their end. The run is then saved and raises Preempted. The same
command goes on, to the same bits. A second SIGTERM ends the process at once, without a word.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

STATUS = os.EX_TEMPFAIL  # the exit status: 75, "try again later"
REQUESTS = signal.SIGTERM, signal.SIGUSR1

_asked = False
_interruptible = False


class Preempted(BaseException):
    """The run was asked to end and is saved. No Exception, so that nothing takes it for a failure."""


@contextmanager
def handle_signals() -> Iterator[None]:
    """Within it both signals ask; outside they end the process, as ever. For the main thread."""
    global _asked
    before = {number: signal.signal(number, _ask) for number in REQUESTS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        _asked = False


@contextmanager
def interruptible() -> Iterator[None]:
    """Around work that may be given up halfway. Raises Preempted where the run is, or was, asked to end."""
    global _interruptible
    _interruptible = True
    try:
        if _asked:
            raise Preempted
        yield
    finally:
        _interruptible = False
    if _asked:  # Python drops what a handler raises while a finaliser runs
        raise Preempted


def asked() -> bool:
    """Whether the run has been asked to end."""
    return _asked


def _ask(number: int, frame: FrameType | None) -> None:
    global _asked, _interruptible
    if number == signal.SIGTERM:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _asked = True
    if _interruptible:
        _interruptible = False
        raise Preempted
