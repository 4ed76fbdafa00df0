"""WebRL: the critic lets in what is within reach, and replay what is neither strange nor known by heart."""

import dataclasses
import re

import numpy as np
import pytest

from coevolve_jax import build
from coevolve_jax.strategies import webrl
from coevolve_jax.types import Group
from tests.support.method_cases import Lab, a_group, a_pool, a_rollout, a_task, again, config_of

CHANCE = {"tool_0": 0.0, "tool_1": 0.5, "tool_2": 1.0}


def taught(config, rng):
    """A strategy that has seen ten tasks of each tool, and D_t with them.

    One tool fails always, one at times, one never. D_t has eight more tasks of each tool, which failed last.
    """
    strategy, seen = build.strategy(config), []
    for step in range(10):
        tasks = [a_task(f"{tool}-{step}", tool, tool) for tool in CHANCE]
        strategy.observe(step, [a_group(t, *(rng.random(8) < CHANCE[t.actions[0]])) for t in tasks])
        seen += tasks
    parents = [a_task(f"p{i}-{tool}", tool, tool) for i in range(8) for tool in CHANCE]
    pool = a_pool(*seen, *parents)
    pool.record({t.id: 0.0 for t in parents})
    return strategy, pool


class OneTool(Lab):
    """A lab whose tasks have all their calls to the tool of their plan."""

    def synthesize(self, contexts, **how):
        contexts = [dataclasses.replace(c, plan=(c.plan * 3)[: c.calls[0]]) for c in contexts]
        return super().synthesize(contexts, **how)


@pytest.mark.parametrize("least, most, tools", [(0.05, 0.75, {"tool_1"}), (0.0, 1.0, set(CHANCE))])
def test_the_critic_keeps_drafts_within_reach_though_all_parents_failed(least, most, tools):
    config = config_of("webrl", least=least, most=most, drafts=1.0, **{"evolution.tasks": 24})
    strategy, tasks = taught(config, np.random.default_rng(0))
    first = strategy.to_json()["first"]
    visits = [(strategy._features(t), first[t.id]) for t in tasks if t.id in first]
    lab = OneTool(config, tasks)
    stats = again(strategy, config).evolve(4, lab)
    asked = {c.plan[0] if isinstance(c.plan[0], str) else c.plan[0].name for c in lab.contexts}
    assert asked == set(CHANCE) and lab.kinds == {"draft": 24}
    born = [t for t in lab.tasks if t.lineage.kind == "signal"]
    kept = {t.lineage.context.split("/")[2].split("-")[1] for t in born}
    assert stats.added == len(born) > 0 and kept == tools
    middle = (least + most) / 2
    critic = webrl.fitted(visits, config.strategy.critic_rate)
    distance = lambda t: abs(webrl.value(critic, strategy._features(t)) - middle)
    assert [distance(t) for t in born] == sorted(map(distance, born))


def test_the_critic_is_fitted_to_first_visits_and_only_failures_have_children():
    config = config_of("webrl")
    once, often = build.strategy(config), build.strategy(config)
    task = a_task("t", "tool_0", "tool_1")
    for step in range(5):
        often.observe(step, [a_group(task, step > 0, step > 0)])
    once.observe(0, [a_group(task, 0, 0)])
    assert often.to_json()["first"] == once.to_json()["first"] == {"t": 0.0}
    critic = webrl.fitted([(once._features(task), 0.0)], 0.3)
    assert webrl.value(critic, once._features(task)) < 0.1
    tasks = a_pool(task, a_task("won", "tool_2", "tool_3"), a_task("new", "tool_4", "tool_5"))
    tasks.record({"t": 0.4, "won": 0.6})
    lab = Lab(config, tasks)
    once.evolve(4, lab)
    assert {c.id.split("/")[2] for c in lab.contexts} == {"t"}


def test_the_last_visit_tells_which_tasks_have_children():
    tasks = a_pool(a_task("learned", "tool_0", "tool_1"), a_task("forgotten", "tool_2", "tool_3"))
    tasks.record({"learned": 0.2, "forgotten": 0.9})
    tasks.record({"learned": 0.9, "forgotten": 0.2})
    config = config_of("webrl")
    lab = Lab(config, tasks)
    build.strategy(config).evolve(4, lab)
    assert {c.id.split("/")[2] for c in lab.contexts} == {"forgotten"}


def test_steps_beside_an_evolution_do_not_change_what_it_adopts():
    config = config_of("webrl", drafts=1.0, **{"evolution.tasks": 24})

    def adopted(beside):
        strategy, tasks = taught(config, np.random.default_rng(0))
        lab = OneTool(config, tasks)
        own = lab.synthesize
        lab.synthesize = lambda *args, **how: (beside and taught_more(strategy), own(*args, **how))[1]
        strategy.evolve(4, lab)
        return [t.id for t in tasks]

    def taught_more(strategy):
        for tool in CHANCE:
            strategy.observe(5, [a_group(a_task(f"p{i}-{tool}", tool, tool), 1, 1) for i in range(8)])

    assert adopted(beside=True) == adopted(beside=False)


def test_the_gradient_of_the_critic_is_that_of_cross_entropy():
    critic, features, p = {"a": 0.3, "b": -0.7}, {"a": 1.0, "b": 0.5}, 0.8
    loss = lambda c: -p * np.log(v := webrl.value(c, features)) - (1 - p) * np.log(1 - v)
    for name in critic:
        step = {**critic, name: critic[name] + 1e-6}
        slope = (loss(step) - loss(critic)) / 1e-6
        moved = dict(critic)
        webrl.fit(moved, features, p, rate=0.1)
        np.testing.assert_allclose(moved[name], critic[name] - 0.1 * slope, rtol=1e-4)


def test_replay_holds_one_success_of_a_task_whose_probability_lies_in_the_band():
    config = config_of("webrl", replay=3)
    strategy = build.strategy(config)
    tasks = {name: a_task(name, "a", "b") for name in ("known", "strange", "t0", "t1", "t2", "t3")}
    rows = {"known": 0.99, "strange": 0.3, "t0": 0.6, "t1": 0.7, "t2": 0.8, "t3": 0.9}
    for step in range(2):
        strategy.observe(
            step,
            [
                Group(tasks[n], tuple(a_rollout(tasks[n], i, i != 1, logprob=np.log(q)) for i in range(4)))
                for n, q in rows.items()
            ],
        )
    kept = strategy.to_json()["kept"]
    assert [row["task_id"] for row in kept] == ["t1", "t2", "t3"]
    assert all(row["outcome"]["success"] for row in kept)
    groups = [a_group(tasks["t0"], 1, 0, 1, 0)]
    samples = again(strategy, config).compute_advantages(groups)
    fresh, replayed = ([s for s in samples if (s.advantages is None) == old] for old in (False, True))
    assert len(fresh) == 4 and [s.trajectory.task_id for s in replayed] == ["t2", "t3"]  # half as many
    np.testing.assert_allclose(replayed[0].ce_weights[4:], 0.05)
    assert not replayed[0].ce_weights[:4].any()
    assert not strategy.compute_advantages([a_group(tasks["t0"], 1, 1)])


def test_a_task_known_by_heart_leaves_the_replay():
    task = a_task("t", "a", "b")

    def visits(*probabilities, won=True):
        """The numbers of successes in the band and kept, after a visit for each row of probabilities."""
        strategy = build.strategy(config_of("webrl"))
        for step, row in enumerate(probabilities):
            rollouts = [a_rollout(task, i, won or not step, logprob=np.log(p)) for i, p in enumerate(row)]
            counts = strategy.observe(step, [Group(task, tuple(rollouts))]).counts
        return counts["in_band"], counts["replay"], len(strategy.to_json()["kept"])

    assert visits([0.7, 0.8, 0.99]) == (2, 1, 1)
    assert visits([0.7], [0.99, 0.97]) == (0, 0, 0)
    assert visits([0.7], [0.99, 0.3]) == (0, 0, 0)
    assert visits([0.7], [0.99, 0.8]) == (1, 1, 1)
    assert visits([0.7], [0.3]) == (0, 1, 1)  # strange ones do not show that it is known
    assert visits([0.7], [0.99], won=False) == (0, 1, 1)  # nor do failures


@pytest.mark.parametrize(
    "name, key, value",
    [
        ("webrl", "critic_rate", 0.0),
        ("webrl", "critic_rate", -0.3),
        ("webrl", "replay_weight", -1.0),
        ("agent0", "uncertainty", -1.0),
        ("agent0", "diversity", -1.0),
        ("agent0", "tool_bonus", -0.1),
        ("evolver", "merge_from", 0.0),
        ("evolver", "merge_from", 1.5),
        ("sec", "arms", ""),
        ("sec", "arms", "calls,"),
        ("weakest", "category", ""),
        ("dr_zero", "hops", ()),
    ],
)
def test_settings_that_turn_a_method_off_or_round_are_refused(name, key, value):
    more = {"hop_shares": ()} if key == "hops" else {}
    with pytest.raises(ValueError, match=rf"^config\.strategy\.{key} is {re.escape(repr(value))}: it must "):
        build.strategy(config_of(name, **{key: value}, **more))


def test_settings_that_cannot_be_are_refused():
    with pytest.raises(
        ValueError, match=r"config\.strategy\.least is 0\.9: it must be within 0 and config\.str"
    ):
        build.strategy(config_of("webrl", least=0.9))
    with pytest.raises(
        ValueError, match=r"config\.strategy\.replay is 32: it must be 0 with config\.learner\.r"
    ):
        build.strategy(config_of("webrl", **{"learner.replay_routing": True}))
