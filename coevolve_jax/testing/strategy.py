"""The conformance suite of strategies. It runs in seconds, without a model or an environment.

from coevolve_jax.testing.strategy import check_strategy
check_strategy("my_package.my_method", config)
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from types import ModuleType
from typing import Any, cast

import numpy as np
from ml_collections import ConfigDict

from coevolve_jax import config as configs
from coevolve_jax import names
from coevolve_jax.loop.evolve import FirstUse
from coevolve_jax.strategies.base import SHARED, Lab, StepReport, Strategy, help_of, trajectories_of
from coevolve_jax.synthesis.pipeline import SynthesisStats
from coevolve_jax.synthesis.signals import task_scores
from coevolve_jax.synthesis.task_pool import TaskPool
from coevolve_jax.testing.made_up import MadeUpLab, MadeUpRoll, made_up_pool, said
from coevolve_jax.types import Group, Hint, Step, Task, TrainingSample

HASHES = ("1", "2", "3")  # values of PYTHONHASHSEED, which decides the order of a set of texts
TELL = (
    "import pickle, sys; from coevolve_jax.testing.strategy import tell; tell(*pickle.load(sys.stdin.buffer))"
)


def check_strategy(name: str, config: ConfigDict, steps: int | None = None, alone: bool = True) -> None:
    """Drives a strategy through made-up steps, beside two twins.

    One twin is restored from JSON before each step, by a fresh copy of its module. The other one's invalid
    rollouts show something else, and its `compute_advantages` gets none of them. Then the same steps run in
    processes of their own, in which sets have other orders.

    Args:
      name: like config.strategy.name.
      config: of a run; its own strategy is ignored.
      steps: GRPO steps, by default enough for two evolutions.
      alone: whether to start these processes, which takes some seconds.

    Raises:
      AssertionError: one sentence says how the strategy breaks the contract of strategies/base.py.
      ValueError: there is no such strategy.
    """
    module = names.module("strategies", name, "strategy.name", ["make"], takes=("config", "state"))
    plain, count = _settled(name, config, steps)
    read: set[str] = set()
    config = noting(plain, read)
    strategy, other = module.make(config), _anew(module).make(config)
    helps, needs = help_of(strategy) is not None, configs.needs(config)
    assert helps == ("help" in needs), (
        f"{name}: it has {'a' if helps else 'no'} method help, and NEEDS of its module has {sorted(needs)}: "
        "have both or neither."
    )
    pools = made_up_pool(config), made_up_pool(config), made_up_pool(config)
    state = _as_json(strategy.to_json(), f"{name}: to_json of a new strategy")
    for step in range(count):
        twin = _anew(module).make(config, state)
        seen = [_step(name, config, s, pool, step) for s, pool in zip((strategy, twin), pools)]
        assert seen[0] == seen[1], (
            f"{name}: step {step} differs after a restart (to_json leaves something out, or something random "
            "is not drawn from seeding.rng_for)."
        )
        state = _as_json(strategy.to_json(), f"{name}: to_json after step {step}")
        assert state == _as_json(twin.to_json(), name), (
            f"{name}: after step {step} the state of a restarted strategy differs from that of one "
            "that went on."
        )
        elsewhere = _step(name, config, other, pools[2], step, altered=True)
        assert seen[0] == elsewhere and state == _as_json(other.to_json(), name), (
            f"{name}: step {step} differs where invalid rollouts show something else or are absent; leave "
            "those out (Group.valid)."
        )
    told = configs.reads(config)
    unsaid = sorted((read & set(SHARED)) - (told or set(SHARED)))
    assert not unsaid, (
        f"{name}: it reads {', '.join(f'config.{key}' for key in unsaid)}, which READS of its module does "
        "not name: add schedule.KEYS if `evolves` is asked, base.SIGNALS for a `Static`."
    )
    if alone:
        check_order({name: plain}, steps)


def check_order(chosen: Mapping[str, ConfigDict], steps: int | None = None) -> None:
    """Checks that strategies do the same where sets have another order: the last part of `check_strategy`.

    chosen: the config of each strategy. One process for each of HASHES runs all of them.
    """
    path = os.pathsep.join(part or os.getcwd() for part in sys.path)
    own = {**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}
    given = pickle.dumps(({name: config.to_dict() for name, config in chosen.items()}, steps))

    def told_with(seed: str) -> dict[str, list[str]]:
        environ = {**own, "PYTHONHASHSEED": seed}
        done = subprocess.run([sys.executable, "-c", TELL], input=given, env=environ, stdout=subprocess.PIPE)
        assert done.returncode == 0, f"{', '.join(chosen)}: fails in a process of its own, as said above."
        return json.loads(done.stdout.splitlines()[-1])

    with ThreadPoolExecutor() as threads:
        told = list(threads.map(told_with, HASHES))
    for name in chosen:
        apart = [step for step, found in enumerate(zip(*(one[name] for one in told))) if len(set(found)) > 1]
        assert not apart, (
            f"{name}: step {apart[0]} differs between processes, so two runs of one seed would (a set has "
            "another order in each, and hash() other values: sort the set, or use a dict)."
        )


def tell(chosen: Mapping[str, dict[str, Any]], steps: int | None) -> None:
    """Prints, as a line of JSON, a digest of what each strategy did and kept at each step."""
    told = {}
    for name, values in chosen.items():
        config, count = _settled(name, ConfigDict(values), steps)
        strategy = names.module("strategies", name, "strategy.name", ["make"]).make(config)
        pool, found = made_up_pool(config), []
        for step in range(count):
            done = [_step(name, config, strategy, pool, step), _as_json(strategy.to_json(), name)]
            text = json.dumps(done, sort_keys=True, default=repr)
            found.append(hashlib.sha256(text.encode()).hexdigest())
        told[name] = found
    print(f"\n{json.dumps(told)}")


def _settled(name: str, config: ConfigDict, steps: int | None) -> tuple[ConfigDict, int]:
    """The config of a strategy's made-up run, and its steps."""
    config = copy.deepcopy(config)
    config.strategy = configs.strategy(name)
    config.testbed = {"weak_tools": ["tool_0", "tool_1"], **config.get("testbed", {})}
    count = steps or 2 * config.evolution.every
    config.steps = count + config.evolution.freeze_last_steps
    return config, count


def _anew(module: ModuleType) -> Any:
    """Executes a module again. Returns the copy, whose variables and classes are as after the import."""
    spec = cast(ModuleSpec, module.__spec__)
    fresh = module_from_spec(spec)
    cast(Loader, spec.loader).exec_module(fresh)
    return fresh


def noting(config: ConfigDict, read: set[str]) -> ConfigDict:
    """Returns a copy whose sections evolution and signals note in `read` each key that is read."""

    class Section(ConfigDict):
        def __getitem__(self, key: str) -> Any:
            read.update(f"{section}.{key}" for section, own in made.items() if own is self)
            return super().__getitem__(key)

    made: dict[str, ConfigDict] = {}
    made.update({section: Section(config[section].to_dict()) for section in ("evolution", "signals")})
    return ConfigDict({**config.to_dict(), **made})


def _step(
    name: str, config: ConfigDict, strategy: Strategy, tasks: TaskPool, step: int, altered: bool = False
) -> Any:
    """Runs one step with its checks. Returns all its results, for comparison. altered: as in MadeUpRoll."""
    roll, known = MadeUpRoll(config, step, altered=altered), {t.id for t in tasks}
    state = _as_json(strategy.to_json(), name)
    groups = strategy.collect(step, tasks, roll)
    roll.closed = True
    in_turn = configs.needs(config) & {"fresh", "help", "branch"}  # these rule out rollout.max_staleness
    assert in_turn or state == _as_json(strategy.to_json(), name), (
        f"{name}: collect changed the strategy's state at step {step}, and it may run some steps ahead "
        "(config.rollout.max_staleness): change it in observe, or list fresh in NEEDS of its module."
    )
    assert groups and all(isinstance(g, Group) for g in groups), (
        f"{name}: collect returned no groups at step {step}."
    )
    for g in groups:
        assert any(g is made for made in roll.made), (
            f"{name}: collect returned a group that roll did not make."
        )
        assert g.task.id in known, f"{name}: collect rolled out task {g.task.id!r}, which is not in D_t."
    numbers = [(t.task_id, t.rollout_index) for t in trajectories_of(groups)]
    assert len(set(numbers)) == len(numbers), f"{name}: collect returned a rollout twice at step {step}."

    before = [t.outcome for t in trajectories_of(groups)]
    samples = strategy.compute_advantages([Group(g.task, g.valid) for g in groups] if altered else groups)
    assert before == [t.outcome for t in trajectories_of(groups)], (
        f"{name}: compute_advantages changed an outcome."
    )
    for s in samples:
        _check_sample(name, s)

    found = strategy.observe(step, groups)
    assert isinstance(found, StepReport), f"{name}: observe returned {type(found).__name__}, not StepReport."
    assert all(isinstance(n, int) and n >= 0 for n in found.counts.values()), (
        f"{name}: StepReport.counts holds {dict(found.counts)}; counts are whole numbers from 0."
    )
    rows = _as_json(list(found.rows), f"{name}: StepReport.rows of step {step}")
    tasks.record(task_scores(groups))

    states, lab = [], MadeUpLab(config, tasks, altered=altered)
    noticed = FirstUse(lab, lambda: states or states.append(_as_json(strategy.to_json(), name)))
    grown = strategy.evolve(step, cast(Lab, noticed))
    keeps = lab.probed or "ask" in configs.needs(config)
    assert not states or keeps or states[0] == _as_json(strategy.to_json(), name), (
        f"{name}: evolve changed the strategy's state after its first use of the lab, at step {step}; it may "
        "run beside the next steps from there on (config.evolution.async_steps)."
    )
    assert grown is None or isinstance(grown, SynthesisStats), (
        f"{name}: evolve returned {type(grown).__name__}, not SynthesisStats or None."
    )
    added = len(tasks) - len(known)
    assert added == (grown.added if grown else 0), (
        f"{name}: D_t grew by {added} tasks at step {step} and evolve says {grown.added if grown else 0}."
    )
    assert known <= {t.id for t in tasks}, f"{name}: evolve took tasks out of D_t at step {step}."
    past = [t.id for t in tasks if t.id not in known | lab.added]
    assert not past, (
        f"{name}: task {past[0]!r} came into D_t past the lab at step {step}: add it by lab.synthesize or "
        "lab.adopt, which check it."
    )
    helped = _helped(name, strategy, list(tasks)[:4], roll.first_steps)
    learned = [[None if x is None else np.asarray(x).tolist() for x in _streams(s)] for s in samples]
    new = [t.to_json() for t in list(tasks)[len(known) :]]
    return numbers, roll.hints, helped, learned, dict(found.counts), rows, new


def _helped(name: str, strategy: Strategy, tasks: Sequence[Task], steps: Sequence[Step]) -> list:
    """Asks for help twice, as evaluations do. Returns the hints as text, for comparison."""
    help = help_of(strategy)
    if help is None:
        return []
    before = _as_json(strategy.to_json(), name)
    hints = [help(task.without_calls(), m) for _ in range(2) for task in tasks for m in range(2)]
    assert all(hint is None or isinstance(hint, Hint) for hint in hints), (
        f"{name}: help returned something else than a Hint or None."
    )
    given = [said(hint, steps) for hint in hints]
    half = len(given) // 2
    assert given[:half] == given[half:] and before == _as_json(strategy.to_json(), name), (
        f"{name}: help changed the strategy's state; an evaluation must leave no trace."
    )
    return given[:half]


def _streams(sample: TrainingSample) -> tuple:
    return sample.advantages, sample.ce_weights, sample.ref_logprobs


def _check_sample(name: str, sample: TrainingSample) -> None:
    t = sample.trajectory
    where = f"{name}: the sample of rollout {t.rollout_index} of task {t.task_id}"
    assert t.outcome.valid, f"{where} is of an invalid rollout; leave those out."
    assert any(x is not None for x in _streams(sample)[:2]), f"{where} has neither advantages nor ce_weights."
    for key, x in zip(("advantages", "ce_weights", "ref_logprobs"), _streams(sample), strict=True):
        if x is not None:
            assert np.shape(x) == t.ids.shape, (
                f"{where} has {key} of shape {np.shape(x)} for {len(t.ids)} tokens."
            )
            assert np.isfinite(x).all(), f"{where} has {key} that are not finite."


def _as_json(value: Any, what: str) -> Any:
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise AssertionError(f"{what} is not JSON: {error}.") from None
