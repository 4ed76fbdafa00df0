"""Rows of evaluations.jsonl, each number recounted from the rollouts."""

import dataclasses
import json
import os
import resource
from collections import Counter
from contextlib import closing
from statistics import fmean
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ml_collections import ConfigDict

from coevolve_jax import build
from coevolve_jax import config as configs
from coevolve_jax.loop.evaluate import by_weakness, evaluate, evaluate_held_out, tally
from coevolve_jax.records.rollout_log import RolloutLog
from coevolve_jax.seeding import rng_for
from coevolve_jax.strategies.base import trajectories_of
from coevolve_jax.types import Call, Group, Hint, Task, Turn
from tests.support.paths import ROOT
from tests.support.step_cases import a_rollout, a_task

SEEDS = st.integers(0, 10**6)


def task_of(name, tools):
    return Task(name, "made_up", {}, (Turn("q", tuple(Call(tool, {}) for tool in tools)),))


class MadeUpAgent:
    """Rolls out by each rollout's own seed, and records seeds and groups.

    slow: messages of each evaluation that a server sampled again.
    """

    def __init__(self, slow=0):
        self.seeds, self.rolled, self.slow = [], [], slow
        self.counts = Counter(messages=1000, slow_retries=700)

    def rollout_groups(self, tasks, seeds, temperature, hints=None, on_done=lambda trajectory: None):
        def made_up(task, m, seed):
            made = a_rollout(np.random.default_rng([*np.atleast_1d(seed), temperature > 0]), task, m)
            hint = hints and hints(task, m)
            return dataclasses.replace(made, hints=((0, hint.before_task),) if hint else ())

        groups = [
            Group(task, tuple(made_up(task, m, seed) for m, seed in enumerate(row)))
            for task, row in zip(tasks, seeds, strict=True)
        ]
        for group in groups:
            for trajectory in group.trajectories:
                on_done(trajectory)
        self.counts.update(messages=200, slow_retries=self.slow)
        self.seeds.append(sum(seeds, []))
        self.rolled.append((temperature, groups))
        return groups


def groups_of(rng, tasks, num_rollouts):
    return [Group(task, tuple(a_rollout(rng, task, m) for m in range(num_rollouts))) for task in tasks]


# Success on weak tools


def test_every_weak_tool_counts_the_same_however_many_tasks_call_it():
    tasks = [
        task_of("t0", "a"),
        task_of("t1", "xa"),  # not the first call
        task_of("t2", "aa"),  # counts once
        task_of("t3", "xba"),  # calls two weak tools, and counts for both
        task_of("t4", "xy"),
        task_of("t5", "y"),
    ]
    by_task = {"t0": [1, 4], "t1": [0, 4], "t2": [2, 3], "t3": [1, 1], "t4": [3, 4], "t5": [0, 0]}
    row = by_weakness(tasks, by_task, ("a", "b", "never called"))
    assert row["weak_tools"] == {"a": [4, 12], "b": [1, 1], "never called": [0, 0]}
    assert row["macro_weak"] == pytest.approx((4 / 12 + 1 / 1) / 2)  # pooled they would be 5 of 13
    assert row["others"] == 3 / 4
    nothing = by_weakness(tasks[:1], by_task, ("b", "never called"))
    assert (nothing["macro_weak"], nothing["others"]) == (None, 1 / 4)
    assert by_weakness(tasks[:1], by_task, ("a",))["others"] is None


@given(SEEDS, st.integers(1, 4))
def test_success_on_weak_tools_is_that_of_the_rollouts_of_tasks_that_call_them(seed, num_rollouts):
    rng = np.random.default_rng(seed)
    tasks = [a_task(rng, f"t{i}") for i in range(6)]
    groups = groups_of(rng, tasks, num_rollouts)
    rolled = [t for group in groups for t in group.trajectories]
    weak = [name for name in "abcxyz" if rng.random() < 0.5]
    row = by_weakness(tasks, tally(groups, num_rollouts, 1.0).by_task, weak)

    named, apart = {tool: [] for tool in weak}, []
    for task in tasks:
        outcomes = [t.outcome.success for t in rolled if t.task_id == task.id and t.outcome.valid]
        called = {call.name for turn in task.turns for call in turn.calls}
        for tool in weak:
            named[tool] += outcomes if tool in called else []
        apart += [] if called & set(weak) else outcomes
    rates = [fmean(outcomes) for outcomes in named.values() if outcomes]
    assert row["weak_tools"] == {tool: [sum(found), len(found)] for tool, found in named.items()}
    # A tool with tasks but no valid rollout has an unknown rate, and must not silently leave the mean.
    unknown = [
        tool
        for tool, found in named.items()
        if not found and any(tool == c.name for t in tasks for c in t.calls)
    ]
    assert row["macro_weak"] == (pytest.approx(fmean(rates)) if rates and not unknown else None)
    assert row["others"] == (pytest.approx(fmean(apart)) if apart else None)


# Counts


@given(SEEDS, st.integers(1, 4))
def test_the_numbers_of_an_evaluation_are_those_of_its_rollouts(seed, num_rollouts):
    rng = np.random.default_rng(seed)
    tasks = [a_task(rng, f"t{i}") for i in range(5)]
    groups = groups_of(rng, tasks, num_rollouts)
    rolled = [t for group in groups for t in group.trajectories]
    found = tally(groups, num_rollouts, 0.7)

    valid = [t for t in rolled if t.outcome.valid]
    by_task = {task.id: [t.outcome.success for t in valid if t.task_id == task.id] for task in tasks}
    sizes = {task.id: sum(len(turn.calls) for turn in task.turns) for task in tasks}
    assert (found.temperature, found.num_rollouts) == (0.7, num_rollouts)
    assert found.success == (fmean(t.outcome.success for t in valid) if valid else None)
    assert found.invalid == sum(not t.outcome.valid for t in rolled)
    assert found.by_task == {task: [sum(x), len(x)] for task, x in by_task.items()}
    mixed = [True in x and False in x for x in by_task.values() if x]
    assert found.mixed_groups == (fmean(mixed) if mixed else None)
    assert list(found.by_calls) == [str(n) for n in sorted(set(sizes.values()))]
    for n, count in found.by_calls.items():
        own = [t.outcome.success for t in valid if sizes[t.task_id] == int(n)]
        assert count == [sum(own), len(own)]
    stops = [t.stop for t in rolled]
    assert found.stops == {name: stops.count(name) for name in stops}
    assert list(found.stops) == sorted(set(stops))


# The rows


def test_every_rollout_has_a_seed_of_its_own_and_the_same_one_next_time():
    tasks, agents = [a_task(np.random.default_rng(i), f"t{i}") for i in range(5)], []
    for seed in (3, 3, 4):
        agents.append(MadeUpAgent())
        _, groups = evaluate(agents[-1], tasks, num_rollouts=3, temperature=1.0, seed=seed)
        assert [(g.task.id, t.rollout_index) for g in groups for t in g.trajectories] == [
            (f"t{i}", m) for i in range(5) for m in range(3)
        ]
    seeds = [agent.seeds[0] for agent in agents]
    assert seeds[0] == seeds[1] == rng_for(3, "evaluation").integers(2**32, size=15).tolist()
    assert len({*seeds[0], *seeds[2]}) == 30


def test_the_bar_of_an_evaluation_counts_its_rollouts_and_leaves_no_line(capsys):
    tasks = [a_task(np.random.default_rng(i), f"t{i}") for i in range(5)]
    evaluate(MadeUpAgent(), tasks, num_rollouts=3, temperature=1.0, seed=3, title="iid")
    told = capsys.readouterr().err
    assert "iid:" in told and "/15 " in told and "\n" not in told and told.endswith("\r")


@pytest.mark.parametrize("slow", [0, 1, 3])
def test_messages_that_were_sampled_again_for_being_slow_are_told(slow, capsys):
    tasks = [a_task(np.random.default_rng(i), f"t{i}") for i in range(5)]
    found, _ = evaluate(MadeUpAgent(slow), tasks, num_rollouts=3, temperature=1.0, seed=3, title="iid")
    assert found.slow_retries == slow and found.to_json().get("slow_retries", 0) == slow
    assert ("slow_retries" in found.to_json()) == (slow > 0)
    told = capsys.readouterr().err
    assert ("iid: 3 slow messages were sampled anew, for 200 asked for" in told) == (slow == 3)


@pytest.mark.parametrize("weak", [(), ("a", "b")])
def test_a_row_says_what_was_evaluated_and_how(weak):
    rng = np.random.default_rng(5)
    tasks = [a_task(rng, f"{kind}{i}", kind) for i in range(4) for kind in ("held_out", "balanced")]
    config = ConfigDict(
        {
            "environment": {"eval_split": "test", "train_split": "train"},
            "evaluation": {"num_rollouts": 3, "temperature": 0.6, "seed": 9},
            **({"testbed": {"weak_tools": weak}} if weak else {}),
        }
    )
    agent = MadeUpAgent()
    rows = evaluate_held_out(config, agent, tasks, step=7, greedy=True)
    assert [(row["step"], row["set"], row["split"]) for row in rows] == [
        (7, "iid", "test"),
        (7, "balanced", "test"),
    ]
    assert [(at, len(trajectories_of(groups))) for at, groups in agent.rolled] == [
        (0.6, 12),
        (0.0, 4),
        (0.6, 12),
    ]
    for row, kind, n in zip(rows, ("held_out", "balanced"), (0, 2)):
        chosen = [t for t in tasks if t.lineage.kind == kind]
        assert row["scenarios"] == {t.id: t.lineage.parent for t in chosen}
        whole = tally(agent.rolled[n][1], 3, 0.6)
        assert row["samples"] == whole.num_rollouts == 3
        assert row.items() >= whole.to_json().items()
        more = by_weakness(chosen, whole.by_task, weak) if weak else {}
        assert row.keys() - whole.to_json().keys() == {
            "step", "set", "split", "scenarios", *more,
            *(("greedy_success", "greedy_invalid") if kind == "held_out" else ()),
        }  # fmt: skip
        assert row.items() >= more.items()
    once = [t.outcome.success for t in trajectories_of(agent.rolled[1][1]) if t.outcome.valid]
    assert rows[0]["greedy_success"] == fmean(once) and rows[0]["greedy_invalid"] == 0
    assert "greedy_success" not in evaluate_held_out(config, MadeUpAgent(), tasks, step=7)[0]
    only = [t for t in tasks if t.lineage.kind == "balanced"]
    assert [r["set"] for r in evaluate_held_out(config, MadeUpAgent(), only, step=0)] == ["balanced"]
    assert evaluate_held_out(config, SimpleNamespace(), [], step=0) == []


class Killed(Exception):
    pass


class KilledAgent(MadeUpAgent):
    """Ends its rollouts in any order, and is killed after `ends` of them.

    anew: its noise, where seeds do not determine the rollouts.
    """

    def __init__(self, rng, ends, anew=None):
        super().__init__(slow=0)
        self.rng, self.ends, self.anew = rng, ends, anew

    def rollout_groups(self, tasks, seeds, temperature, hints=None, on_done=None):
        if self.anew is not None:
            seeds = [[(self.anew, seed) for seed in row] for row in seeds]
        self.tasks = [task.id for task in tasks]
        groups = MadeUpAgent.rollout_groups(self, tasks, seeds, temperature)
        ended = [t for group in groups for t in group.trajectories]
        for n in self.rng.permutation(len(ended)):
            if self.ends == 0:
                raise Killed
            self.ends -= 1
            self.counts["slow_retries"] += 1
            on_done(ended[n])
        return groups


def bare(groups):
    return [(g.task, [t.to_json() for t in g.trajectories]) for g in groups]


@given(SEEDS)
def test_an_interrupted_evaluation_goes_on_to_the_same_result(tmp_path_factory, seed):
    rng, path = np.random.default_rng(seed), tmp_path_factory.mktemp("log") / "log.jsonl"
    tasks, k = [a_task(rng, f"t{i}") for i in range(rng.integers(1, 5))], int(rng.integers(1, 4))
    how = dict(num_rollouts=k, temperature=0.7, seed=seed)
    whole, groups = evaluate(MadeUpAgent(), tasks, **how)
    about, begun, resumed = {"seed": seed, "limits": {"max_steps": 3}}, 0, None
    while resumed is None:
        with closing(RolloutLog(path, about, tasks, k)) as log:
            agent = KilledAgent(rng, int(rng.integers(0, len(tasks) * k + 1)))
            assert log.interruptions == begun
            try:
                result, resumed = evaluate(agent, tasks, **how, log=log)
            except Killed:
                pass
        assert agent.tasks == [t.id for t in tasks[len(log.groups) :]]
        if resumed is None and rng.random() < 0.5:  # killed in the middle of a line, but for the first
            first, size = len(path.read_bytes().partition(b"\n")[0]) + 1, path.stat().st_size
            os.truncate(path, max(first, size - int(rng.integers(200))))
        begun = 1 + sum("kept" in json.loads(row) for row in path.read_text().split("\n")[1:-1])
    assert bare(resumed) == bare(groups)
    assert {**result.to_json(), "slow_retries": 0} == {**whole.to_json(), "slow_retries": 0}
    assert len(agent.tasks) * k <= result.slow_retries
    log.remove()
    assert not path.exists()


@given(SEEDS)
def test_no_group_of_an_interrupted_evaluation_is_of_two_processes(tmp_path_factory, seed):
    """Engines may draw anew. What is kept is then of the first tasks, whatever else ended."""
    rng, path = np.random.default_rng(seed), tmp_path_factory.mktemp("log") / "log.jsonl"
    tasks, drawn, resumed = [a_task(rng, f"t{i}") for i in range(5)], [], None
    while resumed is None:
        with closing(RolloutLog(path, {"seed": 0}, tasks, 3)) as log:
            agent = KilledAgent(rng, int(rng.integers(0, 16)), anew=len(drawn))
            try:
                _, resumed = evaluate(agent, tasks, num_rollouts=3, temperature=1.0, seed=0, log=log)
            except Killed:
                pass
        kept, (rolled,) = bare(log.groups), agent.rolled
        assert kept == (drawn[-1][: len(kept)] if drawn else [])
        drawn.append([*kept, *bare(rolled[1])])
    assert bare(resumed) == drawn[-1]


def test_a_task_that_comes_twice_counts_twice():
    task, other = a_task(np.random.default_rng(0), "t0"), a_task(np.random.default_rng(1), "t1")
    agent = MadeUpAgent()
    _, groups = evaluate(agent, [task, task, other], num_rollouts=3, temperature=1.0, seed=0)
    assert bare(groups) == bare(agent.rolled[0][1]) and bare(groups[:1]) != bare(groups[1:2])


def test_rollouts_of_another_evaluation_or_process_are_refused(tmp_path):
    path, tasks = tmp_path / "log.jsonl", [a_task(np.random.default_rng(0), "t0")]
    with closing(RolloutLog(path, {"seed": 0, "rollout": {"max_length": 512}}, tasks, 2)):
        with pytest.raises(ValueError, match="Another process writes .*log.jsonl: wait for its end"):
            RolloutLog(path, {"seed": 0, "rollout": {"max_length": 512}}, tasks, 2)
    with pytest.raises(ValueError, match="its.rollout.max_length is 512 there and 1024 here. Finish"):
        RolloutLog(path, {"seed": 0, "rollout": {"max_length": 1024}}, tasks, 2)
    with pytest.raises(ValueError, match="leave out those that repeat one"):
        RolloutLog(path, {}, tasks * 2, 2)
    for text in ('{"seed": 0}\n[]\n', '{"seed": 0}\n{}\n', "nothing\n", '{"seed": 0}\n{"kept": "t0"}\n'):
        path.write_text(text)
        with pytest.raises(ValueError, match="is damaged .*: delete it to begin anew"):
            RolloutLog(path, {"seed": 0}, tasks, 2)
        assert path.read_text() == text


def test_a_full_disk_is_told_with_the_file(tmp_path):
    tasks = [a_task(np.random.default_rng(0), "t0")]
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with closing(RolloutLog(tmp_path / "log.jsonl", {"seed": 0}, tasks, 40)) as log:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))  # Python ignores SIGXFSZ
        try:
            with pytest.raises(ValueError, match=r"log.jsonl cannot be written \(File too large\): make"):
                evaluate(MadeUpAgent(), tasks, num_rollouts=40, temperature=1.0, seed=0, log=log)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    with closing(RolloutLog(tmp_path / "log.jsonl", {"seed": 0}, tasks, 2)) as log:
        assert [len(group.trajectories) for group in log.groups] == [2]


def test_sets_with_help_are_the_same_tasks_and_seeds_and_a_hint_knows_no_reference_calls():
    tasks = [a_task(np.random.default_rng(i), f"t{i}", ("held_out", "balanced")[i % 2]) for i in range(6)]
    told = {
        "environment": {"eval_split": "test"},
        "evaluation": {"num_rollouts": 2, "temperature": 0.6, "seed": 9},
    }
    agent, asked = MadeUpAgent(), []

    def help(task, rollout_index):
        asked.append((task.id, rollout_index))
        assert not task.calls and not task.patterns and all(turn.query for turn in task.turns)
        return Hint("Look first.") if task.id == "t0" else None

    how = dict(step=3, greedy=True)
    plain = evaluate_held_out(ConfigDict(told), agent, tasks, **how)
    rows = evaluate_held_out(ConfigDict(told), agent, tasks, help=help, **how)
    assert [row["set"] for row in rows] == ["iid", "balanced", "iid+help", "balanced+help"]
    assert rows[:2] == plain and asked == [(f"t{i}", m) for i in (0, 2, 4, 1, 3, 5) for m in range(2)]
    for row, without in zip(rows[2:], plain, strict=True):
        assert row.pop("hinted") == (2 if "t0" in row["by_task"] else 0)
        # The made-up agent heeds no hint, so nothing else differs.
        assert row == {k: v for k, v in without.items() if "greedy" not in k} | {"set": row["set"]}


# Limits


def test_an_evaluation_has_the_limits_of_rollouts_where_it_has_none_of_its_own():
    """0 messages are no bound; the key's default is another number."""
    asked = {"rollout.max_steps": 7, "rollout.max_messages": 9, "rollout.malformed": "end_turn"}
    config = configs.override(configs.load_file(ROOT / "configs" / "bfcl_tiny.py"), asked)
    assert build.evaluation_limits(config) == build.rollout_limits(config)
    own = {"max_length": 900, "max_steps": 3, "max_observation": 50, "max_messages": 0, "malformed": "answer"}
    config = configs.override(config, {f"evaluation.{key}": value for key, value in own.items()})
    limits = build.rollout_limits(config)
    assert (limits.max_steps, limits.max_messages, limits.malformed) == (7, 9, "end_turn")
    assert build.evaluation_limits(config) == dataclasses.replace(limits, **own)
