"""One event loop in a thread of its own, so that whoever calls need not be asynchronous (nor is hindered by a
notebook's own loop)."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any

_first = threading.Lock()  # two threads may be the first to ask, and a cache alone would make each a loop


def _loop() -> asyncio.AbstractEventLoop:
    with _first:
        return _only_loop()


@functools.cache
def _only_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="event loop", daemon=True).start()
    return loop


def start(coroutine: Coroutine[Any, Any, Any]) -> Future:
    """Begins it on the loop."""
    return asyncio.run_coroutine_threadsafe(coroutine, _loop())


def wait(future: Future) -> Any:
    """The result of what `start` began. Ctrl-C in the calling thread cancels it."""
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise


def soon(function: Callable[..., Any], *arguments: Any) -> None:
    """Has the loop call it, without waiting for that."""
    _loop().call_soon_threadsafe(function, *arguments)


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Runs it on the loop and returns its result."""
    return wait(start(coroutine))
