"""Several processes (hosts) as one run: they agree at the start, exchange JSON values, and end together.

Values travel through the coordination service of jax.distributed, not through the devices. Process 0 is
silent for as long as rollouts take, and a collective that waits for hours runs into timeouts.

A process that fails says why, and all end: within a second, or after `sharding.PATIENCE` seconds where a
collective holds them. A process that is killed says nothing. The service then ends the others: at once where
process 0 was killed, otherwise after as many seconds.

A process that is asked to end (preemption.py) asks process 0, which gives up or finishes what it does, saves,
and lets all end.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import signal
import threading
from collections.abc import Iterator
from typing import Any

import jax
import orbax.checkpoint as ocp
from ml_collections import ConfigDict

from coevolve_jax import config as configs
from coevolve_jax import preemption
from coevolve_jax.preemption import Preempted

OVER, PREEMPTED = ENDS = "the run is over", "the run was asked to end"  # the last value of a run

# Counts what is published, over all runs of a process's life. Every process counts alike, so that no key
# comes twice.
_turns = itertools.count()
_published: list[str] = []  # keys that process 0 has published and the service still holds
_FAILED = "coevolve/failed/"
_ASKED = "coevolve/asked/"
_POLL_SECONDS = 1  # a process that waits looks up so often: for Ctrl-C, and for another one's failure
# A process that is still there after so many seconds is interrupted again. Ending a server takes 30.
_INSIST_SECONDS = 40


class Failed(RuntimeError):
    """Another process of the run has failed; the message says which and why."""


@contextlib.contextmanager
def coordinated(config: ConfigDict) -> Iterator[None]:
    """Around `train`: all processes of the run begin with one config, and end together.

    A process alone is left alone. Raises ValueError, in every process, where configs differ or the mesh
    leaves devices out.
    """
    if jax.process_count() == 1:
        yield
        return
    _agree(config)
    over = threading.Event()
    watch = threading.Thread(target=_watch, args=(over,), daemon=True)
    watch.start()
    try:
        yield
    except Preempted:
        if jax.process_index() == 0:
            publish(PREEMPTED)
        raise
    except BaseException as error:
        # The watch ends first: it would interrupt what follows. Its own interrupt may have just come.
        with contextlib.suppress(KeyboardInterrupt):
            over.set()
            watch.join()
        if why := _failure():
            raise Failed(why) from None
        what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # the service may be what failed
            _service().key_value_set(f"{_FAILED}{jax.process_index()}", what)
        raise
    finally:
        over.set()
        watch.join()
    if jax.process_index() == 0:
        publish(OVER)


def publish(value: Any) -> None:
    """Process 0 gives a JSON value to all others. They must `receive` it."""
    _published.append(f"coevolve/turn/{next(_turns)}")
    _service().key_value_set(_published[-1], json.dumps(value))


def receive() -> Any:
    """The next value of process 0, be it in hours. Raises Failed where another process has failed."""
    return json.loads(_wait_for(f"coevolve/turn/{next(_turns)}"))


def shared(value: Any) -> Any:
    """The JSON value that process 0 passes, in every process."""
    if jax.process_index() > 0:
        return receive()
    publish(value)
    return value


def forget_published() -> None:
    """Frees the service's memory of everything published. All others must have received it."""
    for key in _published:
        _service().key_value_delete(key)
    _published.clear()


def meet() -> None:
    """Process 0 waits until all others have come here too; they do not wait for it."""
    turn, us = next(_turns), jax.process_index()
    if us > 0:
        return _service().key_value_set(f"coevolve/ready/{turn}/{us}", "")
    for index in range(1, jax.process_count()):
        _wait_for(f"coevolve/ready/{turn}/{index}")


def _agree(config: ConfigDict) -> None:
    """Raises ValueError, the same in every process, where they were not started as one run."""
    turn, ours = next(_turns), json.dumps(configs.numbers(config.to_dict()), sort_keys=True, indent=1)
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
    """The value that another process sets, be it in hours. Raises Failed where one has failed."""
    while True:
        try:
            return _service().blocking_key_value_get(key, _POLL_SECONDS * 1000)
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
        if why := _failure():
            raise Failed(why)


def _watch(over: threading.Event) -> None:
    """Interrupts the main thread, as Ctrl-C would, where another process has failed.

    It interrupts again and again, since Python drops what is raised while it runs a finaliser or a callback.
    Where a process was asked to end, it asks process 0 too.
    """
    main = threading.main_thread().ident
    assert main is not None  # it runs
    while not over.wait(_POLL_SECONDS):
        if _failure():
            signal.pthread_kill(main, signal.SIGINT)
            over.wait(_INSIST_SECONDS)
        elif preemption.asked():
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                _service().key_value_set(f"{_ASKED}{jax.process_index()}", "", allow_overwrite=True)
        elif jax.process_index() == 0 and _entries(_ASKED):
            signal.pthread_kill(main, signal.SIGUSR1)


def _failure() -> str | None:
    """A sentence about another process that has failed, if one has."""
    ours = f"{_FAILED}{jax.process_index()}"
    for key, what in _entries(_FAILED):
        if key != ours:
            return f"Process {key.removeprefix(_FAILED)} has ended ({what})"
    return None


def _entries(folder: str) -> list[tuple[str, str]]:
    """Keys and values of the service's folder; none where the service is gone."""
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        return _service().key_value_dir_get(folder)
    return []


def _service() -> Any:
    """The coordination service's client, which JAX itself does not show."""
    return ocp.multihost.get_jax_distributed_client()
