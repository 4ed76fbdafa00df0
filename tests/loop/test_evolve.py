"""An evolution at once or beside training: its saved state, and how a fork treats a pending one."""

import json
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

from coevolve_jax import build
from coevolve_jax.config import load_file, override, schedule
from coevolve_jax.loop.evolve import Evolver
from coevolve_jax.loop.lab import Laboratory
from coevolve_jax.strategies.base import evolves
from coevolve_jax.synthesis.pipeline import SynthesisStats
from coevolve_jax.synthesis.task_pool import TaskPool
from coevolve_jax.testing.made_up import MadeUpRoll, made_up_task
from tests.support.paths import ROOT

TINY = load_file(ROOT / "configs" / "bfcl_tiny.py")
SMALL = {
    "steps": 20, "evolution.every": 5, "evolution.freeze_last_steps": 3, "evolution.async_steps": 3,
    "evolution.contexts": 4,
    "rollout.tasks_per_step": 4, "rollout.group_size": 4, "signals.rare_percent": 20.0,
}  # fmt: skip


class Notebook:
    """A Synthesizer that makes a task of each context and records its requests."""

    roles = SimpleNamespace(costs=None, llm_calls=None)

    def __init__(self):
        self.reflected, self.grown = [], []

    def reflect(self, evidence):
        self.reflected.append([(e.signal.kind, e.task.id, e.signal.rollout_index) for e in evidence])
        return list(evidence)

    def synthesize(self, tasks, contexts, request):
        kind, step = request.kind, request.step
        new = [made_up_task(f"{kind}-{step}-{i}", request.rng, kind, step) for i in range(len(contexts))]
        self.grown.append(step)
        return SynthesisStats(proposed=len(new), added=sum(word is None for word in tasks.add(new)))


class Running:
    """The steps of a run without a model. saved: the result of `save`."""

    def __init__(self, config, saved=None):
        self.config, self.made = config, Notebook()
        self.tasks = TaskPool.from_json(saved["tasks"]) if saved else TaskPool()
        if not saved:
            self.tasks.add([made_up_task(f"initial-0-{i}", np.random.default_rng(i)) for i in range(12)])
        self.strategy, self.written = build.strategy(config, saved), []
        own, self.step = self.strategy.to_json, saved["step"] if saved else 0
        self.strategy.to_json = lambda: self.written.append(self.step) or own()
        lab = Laboratory(self.tasks, [], self.made, lambda step: None, Counter())
        self.evolver = Evolver(config, self.strategy, lab, saved)
        self.stats = {}

    def until(self, end):
        while self.step < end:
            groups = self.strategy.collect(self.step, self.tasks, MadeUpRoll(self.config, self.step))
            self.strategy.compute_advantages(groups)
            self.strategy.observe(self.step, groups)
            if (grown := self.evolver(self.step)) is not None:
                self.stats[self.step] = grown.added
            self.step += 1
        return self

    def save(self):
        made = {"tasks": self.tasks.to_json(), "strategy": self.evolver.to_json(), "step": self.step}
        return json.loads(json.dumps(made))


def test_the_state_is_written_down_where_the_strategy_may_evolve_and_nowhere_else():
    run = Running(override(TINY, SMALL)).until(20)
    assert run.written == [s for s in range(20) if evolves(run.config, s)] == [4, 9]
    assert run.made.grown == [4, 9] and run.stats.keys() == {7, 12}
    # A strategy that does not say when it evolves.
    assert (
        len(
            Running(override(TINY, {**SMALL, "strategy.name": "tests.support.strategies.memory"}))
            .until(9)
            .written
        )
        == 9
    )


@pytest.mark.parametrize("name", ["coevolve", "webrl"])
def test_an_evolution_under_way_stays_as_it_began_while_the_strategy_learns_on(name):
    """WebRL's critic, which its evolution reads, learns from every later step."""
    run = Running(override(load_file(ROOT / "configs" / "bfcl_tiny.py", f"strategy={name}"), SMALL))
    began, later = (run.until(end).save()["strategy"] for end in (5, 7))
    assert began["pending"] == later["pending"] and began["state"] != later["state"]


def test_a_strategy_that_evolves_when_it_said_it_would_not_is_told(monkeypatch):
    run = Running(override(TINY, SMALL)).until(2)
    monkeypatch.setattr(run.strategy, "evolve", lambda step, lab: lab.reflect([]))
    with pytest.raises(
        ValueError, match="evolves after step 2, and READS of its module names evolution.every"
    ):
        run.until(3)


def test_nothing_is_remembered_for_an_evolution_that_does_not_come():
    run, sizes = Running(override(TINY, {**SMALL, "evolution.async_steps": 0})), []
    for step in range(20):
        sizes.append(len(run.until(step + 1).strategy._evidence))
    assert [s for s in range(20) if evolves(run.config, s)] == [4, 9, 14]
    assert 0 < sizes[0] < sizes[3] and sizes[4] == 0 < sizes[13] and sizes[14:] == [0] * 6


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"evolution.every": 4},
        {"evolution.every": 3, "steps": 25},
        {"strategy.probe": 0},
        {"steps": 7},
        {"evolution.freeze_last_steps": 16},
    ],
)
def test_a_fork_without_async_steps_makes_up_for_the_evolution_that_was_under_way(changes):
    """It gets the old evidence, D_t grows at the end of the next step, and an earlier save loses nothing."""
    run = Running(override(TINY, SMALL)).until(6)
    saved = run.save()
    assert saved["strategy"]["pending"]["step"] == 4
    alone = Running(override(TINY, {**SMALL, "evolution.async_steps": 0, **changes}), saved)
    assert alone.save()["strategy"]["pending"] == saved["strategy"]["pending"]
    again = Running(alone.config, alone.save()).until(7)
    run.evolver.close()
    assert again.made.reflected == run.made.reflected and again.made.grown == [4]
    assert again.stats == {6: len(again.tasks) - 12} and again.stats[6] > 0
    assert "pending" not in again.save()["strategy"]
    assert again.until(10).made.grown[1:] == [s for s in range(7, 10) if evolves(again.config, s)]


def test_a_pending_evolution_goes_on_under_its_own_schedule(monkeypatch):
    """Some strategies count the evolutions of their schedule."""
    saved = Running(override(TINY, SMALL)).until(6).save()
    built, build_strategy = [], build.strategy
    monkeypatch.setattr(
        build, "strategy", lambda config, saved=None: built.append(config) or build_strategy(config, saved)
    )
    resumed = Running(override(TINY, SMALL), saved).until(8)
    assert resumed.made.grown == [4] and len(built) == 2  # the run's strategy, and the one of that time
    assert [list(schedule.evolutions(config)) for config in built] == [[4, 9]] * 2


@pytest.mark.parametrize("changes", [{"steps": 8}, {"evolution.freeze_last_steps": 16}, {"steps": 10}])
def test_a_fork_with_another_schedule_goes_on_with_the_pending_evolution(changes):
    """By its own schedule the evolution after step 4 would come too late."""
    run = Running(override(TINY, SMALL)).until(6)
    saved = run.save()
    fork = Running(override(TINY, {**SMALL, **changes}), saved)
    assert not evolves(fork.config, 4)
    assert fork.save()["strategy"]["pending"] == saved["strategy"]["pending"]
    fork.until(8)
    run.until(8)
    assert fork.made.reflected == run.made.reflected and fork.made.grown == [4]
    assert [t.id for t in fork.tasks] == [t.id for t in run.tasks] and fork.stats == run.stats


@pytest.mark.parametrize("steps", [0, 3])
def test_a_fork_with_another_strategy_forgets_the_evolution_that_was_under_way(steps):
    saved = Running(override(TINY, SMALL)).until(6).save()
    assert saved["strategy"]["pending"]
    other = {**SMALL, "evolution.async_steps": steps, "strategy.name": "static"}
    assert "pending" not in Running(override(TINY, other), saved).save()["strategy"]


def test_two_evolutions_of_one_step_are_counted_together():
    saved = Running(override(TINY, {**SMALL, "evolution.async_steps": 5})).until(9).save()
    alone = Running(override(TINY, {**SMALL, "evolution.async_steps": 0}), saved).until(10)
    assert alone.made.grown == [4, 9] and alone.stats == {9: len(alone.tasks) - 12}


def test_a_fork_with_another_strategy_leaves_it():
    saved = Running(override(TINY, SMALL)).until(6).save()
    assert (
        Running(override(TINY, {**SMALL, "evolution.async_steps": 0, "strategy.name": "static"}), saved)
        .until(8)
        .stats
        == {}
    )
