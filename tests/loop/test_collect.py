"""Dynamic sampling, the choice of groups and their place in a checkpoint, with made-up rewards."""

import dataclasses
import functools
import importlib.util
import json
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from ml_collections import ConfigDict

from coevolve_jax import build
from coevolve_jax import config as configs
from coevolve_jax.grpo.filter import FilterState
from coevolve_jax.loop.collect import Roller
from coevolve_jax.loop.lab import Laboratory
from coevolve_jax.strategies.base import grpo_samples, trajectories_of
from coevolve_jax.strategies.batches import collect_batch
from coevolve_jax.synthesis.task_pool import TaskPool
from coevolve_jax.types import Call, Group, Outcome, Task, Turn
from tests.support.grpo_cases import trajectory
from tests.support.paths import ROOT


def pool(n: int) -> TaskPool:
    tasks = TaskPool()
    tasks.add([Task(f"t{i}", "bfcl", {"i": i}, (Turn("q", (Call("f", {}),)),)) for i in range(n)])
    return tasks


class MadeUpRewards:
    """Every third (or `period`-th) task has a group with spread. Records what it rolled out."""

    def __init__(self, period: int = 3):
        self.rolled, self.period = [], period

    def rollout_groups(self, tasks, seeds, temperature, hints=None):
        self.rolled.append([task.id for task in tasks])
        return [
            Group(task, tuple(self._made_up(task, m, seed) for m, seed in enumerate(row)))
            for task, row in zip(tasks, seeds, strict=True)
        ]

    def _made_up(self, task, rollout_index, seed):
        reward = float(int(task.id[1:]) % self.period == 0 and rollout_index)
        t = trajectory(np.random.default_rng(seed), 8, reward=reward)
        return dataclasses.replace(t, task_id=task.id, rollout_index=rollout_index)


def settings(**learner) -> ConfigDict:
    return ConfigDict(
        dict(
            seed=0,
            data=dict(min_evolved_share=0.0, sampling="uniform", sampling_floor=0.1, retire_after=0),
            rollout=dict(tasks_per_step=6, group_size=2, temperature=1.0),
            reward=dict(terms=()),
            learner={
                **dict(
                    dynamic_sampling=0,
                    group_filter=False,
                    filter_side="low",
                    filter_z=1.28,
                    filter_keep=0.5,
                    filter_decay=0.1,
                    filter_warmup=20,
                    skip_zero_variance_groups=False,
                    overlong_filtering=False,
                    advantage="group_std",
                ),
                **learner,
            },
        )
    )


def alive(groups) -> int:
    return sum(g.spread > 0 for g in groups)


def collect(agent, tasks, step, **learner):
    c = settings(**learner)
    return collect_batch(c, step, tasks, Roller(c, agent, step))


def ids(groups) -> list[str]:
    return [g.task.id for g in groups]


def test_groups_without_spread_are_replaced_round_by_round():
    plain, more = MadeUpRewards(), MadeUpRewards()
    first = collect(plain, pool(60), 4)
    groups = collect(more, pool(60), 4, dynamic_sampling=20)
    # The first round is that without dynamic sampling
    assert len(plain.rolled) == 1 and ids(groups)[:6] == ids(first)
    assert alive(groups) == 6
    assert len(set(ids(groups))) == len(groups) and all(len(g.trajectories) == 2 for g in groups)
    found = 0
    for drawn in more.rolled:  # each round asks for as many tasks as are missing
        assert len(drawn) == 6 - found
        found += sum(int(i[1:]) % 3 == 0 for i in drawn)
    samples, _ = grpo_samples(settings(dynamic_sampling=20), groups, FilterState())
    assert len(samples) == 12 and len({s.trajectory.task_id for s in samples}) == 6


def test_the_rounds_are_bounded_and_the_same_again():
    one, two = MadeUpRewards(period=100), MadeUpRewards(period=100)
    results = [trajectories_of(collect(agent, pool(60), 7, dynamic_sampling=2)) for agent in (one, two)]
    assert one.rolled == two.rolled and len(one.rolled) == 3
    for a, b in zip(*results, strict=True):
        np.testing.assert_array_equal(a.ids, b.ids)


def test_a_small_pool_is_not_rolled_out_twice():
    groups = collect(MadeUpRewards(), pool(8), 0, dynamic_sampling=9)
    assert sorted(ids(groups)) == sorted(set(ids(groups))) and len(groups) <= 8


def test_dead_groups_stay_unless_they_are_to_be_left_out():
    groups = collect(MadeUpRewards(), pool(60), 4)
    n = alive(groups)
    assert 0 < n < 6
    assert len(grpo_samples(settings(), groups, FilterState())[0]) == 12
    assert len(grpo_samples(settings(skip_zero_variance_groups=True), groups, FilterState())[0]) == 2 * n
    samples, state = grpo_samples(settings(group_filter=True), groups, FilterState())
    assert len(samples) == 2 * n and state.seen == n


def test_truncated_rollouts_leave_the_loss_and_stay_in_the_means():
    groups = [replace_stops(g, ("token_limit", "done")) for g in collect(MadeUpRewards(), pool(60), 4)]
    every = {id(s.trajectory): s for s in grpo_samples(settings(), groups, FilterState())[0]}
    left = grpo_samples(settings(overlong_filtering=True), groups, FilterState())[0]
    assert len(left) == 6 and [s.trajectory for s in left] == [g.trajectories[1] for g in groups]
    for s in left:
        np.testing.assert_array_equal(s.advantages, every[id(s.trajectory)].advantages)
    assert any(s.advantages.any() for s in left)  # over a truncated rollout, which counts in the mean
    for stop, kept in {"step_limit": 0, "context_limit": 0, "call_failed": 2, "done": 2}.items():
        group = replace_stops(groups[0], (stop, stop))
        assert len(grpo_samples(settings(overlong_filtering=True), [group], FilterState())[0]) == kept


def test_a_group_of_truncated_rollouts_is_replaced_as_one_without_spread_is():
    class Cut(MadeUpRewards):
        def rollout_groups(self, *args, **how):
            return [replace_stops(g, ("token_limit",) * 2) for g in super().rollout_groups(*args, **how)]

    agent, plain = Cut(), Cut()
    groups = collect(agent, pool(60), 4, dynamic_sampling=2, overlong_filtering=True)
    assert len(agent.rolled) == 3 and alive(groups)
    collect(plain, pool(60), 4, dynamic_sampling=2)
    assert len(plain.rolled[1]) < 6  # those with spread stayed
    on = settings(group_filter=True, overlong_filtering=True)
    assert grpo_samples(on, groups, FilterState()) == ([], FilterState())


def replace_stops(group, stops):
    made = [dataclasses.replace(t, stop=stop) for t, stop in zip(group.trajectories, stops, strict=True)]
    return dataclasses.replace(group, trajectories=tuple(made))


def test_spread_and_advantages_are_those_of_the_shaped_rewards():
    groups = collect(MadeUpRewards(), pool(60), 4)
    shaped = lambda group: [r + 0.5 * i for i, r in enumerate(group.rewards)]
    samples, _ = grpo_samples(settings(skip_zero_variance_groups=True), groups, FilterState(), rewards=shaped)
    assert len(samples) == 12  # shaped rewards have spread everywhere
    assert [s.trajectory.outcome.reward for s in samples] == [
        t.outcome.reward for t in trajectories_of(groups)
    ]
    for s in samples:
        assert s.advantages.shape == s.trajectory.ids.shape and s.advantages.dtype == np.float32


def test_invalid_rollouts_are_no_samples_and_move_no_mean():
    groups = collect(MadeUpRewards(), pool(60), 4)
    group = next(g for g in groups if g.spread > 0)
    lost = dataclasses.replace(
        group.trajectories[0], rollout_index=2, outcome=Outcome(0.9, True, valid=False)
    )
    with_lost = Group(group.task, (*group.trajectories, lost))
    kept, _ = grpo_samples(settings(), [group], FilterState())
    also, _ = grpo_samples(settings(), [with_lost], FilterState())
    assert [s.advantages[0] for s in kept] == [s.advantages[0] for s in also] and len(also) == 2
    assert grpo_samples(settings(), [Group(group.task, (lost,))], FilterState())[0] == []


def test_every_call_of_roll_and_every_role_has_seeds_of_its_own():
    seeds = []

    class Seeds(MadeUpRewards):
        def rollout_groups(self, tasks, own, temperature, hints=None):
            seeds.append(sum(own, []))
            return super().rollout_groups(tasks, own, temperature)

    tasks = list(pool(3))
    for _ in range(2):
        roll = Roller(settings(), Seeds(), 5)
        roll(tasks, 2)
        roll(tasks, 2)
        roll(tasks, 2, role="probe")
        assert roll.costs["rollouts/policy"] == 12 and roll.costs["rollouts/probe"] == 6
    assert seeds[:3] == seeds[3:] and len({tuple(s) for s in seeds}) == 3
    assert len({seed for call in seeds[:3] for seed in call}) == 18  # one for each rollout of each task


def test_probes_of_a_step_have_seeds_of_their_own_and_are_booked_once():
    seeds = []

    class Seeds(MadeUpRewards):
        def rollout_groups(self, tasks, own, temperature, hints=None):
            seeds.append(sum(own, []))
            return super().rollout_groups(tasks, own, temperature)

    roles = SimpleNamespace(costs=None, llm_calls=None)
    for _ in range(2):
        roller = functools.partial(Roller, settings(), Seeds())
        lab = Laboratory(TaskPool(), [], SimpleNamespace(roles=roles), roller, Counter())
        tasks = list(pool(3))
        for step in (5, 5, 6):
            lab.probe(tasks, 2, step)
        assert lab.ledger["rollouts/probe"] == 3 * 6
    assert seeds[:3] == seeds[3:] and len({tuple(s) for s in seeds}) == 3
    Roller(settings(), Seeds(), 5)(tasks, 2, role="probe")
    assert seeds[6] == seeds[0]  # the seeds of the first step's first probe


@pytest.mark.parametrize("name", ["coevolve", "random", "static"])
def test_a_strategy_goes_through_a_checkpoint(name):
    config = ConfigDict(
        {
            **settings(group_filter=True).to_dict(),
            "strategy": configs.strategy(name),
            "signals": {"window": 3, "rare_percent": 50.0},
            "steps": 20,
            "evolution": {"every": 5, "async_steps": 0, "freeze_last_steps": 1},
        }
    )
    strategy = build.strategy(config)
    groups = collect(MadeUpRewards(), pool(60), 4)
    strategy.compute_advantages(groups)
    strategy.observe(4, groups)
    saved = json.loads(json.dumps({"strategy": {"name": name, "state": strategy.to_json()}}))
    assert saved["strategy"]["state"]["filter"]["seen"] == alive(groups)
    again = build.strategy(config, saved)
    assert json.dumps(again.to_json()) == json.dumps(strategy.to_json())
    assert json.dumps(
        build.strategy(config, {"strategy": {"name": "another", "state": {}}}).to_json()
    ) == json.dumps(build.strategy(config).to_json())


@pytest.mark.parametrize(
    "key, value, why",
    [
        ("ratio", "group", "one of token, sequence"),
        ("kl", "k4", "one of k1, k2, k3, none"),
        ("dtype", "float16", "one of float32, bfloat16"),
        ("epochs", 0, "at least 1"),
        ("tis_cap", -1.0, "at least 0"),
        ("learning_rate", float("inf"), "a finite number"),
        ("learning_rate", 0.0, "above 0.$"),
        ("adam_b2", 0.8, "more than the square of .* \\(0.9\\)"),
        ("schedule", "cosine", "config.learner.decay_steps is 0.*cosine schedule"),
    ],
)
def test_settings_that_do_not_exist_or_fit_are_named(key, value, why):
    spec = importlib.util.spec_from_file_location("tiny", ROOT / "configs" / "bfcl_tiny.py")
    tiny = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tiny)
    config = tiny.get_config()
    configs.check(config)
    config.learner[key] = value
    with pytest.raises(ValueError, match=why):
        configs.check(config)


def test_servers_sleep_only_where_nothing_is_rolled_out_during_the_update():
    served = configs.load_file(ROOT / "configs" / "bfcl_tiny.py", "engine=sglang")
    asleep = configs.override(served, {"engine.sleep": True})
    configs.check(asleep)
    for change in ({"rollout.max_staleness": 1}, {"engine.name": "native"}):
        with pytest.raises(ValueError, match="config.engine.sleep is True: it must be False unless servers"):
            configs.check(configs.override(asleep, change))
