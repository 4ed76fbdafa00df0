"""Several processes (hosts) as one run: process 0 leads, the others follow.

The leader runs the loop of train.py: worlds, agent, engine, evolution, logs, report. The policy and the
optimiser's state lie on the devices of all processes, so that every program which touches them must be
started by all of them, in one order. `Leader` therefore tells each call, by its name and arguments, before it
makes it; `follow` makes the same call.

What comes next travels through the coordination service of jax.distributed, not through the devices: the
leader is silent for as long as rollouts take, and a collective that waits for hours runs into timeouts.
Batches, which are large, are broadcast by the devices.

All processes see one file system: they read the same checkpoints, and write each its part of them. Everything
else in the workdir is written by the leader alone.

A process that is asked to end (preemption.py) asks the leader, which gives up or finishes what it does, saves, and
lets all end.

A process that fails says why, and all end: within a second, or after `sharding.PATIENCE` seconds where a
collective holds them. One that is killed says nothing: the service ends the others, at once where it was the
leader, otherwise after as many seconds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import itertools
import json
import math
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from ml_collections import ConfigDict

from coevolve_jax import build, preemption
from coevolve_jax import config as configs
from coevolve_jax.build import Policy
from coevolve_jax.distributed.gathering import in_memory, on_one_device
from coevolve_jax.grpo.learner import Learner, TrainState
from coevolve_jax.grpo.packing import Batch
from coevolve_jax.models import hf_io
from coevolve_jax.preemption import Preempted
from coevolve_jax.records import checkpoint
from coevolve_jax.rollout.engine import Completion, Engine
from coevolve_jax.rollout.native.engine import NativeEngine
from coevolve_jax.rollout.native.lockstep import Lockstep, LockstepEngine

_turns = itertools.count()  # of what was said; every process counts alike, over all runs of its life
_said: list[str] = []  # keys of what process 0 said and the service still has
_FAILED = "coevolve/failed/"
_ASKED = "coevolve/asked/"
_POLL_SECONDS = 1  # so often a process that waits looks up: for Ctrl-C, and whether another one has failed
_INSIST_SECONDS = (
    40  # after which a process that is still there is interrupted again; ending a server takes 30
)
_OVER, _PREEMPTED = "the run is over", "the run was asked to end"
_SENT = {"batch": lambda arrays: Batch(*arrays), "prompts": tuple}  # arguments that the devices broadcast
# Those that each process has, on its devices or because they were sent.
_HELD = ("params", "served", "state", "old_logprobs", *_SENT)
_SHARE = "put --workdir on a file system that all processes share."

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


class Failed(RuntimeError):
    """Another process of the run has failed; the message says which and why."""


@contextlib.contextmanager
def together(config: ConfigDict) -> Iterator[None]:
    """Around `train`: all processes of the run begin with one config, and end together.

    Alone, it does nothing. Raises ValueError, in every process, where configs differ or the mesh leaves
    devices out.
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
            _tell(_PREEMPTED)
        raise
    except BaseException as error:
        with contextlib.suppress(KeyboardInterrupt):  # of a watch that has just seen why
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
        _tell(_OVER)


def _by_all(
    method: Callable[Concatenate[Leader, _Arguments], _Result],
) -> Callable[Concatenate[Leader, _Arguments], _Result]:
    """A method of Leader that all processes run: before the leader does, it tells the others which and with what."""
    signature = inspect.signature(method)

    @functools.wraps(method)
    def call(leader: Leader, *arguments: _Arguments.args, **named: _Arguments.kwargs) -> _Result:
        if jax.process_count() == 1:
            return method(leader, *arguments, **named)
        given = signature.bind(leader, *arguments, **named).arguments
        del given["self"]
        with leader._turn:  # a tick of the engine comes from a thread of its own
            leader._tell_call(method.__name__, given)
            return _by_turns(method(leader, *arguments, **named))

    return call


def _by_turns(result: _Result) -> _Result:
    """The result of a call; on CPUs when it is there. Other devices run one program after the other, but CPUs would exchange
    those of an update and of a tick that follows it at one time, and gloo takes the messages of one for the other's."""
    return jax.block_until_ready(result) if jax.default_backend() == "cpu" else result


class Leader:
    """The learner as process 0 has it: each call is made by all processes, with the same arguments.

    A follower has one too, on which `follow` makes the leader's calls. What lies on the devices of all processes
    travels as a name (`_held`): each has its own part of it. Alone, nobody is told anything.

    The policy's parameters are let go when the state is there, unless the learner keeps them as its reference.

    Made in process 0 when all followers have loaded their parts. What the engine is, and where it computes, is in the
    config; of several processes' parameters, one elsewhere is given no more digits than it computes in. It raises what
    the learner, checkpoint.py and hf_io raise, and ValueError for parameters, a state or scores that are not the ones
    that the followers hold: those of the last call that returned some.
    """

    def __init__(self, learner: Learner, policy: Policy, config: ConfigDict):
        self._learner, self._policy, self._config = learner, policy, config
        self.routing, self.scores, self.operations = learner.routing, learner.scores, learner.operations
        self._writer = checkpoint.Writer()
        self._held: dict[str, Any] = {"params": policy.params}
        self._turn = threading.Lock()  # held while a call is told and made
        self._here = config.engine.name == "native"
        self._spread = self._here and bool(config.engine.get("sharded"))
        self._lockstep: Lockstep | None = None
        if (
            jax.process_index() == 0 and jax.process_count() > 1
        ):  # most of what fails fails while a follower loads
            turn = next(_turns)
            for index in range(1, jax.process_count()):
                _wait_for(f"coevolve/ready/{turn}/{index}")

    def engine(self, workdir: Path) -> Engine:
        """What config.engine names, with the policy before RL; to be closed by the caller. It raises what `build.engine`
        does. Where it computes on the devices of several processes, each has one (lockstep.py)."""
        if self._spread and jax.process_count() > 1:
            return LockstepEngine(self, self._start_engine())
        return build.engine(self._config, self._initial_policy(), workdir)

    @_by_all
    def _start_engine(self) -> NativeEngine:
        engine = build.engine(self._config, self._policy)
        assert isinstance(engine, NativeEngine)
        self._lockstep = Lockstep(engine)
        return engine

    @_by_all
    def tick(
        self,
        new: list[dict],
        prompts: tuple[np.ndarray] | None,
        conversation_ids: list[int],
        released: list[int],
    ) -> list[Completion | None]:
        """As of `Lockstep`, of each process's engine."""
        assert self._lockstep
        answers = self._lockstep.tick(new, prompts, conversation_ids, released)
        if conversation_ids:  # what was sampled depends on all processes, so all have heard what came before
            _forget()
        return answers

    @_by_all
    def serve(self, served: Any, version: int) -> None:
        """Each process's engine takes the parameters that `policy` last returned."""
        assert self._lockstep
        self._lockstep.engine.update_weights(served, version)
        self._held["served"] = None

    @_by_all
    def _initial_policy(self) -> Policy:
        """The policy before RL, with parameters for the engine."""
        return dataclasses.replace(self._policy, params=self._for_engine(self._policy.params))

    @_by_all
    def init(self, params: Any) -> TrainState:
        """params: the policy before RL."""
        state = self._hold("state", self._learner.init(params))
        self._begun()
        return state

    @_by_all
    def restore(self, directory: str | os.PathLike) -> tuple[int, TrainState, dict] | None:
        """As of `checkpoint.restore`. Raises ValueError where a process finds another checkpoint than process 0."""
        us, workdir = jax.process_index(), checkpoint.absolute(directory).parent
        if us > 0 and "://" not in str(workdir) and not workdir.is_dir():
            raise ValueError(f"Process {us} does not see {workdir} of process 0: {_SHARE}")
        found = checkpoint.restore(directory, self._learner.abstract_state)
        step, state = found[:2] if found else (None, None)
        if step != (theirs := _of_leader(step)):
            raise ValueError(
                f"Process {us} restored the checkpoint of step {step}, process 0 that of step {theirs}: {_SHARE}"
            )
        self._hold("state", state)
        if found:
            self._begun()
        return found

    @_by_all
    def score(self, state: TrainState, batch: Batch[np.ndarray]) -> jax.Array:
        return self._hold("old_logprobs", self._learner.score(state, batch))

    @_by_all
    def update(
        self, state: TrainState, batch: Batch[np.ndarray], old_logprobs: jax.Array | None = None
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        """old_logprobs: what `score` last returned, or None."""
        state, learned = self._learner.update(state, batch, old_logprobs)
        return self._hold("state", state), learned

    @_by_all
    def policy(self, state: TrainState) -> Any:
        """The policy's parameters for the engine."""
        params = self._for_engine(self._learner.policy(state))
        return self._hold("served", params) if self._spread else params

    @_by_all
    def save(
        self, directory: str | os.PathLike, step: int, state: TrainState, saved: Mapping, *, keep: int
    ) -> None:
        """As `checkpoint.Writer.save` of `state` and the JSON values `saved`."""
        self._writer.save(directory, step, state, saved, keep=keep)

    def close(self) -> None:
        """Waits for the last save. Each process waits for its own part of it."""
        self._writer.close()
        if self._lockstep:
            self._lockstep.engine.close()

    @_by_all
    def save_policy(self, state: TrainState, folder: str | os.PathLike) -> None:
        """Writes the policy as a Hugging Face folder, from where it lies: it is whole nowhere."""
        hf_io.save(folder, self._policy.config, self._learner.policy(state))

    def _for_engine(self, params: Any) -> Any:
        """As they lie, where the engine computes there; whole on one device, where it computes on that; else in the
        leader's memory, where other processes hold a part of them."""
        if self._here and not self._spread:
            return on_one_device(params)
        if self._spread or jax.process_count() == 1:
            return params
        return in_memory(params, self._config.engine.dtype)

    def _begun(self) -> None:
        """Lets the policy before RL go, unless the learner needs it."""
        if not self._learner.keeps_reference:
            self._policy.params = self._held["params"] = None

    def _hold(self, name: str, value: Any) -> Any:
        """The value, which later calls may name."""
        if jax.process_count() > 1:
            self._held[name] = value
        return value

    def _tell_call(self, method: str, given: Mapping[str, Any]) -> None:
        """Says what to call and with what; sends the batch, unless the followers have it from the call before."""
        values = {name: _as_json(name, x) for name, x in given.items() if name not in _HELD or x is None}
        held = [name for name in given if name not in values]
        for name in held:
            if name not in _SENT and given[name] is not self._held.get(name):
                raise ValueError(
                    f"Leader.{method} was given another `{name}` than the last one, and the other processes hold "
                    "no other: pass what the last call returned."
                )
        sent = {
            name: given[name] for name in held if name in _SENT and given[name] is not self._held.get(name)
        }
        shapes = {name: [[x.dtype.name, x.shape] for x in arrays] for name, arrays in sent.items()}
        _tell([method, values, held, shapes])
        for name, arrays in sent.items():
            multihost_utils.broadcast_one_to_all(arrays)
            self._hold(name, arrays)

    def _repeat(self, method: str, values: dict, held: list[str], sent: Mapping[str, list]) -> None:
        """Makes, in a follower, the call that `_tell_call` told."""
        for name, shapes in sent.items():
            empty = _SENT[name](np.zeros(shape, dtype) for dtype, shape in shapes)
            self._hold(name, multihost_utils.broadcast_one_to_all(empty))
        _by_turns(
            getattr(Leader, method).__wrapped__(self, **values, **{name: self._held[name] for name in held})
        )


def follow(learner: Learner, policy: Policy, config: ConfigDict) -> None:
    """Does what the leader tells until it says that the run is over. Raises Preempted where it was asked to end."""
    _service().key_value_set(f"coevolve/ready/{next(_turns)}/{jax.process_index()}", "")
    with contextlib.closing(Leader(learner, policy, config)) as ours:
        while (call := _hear()) not in (_OVER, _PREEMPTED):
            ours._repeat(*call)
    if call == _PREEMPTED:
        raise Preempted


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


def _as_json(name: str, value: Any) -> Any:
    """The argument as the followers are told it."""
    if name in ("directory", "folder"):
        return str(checkpoint.absolute(value))
    return {} if name == "saved" else value  # what is saved besides arrays is written by process 0 alone


def _of_leader(value: Any) -> Any:
    """The JSON value that process 0 passes, in every process."""
    if jax.process_index() > 0:
        return _hear()
    _tell(value)
    return value


def _tell(what: Any) -> None:
    """Says a JSON value to the followers."""
    if jax.process_count() > 1:
        _said.append(f"coevolve/turn/{next(_turns)}")
        _service().key_value_set(_said[-1], json.dumps(what))


def _forget() -> None:
    """Lets the service forget what all followers have heard: everything that was said."""
    for key in _said:
        _service().key_value_delete(key)
    _said.clear()


def _hear() -> Any:
    """What the leader says next."""
    return json.loads(_wait_for(f"coevolve/turn/{next(_turns)}"))


def _wait_for(key: str) -> str:
    """What another process sets, be it in hours. Raises Failed where one has failed."""
    while True:
        try:
            return _service().blocking_key_value_get(key, _POLL_SECONDS * 1000)
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
        if why := _failure():
            raise Failed(why)


def _watch(over: threading.Event) -> None:
    """Interrupts the main thread, as Ctrl-C would, where another process has failed; and again, since Python drops
    what is raised while it runs a finaliser or a callback. Where one was asked to end, the leader is asked too."""
    main = threading.main_thread().ident
    assert main is not None  # it runs
    while not over.wait(_POLL_SECONDS):
        if _failure():
            signal.pthread_kill(main, signal.SIGINT)
            over.wait(_INSIST_SECONDS)
        elif preemption.asked():
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                _service().key_value_set(f"{_ASKED}{jax.process_index()}", "", allow_overwrite=True)
        elif jax.process_index() == 0 and _told(_ASKED):
            signal.pthread_kill(main, signal.SIGUSR1)


def _failure() -> str | None:
    """Which other process has failed and why, if one has."""
    ours = f"{_FAILED}{jax.process_index()}"
    for key, what in _told(_FAILED):
        if key != ours:
            return f"Process {key.removeprefix(_FAILED)} has ended ({what})"
    return None


def _told(folder: str) -> list[tuple[str, str]]:
    """The keys of a folder and what was set; nothing where the service is gone."""
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        return _service().key_value_dir_get(folder)
    return []


def _service() -> Any:
    """The coordination service's client, which JAX itself does not show."""
    return ocp.multihost.get_jax_distributed_client()
