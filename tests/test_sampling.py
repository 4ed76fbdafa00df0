"""Dynamic sampling, the choice of groups and their place in a checkpoint, with an agent that only makes up rewards."""

import dataclasses
import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
from ml_collections import ConfigDict

from coevolve_jax import config as configs, sampling, train
from coevolve_jax.synthesis.pipeline import SynthesisStats
from coevolve_jax.synthesis.task_pool import TaskPool
from coevolve_jax.grpo.filter import FilterState
from coevolve_jax.state import RunState
from coevolve_jax.types import Call, Task, Turn
from grpo_cases import trajectory


def pool(n: int) -> TaskPool:
    tasks = TaskPool()
    tasks.add([Task(f"t{i}", "bfcl", ("Math",), {"i": i}, (Turn("q", (Call("f", {}),)),)) for i in range(n)])
    return tasks


class MadeUpRewards:
    """Every third task (or every `period`-th) has a group with spread. Remembers what it rolled out."""

    def __init__(self, period: int = 3):
        self.rolled, self.period = [], period

    def rollouts(self, jobs, temperature):
        self.rolled.append([task.id for task, rollout_index, _ in jobs if rollout_index == 0])
        return [
            dataclasses.replace(
                trajectory(
                    np.random.default_rng(seed),
                    8,
                    reward=float(int(task.id[1:]) % self.period == 0 and rollout_index),
                ),
                task_id=task.id,
                rollout_index=rollout_index,
            )
            for task, rollout_index, seed in jobs
        ]


def settings(**learner) -> ConfigDict:
    return ConfigDict(
        dict(
            seed=0,
            data=dict(new_share=0.0),
            rollout=dict(tasks_per_step=6, group_size=2, temperature=1.0),
            learner={**dict(dynamic_sampling=0, group_filter=False, skip_dead_groups=False), **learner},
        )
    )


def alive(trajectories) -> int:
    return sum(s > 0 for s in sampling.group_spreads(trajectories).values())


def test_groups_without_spread_are_replaced_round_by_round():
    plain, more = MadeUpRewards(), MadeUpRewards()
    first, _ = sampling.sample(settings(), plain, pool(60), 4)
    batch, trajectories = sampling.sample(settings(dynamic_sampling=20), more, pool(60), 4)
    assert len(plain.rolled) == 1 and batch[:6] == first  # the first round is that without dynamic sampling
    assert alive(trajectories) == 6
    assert len({t.id for t in batch}) == len(batch) == len(trajectories) / 2
    found = 0
    for ids in more.rolled:  # each round asks for as many tasks as are missing
        assert len(ids) == 6 - found
        found += sum(int(i[1:]) % 3 == 0 for i in ids)
    chosen, _ = train.choose(settings(dynamic_sampling=20), trajectories, FilterState())
    assert len(chosen) == 12 and alive(chosen) == 6


def test_the_rounds_are_bounded_and_the_same_again():
    config = settings(dynamic_sampling=2)
    one, two = MadeUpRewards(period=100), MadeUpRewards(period=100)
    results = [sampling.sample(config, agent, pool(60), 7) for agent in (one, two)]
    assert one.rolled == two.rolled and len(one.rolled) == 3
    for a, b in zip(results[0][1], results[1][1], strict=True):
        np.testing.assert_array_equal(a.ids, b.ids)


def test_a_small_pool_is_not_rolled_out_twice():
    agent = MadeUpRewards()
    batch, _ = sampling.sample(settings(dynamic_sampling=9), agent, pool(8), 0)
    assert sorted(t.id for t in batch) == sorted({t.id for t in batch}) and len(batch) <= 8


def test_dead_groups_stay_unless_they_are_to_be_left_out():
    _, trajectories = sampling.sample(settings(), MadeUpRewards(), pool(60), 4)
    n = alive(trajectories)
    assert 0 < n < 6
    assert len(train.choose(settings(), trajectories, FilterState())[0]) == 12
    assert len(train.choose(settings(skip_dead_groups=True), trajectories, FilterState())[0]) == 2 * n
    chosen, state = train.choose(settings(group_filter=True), trajectories, FilterState())
    assert len(chosen) == 2 * n and state.seen == n


def test_the_filter_goes_through_a_checkpoint_bit_for_bit():
    state = FilterState(1 / 3, 0.1 + 0.2, 21)
    run = RunState(3, pool(2), [], {}, SynthesisStats(), filter=state)
    assert RunState.from_json(json.loads(json.dumps(run.to_json())), None).filter == state


@pytest.mark.parametrize(
    "key, value, why",
    [
        ("ratio", "group", "one of token, sequence"),
        ("kl", "k4", "one of k1, k2, k3, none"),
        ("dtype", "float16", "one of float32, bfloat16"),
        ("epochs", 0, "at least 1"),
        ("tis_cap", -1.0, "0 or more"),
        ("learning_rate", float("inf"), "above 0 and finite"),
        ("adam_b2", 0.8, "more than the square of .* \\(0.9\\)"),
        ("schedule", "cosine", "config.learner.decay_steps is 0.*cosine schedule"),
    ],
)
def test_settings_that_do_not_exist_or_fit_are_named(key, value, why):
    spec = importlib.util.spec_from_file_location(
        "tiny", Path(__file__).parent.parent / "configs" / "bfcl_tiny.py"
    )
    tiny = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tiny)
    config = tiny.get_config()
    configs.check(config)
    config.learner[key] = value
    with pytest.raises(ValueError, match=why):
        configs.check(config)
