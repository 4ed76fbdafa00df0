"""Each test removes an unstated difference between static, random and coevolve (docs/notes/results.md)."""

import dataclasses
import json
from collections import Counter

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize
from hypothesis import given, settings

from coevolve_jax import build
from coevolve_jax import config as configs
from coevolve_jax.config import load_file, override
from coevolve_jax.envs import bfcl
from coevolve_jax.envs.bfcl import benchmark
from coevolve_jax.grpo import losses
from coevolve_jax.rollout.agent import Agent
from coevolve_jax.rollout.engine import Completion
from coevolve_jax.rollout.limits import Limits
from coevolve_jax.strategies import blame, coevolve
from coevolve_jax.strategies.base import evolves
from coevolve_jax.strategies.batches import sampling_weights
from coevolve_jax.strategies.growth import solvable
from coevolve_jax.synthesis import choice, signals
from coevolve_jax.synthesis.pipeline import SynthesisRequest, Synthesizer
from coevolve_jax.synthesis.task_pool import ROW, TaskPool
from coevolve_jax.synthesis.validate import Verdict
from coevolve_jax.testing.made_up import MadeUpLab, MadeUpRoll, made_up_rollout, made_up_task
from coevolve_jax.types import Call, Group, Outcome, Signal, Step, Task, Turn
from tests.support.grpo_cases import trajectory
from tests.support.paths import ROOT

pytestmark = pytest.mark.slow

TINY = load_file(ROOT / "configs" / "bfcl_tiny.py")
KINDS = ("forgetting", "boundary", "rare")


def settings_of(name="coevolve", **changes):
    return override(TINY, {"model": str(ROOT / "models" / "tiny_qwen3"), "strategy.name": name, **changes})


# 1. New tasks are trained on.


@given(st.integers(1, 40), st.integers(1, 12), st.integers(1, 15))
def test_no_evolution_comes_too_late_to_be_trained_on(steps, every, settle):
    config = settings_of(**{"steps": steps, "evolution.every": every, "evolution.freeze_last_steps": settle})
    evolutions = [s for s in range(steps) if evolves(config, s)]
    assert evolutions == [s for s in range(steps) if (s + 1) % every == 0 and steps - (s + 1) >= settle]
    with pytest.raises(ValueError, match="freeze_last_steps is 0.*trained on"):
        configs.check(override(config, {"evolution.freeze_last_steps": 0}))


@pytest.mark.parametrize("name", ["coevolve", "random", "blame"])
def test_every_method_keeps_to_it(name):
    config = settings_of(name, **{"steps": 20, "evolution.every": 5, "evolution.tasks": 3})
    tasks, grown = TaskPool(), []
    tasks.add([made_up_task(f"initial-0-{i}", np.random.default_rng(i)) for i in range(20)])
    strategy = build.strategy(config)
    for step in range(20):
        groups = strategy.collect(step, tasks, MadeUpRoll(config, step))
        strategy.observe(step, groups)
        if strategy.evolve(step, MadeUpLab(config, tasks)):
            grown.append(step)
    assert grown == [4, 9]


BAD = {
    "seed": -1, "mesh.data": 0, "mesh.tensor": 0, "rollout.tasks_per_step": 0, "rollout.max_new_tokens": 0,
    "rollout.max_steps": 0, "rollout.max_length": 10, "engine.max_concurrency": 0, "data.min_calls": 99,
    "signals.window": 0, "signals.rare_percent": 500.0, "evaluation.num_rollouts": 0,
    "evaluation.temperature": -1.0,
    "evolution.contexts": 0, "evolution.rounds": 0, "evolution.steps": 0, "evolution.proposals": 0,
    "learner.max_grad_norm": 0.0, "learner.clip_low": -0.1, "learner.clip_high": -0.5,
    "learner.weight_decay": -1.0,
    "learner.kl_coef": float("inf"), "learner.lora_targets": "[", "environment.call_timeout": 0.0,
    "logging.trajectories_every": 0, "logging.trajectories": -1,
}  # fmt: skip


@pytest.mark.parametrize("key", BAD)
def test_a_value_that_no_run_can_have_is_refused_before_anything_is_made(key):
    named = {"rollout.max_length": "rollout.max_new_tokens"}.get(key, key)
    with pytest.raises(ValueError, match=rf"config\.{named} is .*: it must be "):
        configs.check(settings_of(**{key: BAD[key]}))
    if key == "learner.max_grad_norm":  # it would reverse the gradient
        with pytest.raises(ValueError, match="max_grad_norm is -1.0: it must be above 0"):
            configs.check(settings_of(**{key: -1.0}))


def test_an_explorer_that_is_allowed_no_token_is_refused():
    """The engine would refuse its first question, when the training set evolves."""
    config = load_file(ROOT / "configs" / "bfcl_tiny.py", "explorer=policy")
    with pytest.raises(ValueError, match=r"config\.explorer\.max_tokens is 0: it must be at least 1"):
        configs.check(override(config, {"explorer.max_tokens": 0}))


# 2. All strategies respect a bound on growth and count it. (tests/loop/test_loop.py covers whole runs.)


@pytest.fixture(scope="module")
def pool():
    with build.env_pool(settings_of(**{"environment.workers": 1})) as made:
        yield made


def synthesizer(pool, **more):
    c = settings_of(**{"evolution.rounds": 1, "evolution.steps": 6})
    return Synthesizer(build.explorer(c), bfcl.tools, pool, c, None, **more)


def test_a_full_pool_ends_unguided_exploration_too(pool):
    tasks = TaskPool(max_size=5)
    how = dict(kind="random", step=1)
    scenarios = build.scenarios(settings_of())
    made = synthesizer(pool).synthesize_unguided(
        tasks, scenarios, SynthesisRequest(wanted=8, rng=np.random.default_rng(0), **how)
    )
    assert (len(tasks), made.added, made.refused["pool_full"]) == (5, 5, 3)
    more = synthesizer(pool).synthesize_unguided(
        tasks, scenarios, SynthesisRequest(wanted=4, rng=np.random.default_rng(1), **how)
    )
    assert (more.added, more.contexts, more.refused["pool_full"]) == (0, 0, 4)
    with pytest.raises(ValueError, match="max_tasks is 20.*initial_tasks"):
        configs.check(settings_of(**{"data.max_tasks": 20}))


def test_free_exploration_is_probed_like_any_other(pool):
    how = dict(kind="random", step=1, wanted=6)
    scenarios, made = build.scenarios(settings_of()), synthesizer(pool)

    def odd(tasks):  # by their content, so that rounds with fewer tasks refuse the same ones
        return [Verdict(None if len(t.calls) % 2 else "never_solved", 0.5) for t in tasks]

    tasks = TaskPool()
    stats = made.synthesize_unguided(
        tasks, scenarios, SynthesisRequest(rng=np.random.default_rng(0), admit=odd, **how)
    )
    assert stats.added == len(tasks) == 6 and {len(t.calls) % 2 for t in tasks} == {1}
    assert stats.refused["never_solved"] and {t.lineage.solved for t in tasks} == {0.5}

    none, asked = TaskPool(), []
    refuse = lambda tasks: asked.append(len(tasks)) or [Verdict("always_solved", 1.0)] * len(tasks)
    stats = made.synthesize_unguided(
        none, scenarios, SynthesisRequest(rng=np.random.default_rng(0), admit=refuse, **how)
    )
    assert (len(none), stats.added) == (0, 0) and 0 < len(asked) <= 20  # it ends, though it found nothing


def test_only_a_run_that_begins_needs_all_that_it_asks_for(pool):
    """Later, a spent budget or a dead endpoint means less growth of D_t, for any strategy."""
    config = settings_of(**{"evolution.rounds": 1, "evolution.steps": 1, "data.min_calls": 5})  # no such task
    made = Synthesizer(build.explorer(config), bfcl.tools, pool, config, None)
    how = dict(wanted=2, kind="random", step=1)
    for admit in (None, lambda tasks: [Verdict(None)] * len(tasks)):
        tasks = TaskPool()
        stats = made.synthesize_unguided(
            tasks, build.scenarios(config), SynthesisRequest(rng=np.random.default_rng(0), admit=admit, **how)
        )
        assert (len(tasks), stats.added, stats.contexts) == (0, 0, 20 * 4)
    with pytest.raises(ValueError, match="Unguided exploration found 0 of 2 new tasks"):
        made.synthesize_unguided(
            TaskPool(),
            build.scenarios(config),
            SynthesisRequest(rng=np.random.default_rng(0), **how),
            all_or_none=True,
        )


def test_the_probe_of_free_exploration_is_its_own_key():
    asked = []

    class Lab(MadeUpLab):
        def synthesize_unguided(self, *, admit=None, **how):
            asked.append(admit)
            return super().synthesize_unguided(admit=admit, **how)

    for probe in (0, 4):
        config = settings_of("random", **{"strategy.probe": probe, "evolution.every": 1})
        tasks = TaskPool()
        tasks.add([made_up_task(f"t{n}", np.random.default_rng(n)) for n in range(4)])
        build.strategy(config).evolve(0, Lab(config, tasks))
    assert asked[0] is None and asked[1] is not None


# 3. A checkpoint of static stays small; evidence is saved without its tokens.


def test_what_a_strategy_remembers_is_bounded_and_without_tokens():
    sizes = {}
    for name in ("static", "coevolve"):
        config = settings_of(name, **{"steps": 1000, "evolution.every": 500})
        strategy, tasks = build.strategy(config), TaskPool()
        tasks.add([made_up_task(f"initial-0-{i}", np.random.default_rng(i)) for i in range(20)])
        for step in range(30):
            strategy.observe(step, strategy.collect(step, tasks, MadeUpRoll(config, step)))
            if step in (14, 29):
                sizes.setdefault(name, []).append(len(json.dumps(strategy.to_json())))
    assert sizes["static"][1] < sizes["static"][0] * 1.2 < 20_000 < sizes["coevolve"][0]
    assert not strategy._evidence == [] and not any(
        t.ids.size or t.logprobs.size for e in strategy._evidence for t in e.group.trajectories
    )


# 4. Only a tool is an action. (tests/envs/test_env_family.py covers the agent.)


def test_a_call_to_what_is_no_tool_is_no_action():
    steps = tuple(
        Step(0, n, Call(n, {}), "{}", error=False, pattern=p) for n, p in (("ls", None), ("ning", ""))
    )
    t = dataclasses.replace(trajectory(np.random.default_rng(0), 8, reward=1.0), steps=steps)
    assert t.actions == ("ls",)
    _, history = signals.extract(
        signals.History(), [Group(made_up_task("t", np.random.default_rng(0)), (t,))], 0, window=3, theta=50.0
    )
    assert history.action_counts == {"ls": 1}


# 5. A task that no rollout can hold is refused.


@pytest.fixture(scope="module")
def policy():
    return build.policy(ROOT / "models" / "tiny_qwen3")


class Says:
    """An engine that plays a task's reference, one call per message."""

    batches = False

    def __init__(self, chat, task):
        self.left = [m for turn in task.turns for m in [*([c] for c in turn.calls), []]]
        self.chat = chat

    async def generate(self, requests):
        ids = np.asarray(self.chat.message(self.left.pop(0)), np.int32)
        assert len(ids) <= requests[0].sampling.max_new_tokens
        return [Completion(ids, np.zeros(len(ids), np.float32), "stop", np.zeros(len(ids), np.int32))]

    def release(self, conversation_ids):
        pass


def test_fits_says_what_a_rollout_of_the_reference_shows(pool, policy):
    tasks, c = TaskPool(), settings_of()
    synthesizer(pool).synthesize_unguided(
        tasks,
        build.scenarios(c),
        SynthesisRequest(wanted=12, kind="initial", step=0, rng=np.random.default_rng(3)),
    )
    seen = Counter()
    for task in tasks:
        answers = [tuple(o) for o in _answers(pool, task)]
        for limit in range(160, 560, 40):
            limits = Limits(limit, 64, 20, 160)
            agent = Agent(Says(policy.chat, task), policy.chat, pool, bfcl.tools, limits, 1)
            fits = agent.fits(task, answers)
            (t,) = agent.rollout_groups([task], [[0]], 1.0)[0].trajectories
            agent.close()
            assert (t.stop == "done") == fits, (task.id, limit, len(t.ids))
            assert t.outcome.success or not fits
            seen[fits] += 1
    assert min(seen[True], seen[False]) > 20
    short = Agent(Says(policy.chat, task), policy.chat, pool, bfcl.tools, Limits(4000, 5, 20, 160), 1)
    assert not short.fits(task, answers)  # a call does not fit into a message
    needed = len(task.calls) + len(task.turns)
    for allowed in (needed - 1, needed):
        limits = Limits(4000, 64, 20, 160, max_messages=allowed)
        agent = Agent(Says(policy.chat, task), policy.chat, pool, bfcl.tools, limits, 1)
        (t,) = agent.rollout_groups([task], [[0]], 1.0)[0].trajectories
        assert agent.fits(task, answers) == (t.stop == "done") == (allowed == needed)
    needed = max(len(turn.calls) for turn in task.turns)
    for allowed in (needed - 1, needed):
        agent = Agent(
            Says(policy.chat, task), policy.chat, pool, bfcl.tools, Limits(4000, 64, allowed, 160), 1
        )
        (t,) = agent.rollout_groups([task], [[0]], 1.0)[0].trajectories
        assert agent.fits(task, answers) == (t.stop == "done") == (allowed == needed)


def _answers(pool, task):
    (env_id,) = pool.reset([task])
    for turn in task.turns:
        yield pool.step([env_id], [turn.calls])[0]
        pool.end_turn([env_id])
    pool.close([env_id])


def test_what_does_not_fit_or_leaves_out_what_is_asked_for_is_refused(pool):
    tasks, scenarios = TaskPool(), build.scenarios(settings_of())
    tight = synthesizer(pool, fits=lambda task, answers: len(task.calls) < 4)
    made = tight.synthesize_unguided(
        tasks, scenarios, SynthesisRequest(wanted=12, kind="initial", step=0, rng=np.random.default_rng(0))
    )
    assert made.refused["too_long"] and max(len(t.calls) for t in tasks) < 4
    focused = TaskPool()
    scenario = next(s for s in scenarios if "touch" in {t["function"]["name"] for t in bfcl.tools(s)})
    from coevolve_jax.synthesis.explore import unguided

    context = dataclasses.replace(
        unguided(scenario, "c"), signal="oracle", focus_pattern=("touch",), must=("touch",)
    )
    stats = synthesizer(pool).synthesize(
        focused,
        [context] * 6,
        SynthesisRequest(wanted=30, kind="oracle", step=0, rng=np.random.default_rng(0)),
    )
    assert len(focused) > 5 and all("touch" in {c.name for c in t.calls} for t in focused)
    assert stats.added == len(focused) > 0.5 * stats.proposed  # exploration, not refusal, finds them


# 6. One token cannot outweigh a batch.


def test_a_bound_on_the_kl_of_a_token():
    """k3 up to the bound, then a straight line: a token far from the reference is still pulled."""
    delta = jnp.asarray([-30.0, -0.5, 0.0, 0.3, 2.0, 10.0, 500.0])
    free, bounded = (losses.kl(jnp.zeros(7), delta, "k3", bound) for bound in (0.0, 10.0))
    knee = scipy.optimize.brentq(lambda d: np.exp(d) - 1 - d - 10, 0, 10)
    line = 10 + (np.exp(knee) - 1) * (np.asarray(delta[5:]) - knee)
    assert free[5] > 20_000
    np.testing.assert_array_equal(free[:5], bounded[:5])
    np.testing.assert_allclose(bounded[5:], line, rtol=1e-6)
    gradient = jax.grad(lambda x: losses.kl(x, delta, "k3", 10.0).sum())(jnp.zeros(7))
    np.testing.assert_allclose(gradient[:5], 1 - jnp.exp(delta[:5]), rtol=1e-6)
    np.testing.assert_allclose(gradient[5:], 1 - np.exp(knee), rtol=1e-6)


# 8. Development and test are disjoint.


def test_development_and_test_are_halves_of_the_evaluation_side():
    sides = {name: benchmark.split(name) for name in ("train", "evaluation", "development", "test")}
    assert sides["development"] | sides["test"] == sides["evaluation"]
    assert not sides["development"] & sides["test"] and not sides["evaluation"] & sides["train"]
    assert len(sides["development"]) == len(sides["test"]) == 50
    fair = {
        split: bfcl.scenarios(split, {"toolsets": TINY.environment.toolsets}, apart_from="train")
        for split in ("development", "test")
    }
    starts = {
        split: {s for scenario in found for s in benchmark.starts(scenario)} for split, found in fair.items()
    }
    assert starts["development"].isdisjoint(starts["test"]) and min(map(len, fair.values())) >= 20


# 9. Draws: tests/synthesis/test_task_pool.py. Here: weights of p (1 - p), and retired tasks.


def test_sampling_weights():
    config = settings_of(**{"data.sampling": "variance", "data.sampling_floor": 0.2, "data.retire_after": 3})
    rows = np.zeros(4, ROW)
    rows["last_score"], rows["saturated_visits"] = [np.nan, 0.5, 1.0, 0.0], [0, 0, 1, 3]
    assert sampling_weights(config, rows).tolist() == [1.0, 1.0, 0.2, 0.0]
    assert sampling_weights(TINY, rows).tolist() == [1.0] * 4


# The placebo: shuffled signals.


def made_up_groups(seed, count=8, k=4):
    rng = np.random.default_rng(seed)
    tasks = [made_up_task(f"t{i}", rng) for i in range(count)]
    return [Group(t, tuple(made_up_rollout(rng, t, m, 0) for m in range(k))) for t in tasks]


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**6))
def test_the_placebo_moves_signals_to_tasks_by_chance_and_keeps_their_number(seed):
    made = made_up_groups(seed)
    found, _ = signals.extract(signals.History(), made, 0, window=3, theta=20.0)
    moved = signals.shuffle(found, made, np.random.default_rng(seed))
    lost = Counter(s.kind for s in found) - Counter(s.kind for s in moved)
    assert lost.keys() <= {"rare"}  # where the new rollout calls nothing
    groups = [Group(g.task, tuple(t for t in g.trajectories if t.actions)) for g in made]
    trajectories = [t for g in groups for t in g.trajectories]
    found, _ = signals.extract(signals.History(), groups, 0, window=3, theta=20.0)
    moved = signals.shuffle(found, groups, np.random.default_rng(seed))
    assert [s.kind for s in moved] == [s.kind for s in found]
    by_name = {(t.task_id, t.rollout_index): t for t in trajectories}
    for s in moved:
        carrier = by_name[s.task_id, s.rollout_index]
        assert carrier.outcome.valid and (s.pattern is None) == (s.kind != "rare")
        assert s.pattern is None or s.pattern in carrier.actions
    for kind in KINDS:  # a task's signals go to one other task
        tasks = lambda signals, kind=kind: Counter(s.task_id for s in signals if s.kind == kind)
        assert sorted(tasks(found).values()) == sorted(tasks(moved).values())
    where = {(a.task_id, b.task_id) for a, b in zip(found, moved)}
    assert len({a for a, _ in where}) == len({b for _, b in where}) == len(where)


def test_over_many_steps_the_placebo_knows_nothing_of_who_is_mixed():
    hits = Counter()
    for seed in range(150):
        groups = made_up_groups(seed)
        mixed = {g.task.id for g in groups if len({t.outcome.success for t in g.valid}) == 2}
        found, _ = signals.extract(signals.History(), groups, 0, window=3, theta=1.0)
        for name, of in (
            ("true", found),
            ("placebo", signals.shuffle(found, groups, np.random.default_rng(seed))),
        ):
            told = {s.task_id for s in of if s.kind == "boundary"}
            hits[name] += len(told & mixed)
            hits[f"{name} told"] += len(told)
        hits["base"] += len(mixed)
    base = hits["base"] / (150 * 8)
    assert hits["true"] == hits["true told"]
    assert abs(hits["placebo"] / hits["placebo told"] - base) < 0.05 < 1 - base


def test_the_placebo_strategy_evolves_on_the_shuffled_ones():
    groups = made_up_groups(5)
    true, placebo = (
        coevolve.make(settings_of(**{"strategy.shuffled": shuffled, "signals.rare_percent": 20.0}))
        for shuffled in (False, True)
    )
    found = [s.observe(0, groups) for s in (true, placebo)]
    assert found[0].rows != found[1].rows and found[0].counts == found[1].counts
    for strategy, own in zip((true, placebo), found):
        kept = [(e.signal.kind, e.task.id, e.signal.rollout_index) for e in strategy._evidence]
        assert kept == [(r["kind"], r["task_id"], r["rollout_index"]) for r in own.rows]


def test_kinds_of_signals_can_be_chosen():
    groups = made_up_groups(5)
    for kind in KINDS:
        only = coevolve.make(settings_of(**{"strategy.signals": kind, "signals.rare_percent": 50.0}))
        found = only.observe(0, groups)
        assert {e.signal.kind for e in only._evidence} <= {kind}
        assert sum(found.counts.values()) > len(only._evidence)  # the others are counted
    with pytest.raises(ValueError, match="strategy.signals is 'rare,hope'"):
        coevolve.make(settings_of(**{"strategy.signals": "rare,hope"}))


def test_solved_since_and_probed_tasks_are_left_out():
    config = settings_of(**{"strategy.unsolved": True, "evolution.every": 9, "steps": 50})
    strategy, tasks, groups = coevolve.make(config), TaskPool(), made_up_groups(5)
    tasks.add([g.task for g in groups])
    strategy.observe(0, groups)
    told = sorted({e.task.id for e in strategy._evidence})
    ends = {told[0]: Outcome(0.8, True), told[1]: Outcome(0.8, True), told[2]: Outcome(0.0, False, False)}

    def again(ends):
        visited = [g for g in groups if g.task.id in ends]
        give = lambda g: [dataclasses.replace(t, outcome=ends[g.task.id]) for t in g.trajectories]
        return [Group(g.task, tuple(give(g))) for g in visited]

    strategy.observe(1, again(ends))
    strategy.observe(2, again({told[1]: Outcome(0.4, False), told[0]: ends[told[2]]}))
    strategy = coevolve.make(config, json.loads(json.dumps(strategy.to_json())))
    seen = []

    class Lab(MadeUpLab):
        def reflect(self, evidence):
            seen.extend(e.task.id for e in evidence)
            return super().reflect(evidence)

    strategy.evolve(8, Lab(config, tasks))
    assert set(seen) == set(told[1:])  # the second failed since, and nothing is known of the third
    assert strategy.to_json()["solved"] == []

    class Probed(MadeUpLab):
        def probe(self, tasks, k, step):
            rewards = {"never": [0.0] * k, "always": [1.0] * k, "some": [1.0] + [0.0] * (k - 1)}
            rng = np.random.default_rng(0)
            rewards["lost"] = [None] * k  # by our own infrastructure
            ends = lambda r: Outcome(0.0, False, valid=False) if r is None else Outcome(r, r > 0)
            make = lambda task, r: dataclasses.replace(made_up_rollout(rng, task, 0, 0), outcome=ends(r))
            return [Group(t, tuple(make(t, r) for r in rewards[t.id])) for t in tasks]

    named = [dataclasses.replace(groups[0].task, id=id) for id in ("some", "never", "always", "lost")]
    lab = Probed(config, tasks)
    words = [(None, 0.25), ("never_solved", 0.0), ("always_solved", 1.0), ("environment", None)]
    assert solvable(lab, 0, 4)(named) == [Verdict(*word) for word in words]
    assert solvable(lab, 0, 0)(named) == [Verdict(None)] * 4


# Blame


def call(name, **arguments):
    return Call(name, arguments)


def rollout(calls, success):
    t = trajectory(np.random.default_rng(0), 8, reward=float(success))
    return dataclasses.replace(t, steps=tuple(Step(0, "", c, "", error=False) for c in calls))


def test_the_first_call_that_a_failure_misses_is_to_blame():
    a, b, c, wrong = call("a", x=1), call("b", x=1), call("c"), call("b", x=2)
    asked = lambda calls, **more: Task("t", "made_up", {}, (Turn("do it", tuple(calls)),), **more)
    came = lambda reference, made, success: blame.attempts(asked(reference), rollout(made, success))
    assert came([a, b, c], [a, b, c], True) == [("a", False), ("b", False), ("c", False)]
    assert came([a, b, c], [a, wrong, c], False) == [("a", False), ("b", True)]
    assert came([a, b, c], [call("z"), a, b], False) == [("a", False), ("b", False), ("c", True)]
    assert came([a, b, c], [b, a, c], False) == [("a", False), ("b", True)]  # the order matters
    assert came([a, b, c], [a], True) == [("a", False)]
    assert came([], [a], False) == []
    assert came([a, b], [call("a", x=1.0), wrong], False) == [("a", False), ("b", True)]
    named = asked([a, b], patterns=("a east", "b north"))
    assert blame.attempts(named, rollout([a], False)) == [("a east", False), ("b north", True)]


def test_weights_prefer_what_is_neither_mended_nor_hopeless():
    others = {f"good_{i}": (40, 1) for i in range(20)}
    tools = {**others, "weak": (40, 20), "hopeless": (40, 40), "seldom tried": (1, 0), "unknown": (0, 0)}
    weights, chasing = blame.tool_weights(tools), blame.tool_weights(tools, chasing=True)
    assert max(weights, key=weights.get) == "weak"
    assert weights["weak"] > 2.5 * max(w for tool, w in weights.items() if tool != "weak")
    assert max(chasing, key=chasing.get) == "hopeless"
    for plain, sharp in (
        (weights, blame.tool_weights(tools, 2)),
        (chasing, blame.tool_weights(tools, 2, True)),
    ):
        assert sharp == pytest.approx({tool: w**2 for tool, w in plain.items()})
    assert set(blame.tool_weights({"a": (0, 0), "b": (0, 0)}).values()) == {0.25}


@given(st.integers(0, 10**6), st.integers(1, 30), st.integers(1, 12))
def test_tools_are_drawn_in_rounds_of_different_ones(seed, count, breadth):
    weights = {"a": 0.5, "b": 1e-9, "c": 0.2, "d": 0.0, "e": 0.3}
    drawn = blame.draw(weights, count, breadth, np.random.default_rng(seed))
    assert len(drawn) == count and "d" not in drawn
    size = min(breadth, 4)
    rounds = [drawn[i : i + size] for i in range(0, count, size)]
    assert all(len(set(r)) == len(r) for r in rounds)
    assert blame.draw({}, count, breadth, np.random.default_rng(seed)) == []


@pytest.mark.parametrize(
    "key, value", [("breadth", 0), ("first_sight", -1), ("sharpness", -1.0), ("memory", -0.5)]
)
def test_settings_of_blame_that_mean_nothing_are_refused(key, value):
    with pytest.raises(
        ValueError, match=f"config.strategy.{key} is {value}: it must be ([01] or more|within 0 and 1)"
    ):
        blame.make(settings_of("blame", **{f"strategy.{key}": value}))


def test_blame_finds_the_weak_tool_and_asks_for_tasks_with_it():
    config = settings_of("blame", **{"evolution.every": 10, "steps": 30, "evolution.tasks": 40})
    config.strategy.breadth = 1
    strategy, contexts = blame.make(config), []
    calls = tuple(call(f"tool_{i}") for i in range(4))
    for step in range(10):
        task = Task(f"t{step}", "made_up", {}, (Turn("q", calls),))
        done = [
            dataclasses.replace(
                rollout(task.calls if m % 2 else task.calls[:2], bool(m % 2)), rollout_index=m
            )
            for m in range(8)
        ]
        assert strategy.observe(step, [Group(task, tuple(done))]).counts["blame"] == 4
        strategy = blame.make(config, json.loads(json.dumps(strategy.to_json())))
        again = strategy.observe(step, [Group(task, tuple(done))])
        assert again.counts["blame"] == 0  # no longer at first sight

    class Lab(MadeUpLab):
        def synthesize(self, given, **how):
            contexts.extend(given)
            return super().synthesize(given, **how)

    strategy = blame.make(config, json.loads(json.dumps(strategy.to_json())))
    strategy.evolve(9, Lab(config, TaskPool()))
    asked = Counter(c.must for c in contexts)
    assert asked[("tool_2",)] > 0.8 * len(contexts) == 32.0
    assert {c.task.id for c in contexts} == {
        "scenario_0",
        "scenario_1",
        "scenario_2",
    }  # wherever it is on offer


def test_the_frozen_test_names_the_settings_that_its_arm_runs():
    frozen = load_file(ROOT / "configs" / "bfcl_headroom_test.py")
    piloted = load_file(ROOT / "configs" / "bfcl_headroom.py", "strategy=blame")
    assert frozen.strategy == configs.strategy("blame")
    assert override(piloted, {"environment.eval_split": "test"}) == frozen


# Sets of a known composition


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6))
def test_chosen_sets(seed):
    rng = np.random.default_rng(seed)
    many = [made_up_task(f"t{i}", rng) for i in range(120)]
    rare = [t for t in many if "tool_7" in choice.tools_of(t)][6:]
    skewed = [t for t in many if t not in rare]
    few = choice.balanced(skewed, 40, np.random.default_rng(seed))
    assert len({t.id for t in few}) == 40 and [t for t in skewed if t in few] == few
    times = [sum(f"tool_{i}" in choice.tools_of(t) for t in few) for i in range(8)]
    assert times[7] == 6 and min(times[:7]) >= 0.6 * np.mean(
        times[:7]
    )  # all that exist, the others about as often
    weak = ("tool_0", "tool_3")
    scarce = choice.scarce(many, 20, weak, 1, 2, np.random.default_rng(seed))
    assert len({t.id for t in scarce}) == 20 and [t for t in many if t in scarce] == scarce
    for tool in weak:
        assert 1 <= sum(tool in choice.tools_of(t) for t in scarce) <= 2
    with pytest.raises(
        ValueError,
        match=r"120 candidates \(tool_99 in 0, tool_0 in \d+\) no 20 tasks .*raise config.testbed.candidates",
    ):
        choice.scarce(many, 20, ["tool_0", "tool_99"], 1, 2, np.random.default_rng(seed))


def test_signals_know_their_kinds():
    assert signals.kinds("rare,forgetting") == ("rare", "forgetting")
    assert Signal("rare", "t", 0, 0, "p").kind in signals.kinds("rare")
