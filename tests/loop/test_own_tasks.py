"""Training on the environment's own tasks instead of explored ones (config.data.own_tasks)."""

import json
from collections import Counter
from dataclasses import replace

import pytest

from coevolve_jax import build
from coevolve_jax.config import check, load_file, override
from coevolve_jax.envs.bfcl.benchmark import split
from coevolve_jax.loop import initial
from coevolve_jax.loop.initial import own_tasks
from coevolve_jax.synthesis.pipeline import Synthesizer
from coevolve_jax.train import train
from tests.envs.test_env_tools import REWARDED
from tests.support.families import lamps
from tests.support.paths import ROOT

OWN = {"data.own_tasks": True, "evaluation.tasks": 7, "rollout.tasks_per_step": 2}


def of_guess(tmp_path, text=REWARDED, **values):
    (tmp_path / "guess.py").write_text(text)
    config = load_file(ROOT / "configs" / "tools.py", f"source={tmp_path / 'guess.py'}:Guess,strategy=random")
    return override(config, {**OWN, **values})


def test_those_of_the_splits_are_trained_on_and_held_out_with_no_task_in_both(tmp_path):
    config = of_guess(tmp_path)
    train_tasks, held_out = own_tasks(config)
    key = build.family(config).task_key
    family, settings = build.family(config), config.environment.to_dict()
    by_key = lambda name: {key(t): t.id for t in family.tasks(name, settings)}
    theirs = {name: by_key(name) for name in ("train", "development")}
    assert [t.lineage.parent for t in train_tasks] == list(theirs["train"].values())
    assert [(t.id, t.lineage.kind) for t in train_tasks[:2]] == [
        ("initial-0-0", "initial"),
        ("initial-0-1", "initial"),
    ]
    assert len({t.id for t in held_out}) == 7 and {key(t) for t in held_out} <= set(theirs["development"])
    assert not {key(t) for t in held_out} & {key(t) for t in train_tasks}
    assert own_tasks(config) == (train_tasks, held_out)
    others = own_tasks(override(config, {"evaluation.seed": 5}))[1]
    assert {key(t) for t in others} != {key(t) for t in held_out}


def test_a_class_that_says_the_same_in_each_world_trains_in_all_that_are_not_held_out(tmp_path):
    config = of_guess(tmp_path, REWARDED.replace(" Hint: {self.secret}", ""))
    train_tasks, held_out = own_tasks(config)
    assert len({turn.query for task in (*train_tasks, *held_out) for turn in task.turns}) == 1
    synthesizer = Synthesizer(None, None, None, config, initial.leak_guard(config, held_out))
    d0, stats = initial._first_tasks(config, synthesizer)
    assert [t.id for t in d0] == [t.id for t in train_tasks] and not stats.refused


def test_worlds_that_begin_alike_are_in_one_of_the_splits_whatever_arguments_made_them(tmp_path):
    named = "    scenarios = {'train': [{'seed': n} for n in range(5)],\n"
    named += "        'development': [{'seed': n, 'row': 1} for n in range(3, 8)], 'test': [{'seed': 9}]}\n"
    text = REWARDED.replace(" Hint: {self.secret}", "").replace("    def reset", f"{named}    def reset", 1)
    train_tasks, held_out = own_tasks(of_guess(tmp_path, text))
    seeds = lambda tasks: [task.scenario["reset"]["seed"] for task in tasks]
    assert seeds(train_tasks) == [0, 1, 2, 3, 4] and seeds(held_out) == [5, 6, 7]


def test_bfcls_own_tasks_are_those_of_its_splits():
    config = override(load_file(ROOT / "configs" / "bfcl_tiny.py"), OWN)
    train_tasks, held_out = own_tasks(config)
    assert len(train_tasks) == 100 and len(held_out) == 7
    assert {int(t.lineage.parent.rpartition("_")[2]) for t in train_tasks} == set(split("train"))
    assert {int(t.lineage.parent.rpartition("_")[2]) for t in held_out} <= set(split("development"))


def test_tasks_that_are_given_have_the_action_patterns_of_their_family(tmp_path):
    """Methods that aim at actions read them from D_t, as those of explored tasks."""
    changes = {"environment.name": "tests.support.families.lamps", "environment.eval_split": "test"}
    config = override(load_file(ROOT / "configs" / "bfcl_tiny.py"), OWN | changes)
    given = [task for part in own_tasks(config) for task in part]
    path = tmp_path / "tasks.jsonl"
    bare = [replace(task, environment=config.environment.name, patterns=("stale",)) for task in given]
    path.write_text("".join(json.dumps(task.to_json()) + "\n" for task in bare))
    from_file = initial.task_pool(config)
    with build.env_pool(config) as pool:
        initial.tasks_from_file(config, str(path), Synthesizer(None, None, pool, config, None), from_file)
    assert len(given) == 6 and len(from_file) > 2
    for task in (*given, *from_file):
        assert task.patterns == tuple(map(lamps.action_pattern, task.calls)) != ()


def test_own_tasks_near_an_evaluation_task_are_not_trained_on():
    config = override(load_file(ROOT / "configs" / "bfcl_tiny.py"), OWN)
    train_tasks, held_out = own_tasks(config)
    guard = initial.leak_guard(config, held_out)
    pool = Synthesizer(None, None, None, config, guard)
    d0, stats = initial._first_tasks(config, pool)
    near = {task.id for task in train_tasks if guard.check(task)}
    assert near and {t.id for t in train_tasks} - near == {t.id for t in d0}
    assert stats.refused == {"near_evaluation": len(near)} and stats.added == 100 - len(near)
    assert all(0 < t.lineage.similarity < 1 and t.lineage.nearest for t in d0)
    said = f"own_tasks gives {len(d0)} good tasks of 100 .*than the 99 of a batch: give more whose words,"
    with pytest.raises(ValueError, match=said):
        initial._first_tasks(override(config, {"rollout.tasks_per_step": 99}), pool)


def test_an_environment_without_own_tasks_or_with_the_same_in_both_splits_is_refused(tmp_path):
    unrewarded = REWARDED.replace("get_reward", "_get_reward")
    with pytest.raises(ValueError, match="split 'train' of environment 'tools' has 0 tasks .* 2 are needed"):
        own_tasks(of_guess(tmp_path, unrewarded))
    single = REWARDED.replace("reset(self, seed=0, **row)", "reset(self)").replace("seed % 50", "7")
    with pytest.raises(ValueError, match="split 'train' .* has 1 tasks of its own, where 2 are needed"):
        own_tasks(of_guess(tmp_path, single))
    with pytest.raises(ValueError, match="split 'development' .* has 0 tasks of its own, where 1 are needed"):
        own_tasks(of_guess(tmp_path, single, **{"rollout.tasks_per_step": 1}))


def test_it_is_not_given_beside_another_source_of_the_first_tasks():
    config = override(
        load_file(ROOT / "configs" / "bfcl_tiny.py"), OWN | {"data.initial_file": "tasks.jsonl"}
    )
    with pytest.raises(ValueError, match="data.own_tasks.*False where config.data.initial_file"):
        check(config)


@pytest.mark.slow
def test_a_run_is_rewarded_by_the_class_and_adds_tasks_that_it_explores(tmp_path):
    """The reward of a trajectory is what get_reward says of its calls, computed here once more."""
    small = {
        "model": str(ROOT / "models" / "tiny_qwen3"),
        "steps": 2,
        "warm_start.steps": 0,
        "rollout.group_size": 4,
        "evolution.every": 1,
        "evolution.freeze_last_steps": 1,
        "evolution.tasks": 2,
        "evaluation.tasks": 3,
        "evaluation.num_rollouts": 1,
        "learner.matmul_dtype": "",
        "engine.matmul_dtype": "",
        "logging.trajectories": 8,
        "logging.trajectories_every": 1,
    }
    train(of_guess(tmp_path, **small), tmp_path / "run")
    lines = lambda name: [json.loads(line) for line in (tmp_path / "run" / name).read_text().splitlines()]
    tasks = {task["id"]: task for task in lines("tasks.jsonl")}
    kinds = Counter(task["lineage"]["kind"] for task in tasks.values())
    assert kinds == {"initial": 30, "random": 2}
    assert all(t["turns"][0]["calls"] for t in tasks.values() if t["lineage"]["kind"] == "random")
    assert [task["lineage"]["parent"][:9] for task in lines("held_out.jsonl")] == ["own_world"] * 3
    told = [row for step in (0, 1) for row in lines(f"trajectories/step_{step:05d}.jsonl")]
    own = [row for row in told if row["task_id"].startswith("initial")]
    assert own
    for row in own:
        secret = tasks[row["task_id"]]["scenario"]["initial_state"]["Guess"]["secret"]
        tried = [s["call"]["arguments"]["number"] for s in row["steps"] if s["call"] and not s["error"]]
        ended = row["stop"] == "done"
        assert row["outcome"]["reward"] == (1.0 if secret in tried else 0.2 * bool(tried)) * ended
