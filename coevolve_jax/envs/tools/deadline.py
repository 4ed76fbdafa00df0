"""A limit on the time that code of the user's may take while nobody else watches it."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator

from coevolve_jax.envs.tools.source import Late, Refused


@contextlib.contextmanager
def deadline(seconds: float, what: str) -> Iterator[None]:
    """Raises Refused where the block takes more than `seconds`, also where it sleeps.

    The main thread alone has this limit: signals reach no other.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def late(*_) -> None:
        raise Late

    before = signal.signal(signal.SIGUSR1, late)
    clock = threading.Timer(seconds, signal.pthread_kill, (threading.get_ident(), signal.SIGUSR1))
    clock.daemon = True
    clock.start()
    try:
        yield
    except Late:
        raise Refused(f"{what} does not return within {seconds:g} seconds.") from None
    finally:
        clock.cancel()
        signal.signal(signal.SIGUSR1, before)
