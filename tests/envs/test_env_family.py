"""Environment families: imports of a worker, a family in its own environment, the conformance suite."""

import dataclasses
import importlib
import json
import os
import signal
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from coevolve_jax import build, envs
from coevolve_jax.envs import base, bfcl
from coevolve_jax.envs.bfcl import benchmark
from coevolve_jax.envs.remote import Remote
from coevolve_jax.envs.worker_pool import ProcessPool
from coevolve_jax.loop.inputs import versions
from coevolve_jax.rollout.agent import Agent
from coevolve_jax.rollout.limits import Limits
from coevolve_jax.rollout.tool_call_format import render_call
from coevolve_jax.synthesis.leakage import LeakGuard
from coevolve_jax.synthesis.task_pool import TaskPool
from coevolve_jax.testing.environment import check_environment
from coevolve_jax.types import Call, Group, Task, Trajectory, Turn
from tests.rollout.test_rollout import FOLDER, Script
from tests.support.paths import ROOT

ENVIRON = {**os.environ, "PYTHONPATH": os.pathsep.join(os.path.abspath(p) for p in sys.path if p)}
BLOCKED = "import sys; sys.modules.update(dict.fromkeys(('numpy', 'jax', 'ml_collections', 'bfcl_eval')))\n"
DOORS = "tests.support.families.door_game"
DOORWORLD = """
import sys
ROOMS, THINGS = ("attic", "cellar", "study", "pantry"), ("lamp", "rope", "coin")

def house(seed):
    return {"number": seed, "key_room": ROOMS[seed % 4], "thing": THINGS[seed % 3]}

def start(house):
    return {"at hall", f"number {house['number']}"}

def act(house, facts, command):
    verb, _, what = command.partition(" ")
    if verb == "open" and what in ROOMS:
        facts.add(f"open {what}")
    elif verb == "go" and f"open {what}" in facts:
        facts.difference_update({f for f in facts if f.startswith("at ")})
        facts.add(f"at {what}")
    elif verb == "take" and what == house["thing"] and f"at {house['key_room']}" in facts:
        facts.add(f"have {what}")
    elif verb == "where":
        return sys.prefix
    elif verb == "modules":
        return [m for m in ("numpy", "jax") if m in sys.modules]
    else:
        raise ValueError(f"You cannot {command[:40]!r}.")
    return f"You {verb} the {what}."
"""


def act(*commands):
    return [Call("act", {"command": command}) for command in commands]


@pytest.fixture(scope="module")
def doors(tmp_path_factory):
    """The interpreter of a virtual environment that has `doorworld`, unlike this one."""
    folder = tmp_path_factory.mktemp("doors") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (packages,) = folder.glob("lib/python3*/site-packages")
    (packages / "doorworld.py").write_text(DOORWORLD)
    (packages / "doorworld-3.1.dist-info").mkdir()
    (packages / "doorworld-3.1.dist-info" / "METADATA").write_text("Name: doorworld\nVersion: 3.1\n")
    return str(folder / "bin" / "python")


@pytest.fixture(scope="module")
def door_pool(doors):
    with ProcessPool(DOORS, workers=2, timeout=60.0, python=doors) as pool:
        yield pool


# --- What is imported where -----------------------------------------------------------------------


def test_what_every_worker_imports_is_the_standard_library():
    code = BLOCKED + (
        "import coevolve_jax, coevolve_jax.types, coevolve_jax.envs.base, coevolve_jax.envs.calls\n"
        "from coevolve_jax.envs import worker, worker_pool, remote, load\n"
        "family = load('bfcl')\n"  # without its packages, as in an interpreter that lacks them
        "from coevolve_jax.types import Call, Task, Turn\n"
        "task = Task('t', 'bfcl', {'toolsets': [], 'initial_state': {}, 'excluded': []}, (Turn('q'),))\n"
        "print(family.task_key(task), family.features(task), family.action_pattern(Call('ls', {})))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=ENVIRON)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == "ls"


def test_a_family_in_its_own_virtual_environment_runs_there_and_only_there(doors, door_pool):
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("doorworld")
    family = envs.load(DOORS, doors)
    scenario = family.scenarios("train", {})[0]
    ((where, modules),) = door_pool.step(door_pool.reset([scenario]), [act("where", "modules")])
    assert json.loads(where.text)["said"] == str(Path(doors).parents[1]) != sys.prefix
    assert json.loads(modules.text)["said"] == []
    numpy = subprocess.run([doors, "-c", "import numpy"], capture_output=True)
    assert numpy.returncode != 0  # workers do without numpy


def test_unknown_families_and_interpreters_are_named_in_one_sentence(tmp_path, monkeypatch):
    with pytest.raises(
        ValueError,
        match="config.environment.name is 'mars': it must be one of appworld, bfcl, folder_tools, mcp, tau2, "
        "textworld, tools, or",
    ):
        envs.load("mars")
    with pytest.raises(
        ValueError, match="'no_such_package.game': it must be one of appworld, bfcl, folder_tools, mcp"
    ):
        envs.load("no_such_package.game")
    (tmp_path / "half_family").mkdir()
    (tmp_path / "half_family" / "game.py").write_text("import doorworld\n")
    (tmp_path / "half_family" / "empty.py").write_text("def make(): pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match="imports doorworld, and .*python.* does not have that"):
        envs.load("half_family.game")
    with pytest.raises(ValueError, match="half_family.empty must define the function scenarios"):
        envs.load("half_family.empty")
    with pytest.raises(ValueError, match="environment.python is '/no/such/python', which cannot be started"):
        envs.load("bfcl", "/no/such/python").scenarios("train", {})
    made = r"experiments/set_up.py textworld` makes .textworld/bin/python\.$"
    with pytest.raises(ValueError, match=made):
        envs.load("textworld", ".textworld/bin/no_python").scenarios("train", {})


def test_a_package_that_is_missing_is_named_with_the_command_that_installs_it(tmp_path, monkeypatch):
    absent = "import sys; sys.modules['bfcl_eval'] = None\nfrom coevolve_jax import envs\n"
    code = (
        f"{absent}try:\n    envs.load('bfcl').scenarios('train', {{}})\nexcept ValueError as e:\n    print(e)"
    )
    told = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert told.stdout.startswith("The environment 'bfcl' lacks a package (No module named 'bfcl_eval")
    assert told.stdout.endswith("): python experiments/set_up.py bfcl installs it.\n")
    (tmp_path / "own_family").mkdir()
    (tmp_path / "own_family" / "game.py").write_text(
        "def scenarios(split, settings):\n    import doorworld\ntasks = tools = make = scenarios\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        ValueError, match=r"'own_family.game' lacks a package \(No .* 'doorworld'\): install it\."
    ):
        envs.load("own_family.game").scenarios("train", {})


def test_what_fails_under_the_other_interpreter_is_said(doors):
    with pytest.raises(ValueError, match="Unknown split 'dev'"):
        envs.load(DOORS, doors).scenarios("dev", {})
    with pytest.raises(ValueError, match="could not be asked for its scenarios under .*venv"):
        envs.load("bfcl", doors).scenarios("train", {})  # this interpreter has no bfcl_eval
    with pytest.raises(RuntimeError, match="A worker of the environment 'bfcl' did not start"):
        ProcessPool("bfcl", workers=1, python=doors)


def test_a_helper_that_was_killed_or_interrupted_answers_the_next_question(doors, monkeypatch):
    remote = Remote(DOORS, doors)
    ((_, version),) = remote.ask("versions").items()
    process = remote._process
    os.kill(process.pid, signal.SIGKILL)  # at rest, as where memory is short
    process.process.wait()
    assert remote.ask("versions") == {"doorworld": version} and remote._process is process

    def interrupt(*given):
        raise KeyboardInterrupt

    monkeypatch.setattr(process, "_read_line", interrupt)  # the question is on its way
    with pytest.raises(KeyboardInterrupt):
        remote.ask("tools", envs.load(DOORS, doors).scenarios("train", {})[0].to_json())
    assert process.process.poll() is not None
    assert remote.ask("versions") == {"doorworld": version}


# --- A family without references, of free text, in its own environment ----------------------------


def test_scenarios_tasks_and_tools_come_from_the_other_interpreter(doors):
    family = envs.load(DOORS, doors)
    train = family.scenarios("train", {})
    held_out = family.scenarios("test", {}, apart_from="train")
    assert [s.id for s in train] == [f"house_{i}" for i in range(6)]
    assert [s.id for s in held_out] == [f"house_{i}" for i in range(6, 10)]
    (task, *_) = family.tasks("test", {})
    assert task.calls == () and len(task.turns) == 2
    assert family.tools(task) is family.tools(
        dataclasses.replace(task, id="other", scenario={**task.scenario})
    )
    assert family.tools(task)[0]["function"]["name"] == "act"


def test_versions_are_those_of_the_familys_interpreter(doors):
    assert envs.load(DOORS, doors).versions() == {"doorworld": "3.1"}
    assert envs.load(DOORS).versions() == {}
    assert envs.load("bfcl").versions() == {"bfcl-eval": metadata.version("bfcl-eval")}
    told = versions(envs.load(DOORS, doors).versions(), {"sglang": "0.5"})
    assert told["doorworld"] == "3.1" and told["sglang"] == "0.5" and told["jax"] == metadata.version("jax")


def test_tasks_without_references_fill_a_pool_and_are_guarded(doors):
    family = envs.load(DOORS, doors)
    tasks = family.tasks("train", {})
    pool = TaskPool(key=family.task_key)
    assert pool.add(tasks) == [None] * 6
    same = dataclasses.replace(tasks[0], id="same")
    other = dataclasses.replace(tasks[0], id="other", turns=(Turn("Open it."), tasks[0].turns[1]))
    assert pool.add([same, other]) == ["duplicate", None]
    guard = LeakGuard(tasks[:3], features=family.features)
    assert guard.check(same) == "near_evaluation" and guard.check(tasks[5]) is None


def test_a_rollout_of_free_text(doors, door_pool):
    family, policy = envs.load(DOORS, doors), build.policy(FOLDER)
    (task, *_) = family.tasks("test", {})  # the attic and the rope: seed 4
    said = [
        *map(render_call, act("open attic")),
        "Done.",
        "".join(map(render_call, act("GO there", "go attic"))),
    ]
    said += [*map(render_call, act("take rope")), render_call(Call("jump", {})), "Done."]
    agent = Agent(
        Script(policy, said),
        policy.chat,
        door_pool,
        family.tools,
        Limits(4000, 300),
        1,
        family.action_pattern,
    )
    (t,) = agent.rollout_groups([task], [[0]], 1.0)[0].trajectories
    agent.close()
    assert t.outcome.success and t.outcome.progress == 1.0 and t.stop == "done"
    assert [s.pattern for s in t.steps] == ["act:open", "act:go", "act:go", "act:take", ""]
    assert t.actions == ("act:open", "act:go", "act:go", "act:take")  # there is no tool "jump"
    assert [s.error for s in t.steps] == [False, True, False, False, True]
    report = family.report([Group(task, (t,))], door_pool.judge)
    counts = {"success": 1.0, "trials": 1, "invalid": 0}
    assert report == {"benchmark": "door_game", "scoring": "the environment", **counts}


def test_a_world_that_does_not_say_what_it_would_take_offers_no_options(doors, door_pool):
    scenarios = envs.load(DOORS, doors).scenarios("train", {})[:3]
    env_ids = door_pool.reset(scenarios)
    assert door_pool.options(env_ids) == [[]] * 3
    door_pool.close(env_ids)


def test_exploration_sees_states_change(doors, door_pool):
    (scenario, *_) = envs.load(DOORS, doors).scenarios("train", {})
    (one,) = door_pool.execute([(scenario, act("open attic", "open attic", "dig"))])
    before, opened, again, after = one.fingerprints
    assert before != opened == again == after and [o.error for o in one.observations] == [False, False, True]


def test_a_crash_in_the_other_interpreter_costs_one_world(doors, door_pool):
    (task, *_) = envs.load(DOORS, doors).tasks("test", {})
    env_ids = door_pool.reset([task] * 6)
    calls = [act("open attic")] * 6
    calls[2] = act("open attic", "crash", "take rope")
    observed = door_pool.step(env_ids, calls)
    assert [o.fatal for o in observed[2]] == [False, True, True] and "code 7" in observed[2][1].text
    assert all(o.valid for each in observed for o in each)
    assert not any(o.fatal for i in range(6) if i != 2 for o in observed[i])
    door_pool.end_turn(env_ids)
    assert all(o.valid for o in door_pool.score(env_ids))
    assert [o.progress for o in door_pool.score(env_ids)] == [0.5 * (i != 2) for i in range(6)]
    door_pool.close(env_ids)


# --- What a family answers ------------------------------------------------------------------------


def test_bfcls_lists_are_those_of_the_benchmark():
    settings = {"toolsets": ("GorillaFileSystem", "TwitterAPI"), "workers": 2}
    family = envs.load("bfcl")
    assert family.scenarios("train", settings) == benchmark.scenarios("train", settings["toolsets"])
    train = {start for s in family.scenarios("train", settings) for start in benchmark.starts(s)}
    held_out = family.scenarios("test", settings, apart_from="train")
    everything = family.scenarios("test", settings)
    assert held_out == [s for s in everything if train.isdisjoint(benchmark.starts(s))]
    assert 0 < len(held_out) < len(everything)
    assert [t.id for t in family.tasks("all", {})] == [t.id for t in benchmark.load()]
    assert {int(t.id.rpartition("_")[2]) for t in family.tasks("test", {})} == benchmark.split("test")
    assert family.action_pattern(Call("ls", {})) == "ls"


def test_a_held_out_scenario_shares_the_first_state_of_no_class_with_training():
    """Some share that of one class, and not of all."""
    family = envs.load("bfcl")
    train = {start for s in family.scenarios("train", {}) for start in benchmark.starts(s)}
    everything = map(benchmark.starts, family.scenarios("test", {}))
    partly = [own for own in everything if own & train and own - train]
    held_out = family.scenarios("test", {}, apart_from="train")
    assert partly and held_out and all(train.isdisjoint(benchmark.starts(s)) for s in held_out)


def test_bfcls_task_key_ignores_the_order_of_the_classes_and_the_wording():
    calls = (Call("ls", {"n": 5.0}),)
    one = Task("a", "bfcl", bfcl.scenario(["A", "B"], {"x": 1}), (Turn("q", calls),))
    same = Task(
        "b", "bfcl", bfcl.scenario(["B", "A"], {"x": 1.0}, ["cd"]), (Turn("r", (Call("ls", {"n": 5}),)),)
    )
    split = dataclasses.replace(one, turns=(Turn("q", calls), Turn("q", ())))
    assert bfcl.task_key(one) == bfcl.task_key(same) != bfcl.task_key(split)
    assert bfcl.task_key(one) == "3ae0dac8183378d28d93f89547c08dc76fc52ce2e66259b0606c2c4ce7674857"


def test_the_default_report_and_that_by_verdicts():
    def trajectory(task, stop, success, valid=True, calls=()):
        outcome = dict(reward=float(success), success=success, valid=valid, progress=0.0, reason="")
        steps = [
            dict(turn=n, text="", call=c.to_json(), observation="", error=False, pattern=None)
            for n, c in calls
        ]
        fields = dict(task_id=task.id, rollout_index=0, stop=stop, outcome=outcome, steps=steps, hints=[])
        return Trajectory.from_json(fields)

    tasks = [Task(n, "e", {"part": n}, (Turn("q"), Turn("r"))) for n in "ab"]
    ls, cd = Call("ls", {}), Call("cd", {})
    rollouts = [
        trajectory(tasks[0], "done", True, calls=[(0, ls), (1, cd), (1, ls)]),
        trajectory(tasks[0], "step_limit", False),
        trajectory(tasks[1], "done", False, calls=[(1, cd)]),
        trajectory(tasks[1], "environment", False, valid=False),
    ]
    hung = dataclasses.replace(rollouts[1], stop="call_failed")
    asked = []

    def judge(jobs):
        asked.extend(jobs)
        return [{"valid": t == "a", "error_type": "wrong"} for t, _ in jobs]

    lost_one = {"success": 1 / 3, "trials": 3, "invalid": 1, "success_if_invalid_failed": 1 / 4}
    groups = [Group(task, tuple(rollouts[2 * i : 2 * i + 2])) for i, task in enumerate(tasks)]
    own = base.report(groups, judge)
    assert {k: own[k] for k in lost_one} == lost_one and not asked
    assert base.success_by("part", groups) == {
        "a": {"success": 1 / 2, "trials": 2, "invalid": 0},
        "b": {"success": 0.0, "trials": 1, "invalid": 1, "success_if_invalid_failed": 0.0},
    }
    none = base.success_by("part", [Group(tasks[0], (rollouts[3],) * 2)])["a"]
    assert none == {"success": None, "trials": 0, "invalid": 2, "success_if_invalid_failed": 0.0}
    expected = {
        **lost_one,
        "failures": {"force_terminated": 1, "wrong": 1},
        "by_task": {"a": [1, 2], "b": [0, 1]},
    }
    assert base.report_verdicts(groups, judge) == expected
    assert asked == [("a", [[[ls]], [[cd], [ls]]]), ("b", [[], [[cd]]])]
    lost = [{"valid": True, "error_type": ""}, {"valid": False, "error_type": "pool:timeout"}]
    assert base.report_verdicts(groups, lambda _: lost) == {
        "success": 1 / 2,
        "trials": 2,
        "invalid": 2,
        "success_if_invalid_failed": 1 / 4,
        "failures": {"force_terminated": 1, "pool:timeout": 1},
        "by_task": {"a": [1, 2], "b": [0, 0]},
    }
    counted = base.report_verdicts([Group(tasks[0], (rollouts[0], hung)), groups[1]], judge)
    assert counted == {**expected, "failures": {"call_failed": 1, "wrong": 1}}


def test_few_lost_rollouts_are_counted_and_many_bound_the_score():
    assert base.share(50, 99, 1) == {"success": 50 / 99, "trials": 99, "invalid": 1}
    many = base.share(50, 98, 2)
    assert many["success_if_invalid_failed"] == 50 / 100 and many["invalid"] == 2


@pytest.mark.slow
def test_the_door_game_conforms_in_its_own_environment(doors):
    calls = act("open attic", "open cellar", "go attic", "take lamp", "where")
    check_environment(DOORS, doors, calls=calls, timeout=2.0)
    with pytest.raises(AssertionError, match="no reference calls: give the suite `calls`"):
        check_environment(DOORS, doors, timeout=2.0)
