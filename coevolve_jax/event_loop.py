"""One asyncio event loop in its own thread.

Synchronous code can run coroutines on it, also in a notebook, whose own loop is running already.
"""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any

_first = threading.Lock()  # functools.cache alone could make two loops if two threads ask at once


def _loop() -> asyncio.AbstractEventLoop:
    with _first:
        return _only_loop()


@functools.cache
def _only_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="event loop", daemon=True).start()
    return loop


def start(coroutine: Coroutine[Any, Any, Any]) -> Future:
    """Starts the coroutine on the loop."""
    return asyncio.run_coroutine_threadsafe(coroutine, _loop())


def wait(future: Future) -> Any:
    """Waits for the result of `start`. Ctrl-C in the calling thread cancels the coroutine."""
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise


def soon(function: Callable[..., Any], *arguments: Any) -> None:
    """Schedules a call on the loop, without waiting for it."""
    _loop().call_soon_threadsafe(function, *arguments)


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Runs the coroutine on the loop and returns its result."""
    return wait(start(coroutine))
