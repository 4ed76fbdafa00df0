"""Several processes as one run: process 0 leads, the others follow.

Process 0 runs the loop of train.py: environments, agent, engine, evolution, logs, report. The policy and the
optimiser state lie on the devices of all processes. All must therefore start every program that touches them,
in the same order. `Leader` publishes each call, by name and arguments, and then makes it. `follow` makes the
same call.

How arguments travel:

    JSON values               with the call (loop/rendezvous.py)
    batches, prompts          broadcast by the devices, since they are large
    arrays on all devices     as a name, for what the last call returned; each process holds its part of them

All processes share one file system. They read the same checkpoints, and each writes its part of them. Process
0 alone writes everything else in the workdir.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils
from ml_collections import ConfigDict

from coevolve_jax import build, preemption
from coevolve_jax.build import Policy
from coevolve_jax.grpo.learner import Learner, TrainState
from coevolve_jax.grpo.packing import Batch
from coevolve_jax.loop import rendezvous
from coevolve_jax.loop.trainer import Trainer
from coevolve_jax.preemption import Preempted
from coevolve_jax.records import checkpoint
from coevolve_jax.rollout.engine import Completion, Engine
from coevolve_jax.rollout.native.engine import NativeEngine
from coevolve_jax.rollout.native.lockstep import Lockstep, LockstepEngine

# Arguments that the devices broadcast.
_BROADCAST = {"batch": lambda arrays: Batch(*arrays), "prompts": tuple}
# Arguments that travel as a name: every process holds its part, or has received them by broadcast.
_BY_NAME = ("params", "served", "state", "branch", "old_logprobs", *_BROADCAST)
_SHARE = "put --workdir on a file system that all processes share."

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def lead(learner: Learner, policy: Policy, config: ConfigDict) -> Trainer | Leader:
    """Returns the learner as the loop uses it: a `Trainer`, or a `Leader` with several processes."""
    if jax.process_count() == 1:
        return Trainer(learner, policy, config)
    return Leader(learner, policy, config)


def follow(learner: Learner, policy: Policy, config: ConfigDict) -> None:
    """Repeats the leader's calls until the run is over. Raises Preempted if the run was asked to end."""
    rendezvous.meet()
    with contextlib.closing(_Part(learner, policy, config)) as part:
        while (call := rendezvous.receive()) not in rendezvous.ENDS:
            part.repeat(*call)
    if call == rendezvous.PREEMPTED:
        raise Preempted


class _Part:
    """One process's part of every call: its trainer, and the arrays that calls name."""

    def __init__(self, learner: Learner, policy: Policy, config: ConfigDict):
        self.trainer = trainer = Trainer(learner, policy, config)
        self.init, self.score, self.update = trainer.init, trainer.score, trainer.update
        self.aim, self.influence = trainer.aim, trainer.influence
        self.fork, self.update_branch = trainer.fork, trainer.update_branch
        self.save, self.save_policy = trainer.save, trainer.save_policy
        self.initial_policy = trainer.initial_policy
        self._policy, self._config = policy, config
        self._held: dict[str, Any] = {}
        self._lockstep: Lockstep | None = None

    # ---- Calls that differ from the trainer's, or that only several processes have ----------------------

    def restore(self, directory: str | os.PathLike) -> tuple[int, TrainState, dict] | None:
        """Does `Trainer.restore`. Raises ValueError if a process finds another checkpoint than process 0."""
        us, workdir = jax.process_index(), checkpoint.absolute(directory).parent
        if us > 0 and "://" not in str(workdir) and not workdir.is_dir():
            raise ValueError(f"Process {us} does not see {workdir} of process 0: {_SHARE}")
        found = self.trainer.restore(directory)
        step, state = found[:2] if found else (None, None)
        if step != (theirs := rendezvous.shared(step)):
            raise ValueError(
                f"Process {us} restored the checkpoint of step {step}, process 0 that of step {theirs}: "
                f"{_SHARE}"
            )
        self._held["state"] = state
        return found

    def policy(self, state: TrainState) -> Any:
        """Does `Trainer.policy`."""
        params = self.trainer.policy(state)
        if self.trainer.sharded_engine:  # held only until `serve`, since they may be a copy
            self._held["served"] = params
        return params

    def policy_of_branch(self, branch: TrainState) -> Any:
        """Does `Trainer.policy_of_branch`."""
        return self.policy(branch)

    def serve(self, served: Any, version: int) -> None:
        """Gives each process's engine the parameters that `policy` last returned."""
        assert self._lockstep
        self._lockstep.engine.update_weights(served, version)
        self._held["served"] = None

    def start_engine(self) -> NativeEngine:
        """Starts each process's part of an engine on the devices of all."""
        engine = build.engine(self._config, self._policy)
        assert isinstance(engine, NativeEngine)
        self._lockstep = Lockstep(engine)
        return engine

    def tick(
        self,
        new: list[dict],
        prompts: tuple[np.ndarray] | None,
        conversation_ids: list[int],
        released: list[int],
    ) -> list[Completion | None]:
        """Does `Lockstep.tick` for each process's engine."""
        assert self._lockstep
        answers = self._lockstep.tick(new, prompts, conversation_ids, released)
        # Sampling needs all processes, so all have received everything published before.
        if conversation_ids:
            rendezvous.forget_published()
        return answers

    # ---- How a call is published and made ----------------------------------------------------------------

    def publish(self, method: str, given: Mapping[str, Any]) -> None:
        """Publishes a call and its arguments. Broadcasts the arrays that the followers do not have yet."""
        values = {name: _as_json(name, x) for name, x in given.items() if name not in _BY_NAME or x is None}
        by_name = [name for name in given if name not in values]
        for name in by_name:
            if name not in _BROADCAST and given[name] is not self._named(name):
                raise ValueError(
                    f"Leader.{method} was given another `{name}` than the last one, and the other processes "
                    "hold no other: pass what the last call returned."
                )
        sent = {
            name: given[name]
            for name in by_name
            if name in _BROADCAST and given[name] is not self._named(name)
        }
        shapes = {name: [[x.dtype.name, x.shape] for x in arrays] for name, arrays in sent.items()}
        rendezvous.publish([method, values, by_name, shapes])
        for name, arrays in sent.items():
            multihost_utils.broadcast_one_to_all(arrays)
            self._held[name] = arrays

    def repeat(self, method: str, values: dict, by_name: list[str], sent: Mapping[str, list]) -> None:
        """Makes the call that the leader has published, in a follower."""
        for name, shapes in sent.items():
            empty = _BROADCAST[name](np.zeros(shape, dtype) for dtype, shape in shapes)
            self._held[name] = multihost_utils.broadcast_one_to_all(empty)
        self.make(method, {**values, **{name: self._named(name) for name in by_name}})

    def make(self, method: str, arguments: Mapping[str, Any]) -> Any:
        """Makes the call in this process and holds the results that later calls may name."""
        result = getattr(self, method)(**arguments)
        if method == "init":
            self._held["state"] = result
        elif method == "update":
            self._held["state"] = result[0]
        elif method == "fork":
            self._held["branch"] = result
        elif method == "update_branch":
            self._held["branch"] = result[0]
        elif method == "score":
            self._held["old_logprobs"] = result
        # Accelerators run one program after the other. CPUs may overlap an update and the tick that follows
        # it, and gloo then confuses the messages of the two. So wait.
        return jax.block_until_ready(result) if jax.default_backend() == "cpu" else result

    def _named(self, name: str) -> Any:
        # Read the policy's parameters each time: holding them here would keep memory that the trainer frees.
        return self._policy.params if name == "params" else self._held.get(name)

    def close(self) -> None:
        """Waits for this process's part of the last save."""
        self.trainer.close()
        if self._lockstep:
            self._lockstep.engine.close()


def _by_all(
    method: Callable[Concatenate[Any, _Arguments], _Result],
) -> Callable[Concatenate[Leader, _Arguments], _Result]:
    """Makes a method of the leader, which publishes the call, then makes it in process 0."""
    signature = inspect.signature(method)

    @functools.wraps(method)
    def call(leader: Leader, *arguments: _Arguments.args, **named: _Arguments.kwargs) -> _Result:
        bound = signature.bind(leader, *arguments, **named).arguments
        given = {name: bound[name] for name in list(bound)[1:]}  # without self
        # An engine that runs ahead ticks in its own thread. The lock makes process 0 start calls in the order
        # of publication, as the followers do. A call that is published is made, whatever asks the run to end.
        main = threading.current_thread() is threading.main_thread()
        with preemption.whole() if main else contextlib.nullcontext(), leader._turn:
            leader._part.publish(method.__name__, given)
            return leader._part.make(method.__name__, given)

    return call


class Leader:
    """The trainers of all processes, as the loop in process 0 uses them: all make each call.

    The constructor returns when all followers have loaded their parts.

    Its methods raise the errors of `Trainer`. They raise ValueError for parameters, a state or scores other
    than those that the last call returned: the followers hold no others.
    """

    def __init__(self, learner: Learner, policy: Policy, config: ConfigDict):
        self._part, self._config = _Part(learner, policy, config), config
        self.routing, self.scores, self.flops = learner.routing, learner.scores, learner.flops
        self._turn = threading.Lock()  # held while a call is published and made
        # Most failures happen while weights load, so meet before the loop starts servers and workers.
        rendezvous.meet()

    init = _by_all(Trainer.init)
    restore = _by_all(_Part.restore)
    score = _by_all(Learner.score)
    update = _by_all(Learner.update)
    policy = _by_all(_Part.policy)
    aim = _by_all(Learner.aim)
    influence = _by_all(Learner.influence)
    fork = _by_all(Trainer.fork)
    update_branch = _by_all(Trainer.update_branch)
    policy_of_branch = _by_all(_Part.policy_of_branch)
    save = _by_all(Trainer.save)
    save_policy = _by_all(Trainer.save_policy)
    tick = _by_all(_Part.tick)
    serve = _by_all(_Part.serve)
    _initial_policy = _by_all(Trainer.initial_policy)
    _start_engine = _by_all(_Part.start_engine)

    def save_state(self, directory: str | os.PathLike, step: int, saved: Mapping) -> None:
        """Does `Trainer.save_state`, which process 0 does alone."""
        self._part.trainer.save_state(directory, step, saved)

    def engine(self, workdir: Path) -> Engine:
        """Does `Trainer.engine`. A sharded engine has a part in each process (rollout/native/lockstep.py)."""
        if self._part.trainer.sharded_engine:
            return LockstepEngine(self, self._start_engine())
        return build.engine(self._config, self._initial_policy(), workdir)

    def close(self) -> None:
        """Waits for process 0's part of the last save. The others wait for theirs when the run is over."""
        self._part.close()


def _as_json(name: str, value: Any) -> Any:
    """The argument in the form that the followers receive."""
    if name in ("directory", "folder"):
        return str(checkpoint.absolute(value))
    return {} if name == "saved" else value  # process 0 alone writes the JSON of a checkpoint
