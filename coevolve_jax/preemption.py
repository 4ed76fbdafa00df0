"""Ends a run on request: SIGTERM (which schedulers send before they take a machine) or SIGUSR1.

    given up at once    rollouts, D_0, the last evaluation: work from which nothing has been learned yet
                        an evolution whose explorer asks a model, which may take minutes; it restarts on
                        resume
    finished first      an update and the steps after it

The run is then saved and raises Preempted. The same command resumes it, to the same bits. A second SIGTERM
kills the process at once.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

STATUS = os.EX_TEMPFAIL  # the exit status: 75, "try again later"
REQUESTS = signal.SIGTERM, signal.SIGUSR1

_asked = False
_interruptible = False


class Preempted(BaseException):
    """Raised in a run that was asked to end. A BaseException, so that no handler of failures catches it."""


@contextmanager
def handle_signals() -> Iterator[None]:
    """Within the block both signals ask the run to end; outside they kill the process. Main thread only."""
    global _asked
    before = {number: signal.signal(number, _ask) for number in REQUESTS}
    try:
        with noting_lost(Preempted, lambda: None):  # `interruptible` raises another
            yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        _asked = False


@contextmanager
def noting_lost(kind: type[BaseException], lost: Callable[[], None]) -> Iterator[None]:
    """Calls `lost`, and prints nothing, where Python drops an exception of this kind.

    It drops what a signal's handler raises during a finaliser or a weak reference's callback.
    """
    before = sys.unraisablehook

    def note(dropped: sys.UnraisableHookArgs) -> None:
        if issubclass(dropped.exc_type, kind):
            lost()
        else:
            before(dropped)

    sys.unraisablehook = note
    try:
        yield
    finally:
        sys.unraisablehook = before


@contextmanager
def interruptible() -> Iterator[None]:
    """Wraps work that may be given up halfway. Raises Preempted if the run is asked to end, or was before."""
    global _interruptible
    _interruptible = True
    try:
        if _asked:
            raise Preempted
        yield
    finally:
        _interruptible = False
    if _asked:  # what `_ask` raised may be lost
        raise Preempted


@contextmanager
def whole() -> Iterator[None]:
    """Wraps a part of interruptible work that is brought to its end first. Main thread only."""
    global _interruptible
    before, _interruptible = _interruptible, False
    try:
        yield
    finally:
        _interruptible = before
    if before and _asked:
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
