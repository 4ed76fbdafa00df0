"""Several processes (hosts) as one run: they agree at the start, exchange JSON values, and end together.

Values travel through the coordination service of jax.distributed, not through the devices. Process 0 may be
silent for hours while it rolls out, and a collective that waits so long times out.

Failure: a process that fails publishes the reason, and all end. They end within a second, or after
`sharding.PATIENCE` seconds if a collective holds them. A killed process publishes nothing. The service then
ends the others: at once if process 0 was killed, otherwise after PATIENCE seconds.

Preemption: a process that is asked to end (preemption.py) passes the request to process 0. That one gives up
or finishes its work, saves, and ends all.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import jax
import orbax.checkpoint as ocp
from ml_collections import ConfigDict

from coevolve_jax import config as configs
from coevolve_jax import preemption
from coevolve_jax.preemption import Preempted

OVER, PREEMPTED = ENDS = "the run is over", "the run was asked to end"  # the last value of a run

# Numbers the keys, over all runs of a process's life. Every process counts alike, so no key is used twice.
_turns = itertools.count()
_published: list[str] = []  # keys that process 0 has published and that the service still stores
_FAILED = "coevolve/failed/"
_ASKED = "coevolve/asked/"
_POLL_SECONDS = 1  # how often a waiting process checks for Ctrl-C and for another one's failure
# A process that still runs after so many seconds is interrupted again. Stopping a server takes 30.
_INSIST_SECONDS = 40


class Failed(RuntimeError):
    """Raised when another process of the run has failed; the message says which and why."""


@contextlib.contextmanager
def coordinated(config: ConfigDict) -> Iterator[None]:
    """Wraps `train` so that all processes of the run start with one config and end together.

    Does nothing with a single process. Raises ValueError in every process if configs differ, or if the mesh
    does not use all devices.
    """
    if jax.process_count() == 1:
        yield
        return
    _agree(config)
    over, lost = threading.Event(), threading.Event()
    watch = threading.Thread(target=_watch, args=(over, lost), daemon=True)
    watch.start()
    try:
        with preemption.noting_lost(KeyboardInterrupt, lost.set):
            yield
    except Preempted:
        if jax.process_index() == 0:
            publish(PREEMPTED)
        raise
    except BaseException as error:
        # Stop the watch first, as it would interrupt what follows. Its last interrupt may arrive just now.
        with contextlib.suppress(KeyboardInterrupt):
            over.set()
            watch.join()
        if why := _failure():
            raise Failed(why) from None
        what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # the service itself may have failed
            _service().key_value_set(f"{_FAILED}{jax.process_index()}", what)
        raise
    finally:
        over.set()
        watch.join()
    if jax.process_index() == 0:
        publish(OVER)


def publish(value: Any) -> None:
    """Sends a JSON value from process 0 to all others, which must `receive` it."""
    _published.append(f"coevolve/turn/{next(_turns)}")
    _service().key_value_set(_published[-1], json.dumps(value))


def receive() -> Any:
    """Waits, for hours if need be, for process 0's next value. Raises Failed if another process failed."""
    return json.loads(_wait_for(f"coevolve/turn/{next(_turns)}"))


def shared(value: Any) -> Any:
    """Returns, in every process, the JSON value that process 0 passes."""
    if jax.process_index() > 0:
        return receive()
    publish(value)
    return value


def forget_published() -> None:
    """Deletes everything published from the service's memory. All others must have received it."""
    for key in _published:
        _service().key_value_delete(key)
    _published.clear()


def meet() -> None:
    """Makes process 0 wait until all others have called this too. They do not wait for it."""
    turn, us = next(_turns), jax.process_index()
    if us > 0:
        return _service().key_value_set(f"coevolve/ready/{turn}/{us}", "")
    for index in range(1, jax.process_count()):
        _wait_for(f"coevolve/ready/{turn}/{index}")


def _agree(config: ConfigDict) -> None:
    """Raises the same ValueError in every process if they were not started as one run."""
    turn, ours = next(_turns), json.dumps(configs.numbers_of(config), sort_keys=True, indent=1)
    _service().key_value_set(f"coevolve/config/{turn}/{jax.process_index()}", ours)
    texts = [_wait_for(f"coevolve/config/{turn}/{i}") for i in range(jax.process_count())]
    for index, text in enumerate(texts):
        lines = itertools.zip_longest(texts[0].splitlines(), text.splitlines(), fillvalue="nothing")
        for first, other in ([line.strip(" ,") for line in pair] for pair in lines if pair[0] != pair[1]):
            raise ValueError(
                f"Process {index} was started with another config than process 0 ({other}, not "
                f"{first}): start every process with the same --config and the same options."
            )
    size = math.prod(config.mesh.values())
    if size != jax.device_count():
        sizes = ", ".join(f"{axis}={size}" for axis, size in config.mesh.items())
        raise ValueError(
            f"config.mesh ({sizes}) has {size} device(s), the {jax.process_count()} processes "
            f"have {jax.device_count()}: choose sizes whose product is that."
        )


def _wait_for(key: str) -> str:
    """Waits, for hours if need be, for the value that another process sets. Raises Failed if one failed."""
    while True:
        try:
            return _service().blocking_key_value_get(key, _POLL_SECONDS * 1000)
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
        if why := _failure():
            raise Failed(why)


def _watch(over: threading.Event, lost: threading.Event) -> None:
    """Interrupts the main thread, as Ctrl-C would, when another process has failed.

    It repeats an interrupt that is lost at once, and any other that ends nothing after _INSIST_SECONDS. It
    also passes a request to end on to process 0.
    """
    main = threading.main_thread().ident
    assert main is not None  # the main thread is alive
    again = 0.0  # when to interrupt, in seconds of the monotonic clock
    while not over.wait(_POLL_SECONDS):
        if _failure():
            if lost.is_set() or time.monotonic() >= again:
                lost.clear()
                again = time.monotonic() + _INSIST_SECONDS
                signal.pthread_kill(main, signal.SIGINT)
        elif preemption.asked():
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                _service().key_value_set(f"{_ASKED}{jax.process_index()}", "", allow_overwrite=True)
        elif jax.process_index() == 0 and _entries(_ASKED):
            signal.pthread_kill(main, signal.SIGUSR1)


def _failure() -> str | None:
    """Returns a sentence about another process that has failed, or None."""
    ours = f"{_FAILED}{jax.process_index()}"
    for key, what in _entries(_FAILED):
        if key != ours:
            return f"Process {key.removeprefix(_FAILED)} has ended ({what})"
    return None


def _entries(folder: str) -> list[tuple[str, str]]:
    """Returns keys and values of the service's folder; [] if the service is gone."""
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        return _service().key_value_dir_get(folder)
    return []


def _service() -> Any:
    """Returns the coordination service's client, which JAX has no public name for."""
    return ocp.multihost.get_jax_distributed_client()
