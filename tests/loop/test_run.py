"""A run on disk: stopped, resumed, forked, claimed; its summary, and config values by dotted key."""

import errno
import json
import re
import runpy
import shutil
import subprocess
import sys
from importlib import metadata
from types import SimpleNamespace

import pytest
from ml_collections import ConfigDict

from coevolve_jax import build
from coevolve_jax import config as configs
from coevolve_jax import train as training
from coevolve_jax.analysis.loading import load_run
from coevolve_jax.comparison import plan_file
from coevolve_jax.harness.campaign import Campaign
from coevolve_jax.loop import initial
from coevolve_jax.loop.initial import explore, tasks_from_file
from coevolve_jax.loop.run import finished
from coevolve_jax.records import rollouts
from coevolve_jax.records.files import write_lines
from coevolve_jax.records.workdir import busy, claim, fork
from coevolve_jax.synthesis.leakage import LeakGuard
from coevolve_jax.synthesis.pipeline import SynthesisStats, Synthesizer
from coevolve_jax.synthesis.task_pool import TaskPool
from coevolve_jax.synthesis.validate import execute
from coevolve_jax.train import train
from coevolve_jax.types import Observation, Outcome
from tests.loop.test_train import comparable
from tests.strategies import test_strategies
from tests.strategies.test_strategies import rows
from tests.support.method_cases import TINY, a_task
from tests.support.paths import ROOT

pytestmark = pytest.mark.slow
GUIDE = ROOT / "docs" / "guides" / "train_your_model.md"


def settings(strategy, **changes):
    kept = {"logging.rollouts_every": 1, "logging.evaluations": True}
    return test_strategies.settings(strategy, **kept, **changes)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of four steps with all its checkpoints."""
    workdir = tmp_path_factory.mktemp("run") / "whole"
    summary = train(settings("coevolve"), workdir)
    assert summary == json.loads((workdir / "summary.json").read_text())
    return workdir


@pytest.mark.nightly
def test_a_run_that_stops_on_the_way_goes_on_to_the_same_bits(whole, tmp_path, capsys):
    assert train(settings("coevolve"), tmp_path / "run", until=2) == {}
    assert "goes on after" not in capsys.readouterr().err
    assert len(rows(tmp_path / "run", "metrics.jsonl")) == 2
    assert not (tmp_path / "run" / "summary.json").exists()
    assert train(settings("coevolve"), tmp_path / "run", until=9)["steps"] == 4
    assert f"{tmp_path / 'run'} goes on after step 2 of 4." in capsys.readouterr().err
    want, got = comparable(whole), comparable(tmp_path / "run")
    for name in want:
        assert got[name] == want[name], name


def test_a_fork_that_changes_nothing_ends_as_the_run(whole, tmp_path):
    config = fork(whole, 2, tmp_path / "fork")
    assert configs.to_json(config) == configs.to_json(settings("coevolve"))
    train(config, tmp_path / "fork")
    want, got = comparable(whole), comparable(tmp_path / "fork")
    for name in want:
        assert got[name] == want[name], name


def test_a_fork_has_the_groups_of_the_steps_before_it(whole, tmp_path):
    fork(whole, 2, tmp_path / "fork")
    assert rollouts.steps(whole, rollouts.ROLLOUTS) == [0, 1, 2, 3]
    assert rollouts.steps(tmp_path / "fork", rollouts.ROLLOUTS) == [0, 1]
    assert len(list((tmp_path / "fork" / "rollouts").iterdir())) == 4
    assert rollouts.steps(whole, rollouts.EVALUATIONS) == [0, 4]
    assert rollouts.steps(tmp_path / "fork", rollouts.EVALUATIONS) == [0]


def test_a_fork_that_has_not_begun_is_the_run_up_to_there(whole, tmp_path):
    fork(whole, 1, tmp_path / "fork")
    made, all_of = load_run(tmp_path / "fork"), load_run(whole)
    assert made.rows == all_of.rows[:1] and len(all_of.rows) == 4
    assert made.evaluations == [row for row in all_of.evaluations if row["step"] == 0]
    assert made.signals == [row for row in all_of.signals if row["step"] < 1]
    assert made.trajectories == [(step, rows) for step, rows in all_of.trajectories if step < 1]
    assert len(made.tasks) == made.rows[-1]["tasks"] < len(all_of.tasks)
    fork(whole, 4, tmp_path / "late")
    assert (tmp_path / "late" / "tasks.jsonl").read_bytes() == (whole / "tasks.jsonl").read_bytes()


def test_a_fork_goes_on_with_another_strategy_from_there(whole, tmp_path):
    summary = train(fork(whole, 1, tmp_path / "fork", {"strategy.name": "static"}), tmp_path / "fork")
    assert summary["strategy"] == "static"
    ours, theirs = (rows(w, "metrics.jsonl") for w in (tmp_path / "fork", whole))
    still = lambda row: {k: v for k, v in row.items() if k not in ("seconds", "throughput", "utilization")}
    assert list(map(still, ours[:1])) == list(map(still, theirs[:1]))
    assert ours[1]["tasks"] == ours[3]["tasks"] == theirs[0]["tasks"] < theirs[1]["tasks"]


def test_a_run_begins_with_tasks_that_another_made(whole, tmp_path):
    made = rows(whole, "tasks.jsonl")
    broken = {
        **made[1],
        "id": "broken",
        "turns": [{**made[1]["turns"][0], "calls": [{"name": "ls", "arguments": {"b": 1}}]}],
    }
    elsewhere = rows(whole, "held_out.jsonl")[0]
    path = tmp_path / "given.jsonl"
    given = [*made, broken, {**elsewhere, "id": "elsewhere", "record": made[0]["record"]}]
    path.write_text("".join(json.dumps(row) + "\n" for row in given))
    config = settings("static", **{"data.initial_file": str(path)})
    assert train(config, tmp_path / "run", until=0) == {}
    first = rows(tmp_path / "run", "tasks.jsonl")
    assert [t["turns"] for t in first] == [t["turns"] for t in made]
    assert {t["lineage"]["kind"] for t in first} == {"initial"} and len({t["id"] for t in first}) == len(made)
    assert {t["lineage"]["context"] for t in first} == {t["lineage"]["context"] for t in made}
    (saved,) = (tmp_path / "run" / "checkpoints").iterdir()
    initial = json.loads((saved / "state.json").read_text())["state"]["initial"]
    assert (initial["added"], initial["refused"]) == (
        len(made),
        {"evaluation_scenario": 1, "step_failed": 1},
    )


def test_a_given_task_that_copies_an_evaluation_task_or_is_in_its_world_is_refused(whole, tmp_path):
    config, made = settings("static"), list(TaskPool.read(whole / "tasks.jsonl"))
    read_once = configs.override(config, {"environment.eval_split": "test"})
    with build.env_pool(config) as pool:
        roles, tools = build.explorer(config), build.family(config).tools
        by = lambda guard: Synthesizer(roles, tools, pool, config, guard, lambda *_: True)
        test_set = TaskPool(key=build.family(config).task_key)
        explore(by(None), test_set, build.held_out_scenarios(read_once), 2, "initial", 0)
        given = [{**task.to_json(), "id": str(n)} for n, task in enumerate([*test_set, *made])]
        (path := tmp_path / "given.jsonl").write_text("".join(json.dumps(row) + "\n" for row in given))
        first = TaskPool(key=build.family(config).task_key)
        stats = tasks_from_file(config, str(path), by(LeakGuard([made[2]])), first)
    assert stats.refused == {"near_evaluation": 1, "evaluation_scenario": 2}
    assert [t.turns for t in first] == [t.turns for t in made if t is not made[2]]


def test_a_given_task_that_no_rollout_can_hold_is_refused_as_an_explored_one(whole):
    made = list(TaskPool.read(whole / "tasks.jsonl"))
    config = settings("static", **{"data.initial_file": str(whole / "tasks.jsonl")})
    asked = []

    def fits(task, answers):
        asked.append([len(turn) for turn in answers])
        return len(asked) > 1

    with build.env_pool(config) as pool:
        roles = build.explorer(config)
        made_by = Synthesizer(roles, build.family(config).tools, pool, config, None, fits)
        first = TaskPool(key=build.family(config).task_key)
        stats = tasks_from_file(config, config.data.initial_file, made_by, first)
    assert (len(first), stats.added, stats.refused) == (len(made) - 1, len(made) - 1, {"too_long": 1})
    assert asked == [[len(turn.calls) for turn in task.turns] for task in made]


def test_a_given_task_without_turns_is_refused_by_its_own_id_before_anything_is_made(tmp_path):
    bare = {"id": "mine", "environment": "bfcl", "scenario": {}, "turns": []}
    (path := tmp_path / "given.jsonl").write_text(json.dumps(bare))
    config = settings("static", **{"data.initial_file": str(path)})
    with pytest.raises(ValueError, match=r"Task mine of .*given\.jsonl has no turns: give it some"):
        train(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_tasks_that_a_person_wrote_need_no_more_than_what_they_ask(whole, tmp_path):
    made, path = list(TaskPool.read(whole / "tasks.jsonl")), tmp_path / "mine.jsonl"
    needed = lambda row: {key: row[key] for key in ("id", "environment", "scenario", "turns")}
    path.write_text("".join(json.dumps(needed(row)) + "\n" for row in rows(whole, "tasks.jsonl")))
    own = list(TaskPool.read(path))
    assert [t.turns for t in own] == [t.turns for t in made] and {t.lineage.kind for t in own} == {
        "benchmark"
    }
    config = settings("static", **{"data.initial_file": str(path)})
    with build.env_pool(config) as pool:
        made_by = Synthesizer(build.explorer(config), build.family(config).tools, pool, config, None)
        first = TaskPool(key=build.family(config).task_key)
        stats = tasks_from_file(config, config.data.initial_file, made_by, first)
        assert stats.added == len(made) and {t.lineage.kind for t in first} == {"initial"}
        (row,) = re.findall(r'^ +({"id": "mine-0".*)$', GUIDE.read_text(), re.MULTILINE)
        path.write_text(row)
        ((_, outcome),) = execute(pool, list(TaskPool.read(path)))
    assert outcome.success


class Losing:
    """A pool that loses the world of each environment id in `lost` at its first call."""

    def __init__(self, pool, lost):
        self._pool, self._lost = pool, lost

    def __getattr__(self, name):
        return getattr(self._pool, name)

    def step(self, sessions, calls):
        gone = Observation("gone", error=True, valid=False)
        answers = self._pool.step(sessions, calls)
        return [[gone] * len(a) if s in self._lost else a for s, a in zip(sessions, answers, strict=True)]

    def score(self, sessions):
        outcomes = self._pool.score(sessions)
        return [Outcome(0.0, False, False) if s in self._lost else o for s, o in zip(sessions, outcomes)]


def test_a_given_task_whose_world_is_lost_is_no_task_that_failed(whole):
    made = list(TaskPool.read(whole / "tasks.jsonl"))
    config = settings("static", **{"data.initial_file": str(whole / "tasks.jsonl")})
    with build.env_pool(config) as pool:
        pool = Losing(pool, {0})
        made_by = Synthesizer(
            build.explorer(config), build.family(config).tools, pool, config, None, lambda *_: True
        )
        first = TaskPool(key=build.family(config).task_key)
        stats = tasks_from_file(config, config.data.initial_file, made_by, first)
    assert (len(first), stats.refused) == (len(made) - 1, {"environment": 1})


@pytest.mark.parametrize(
    "text, why",
    [
        (None, "which is no file"),
        ("", "which holds no task"),
        ("{}", "Line 1 of .* is no task"),
        ("elsewhere", "belongs to the environment 'moon'"),
    ],
)
def test_a_file_that_cannot_be_begun_with_is_one_sentence(whole, tmp_path, text, why):
    path = tmp_path / "given.jsonl"
    if text == "elsewhere":
        text = json.dumps({**rows(whole, "tasks.jsonl")[0], "environment": "moon"})
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=why):
        train(settings("static", **{"data.initial_file": str(path)}), tmp_path / "run", until=0)


@pytest.mark.parametrize(
    "step, overrides, why",
    [
        (7, {}, r"has no checkpoint of step 7 \(it has 1, 2, 3, 4\)"),
        (2, {"no.such.key": 1}, "no key 'no.such.key'"),
        (2, {"steps": "many"}, "config.steps cannot be 'many'"),
        (2, {"rollout.group_size": 1}, "config.rollout.group_size is 1"),
        (2, {"warm_start.steps": 5}, "config.warm_start.steps cannot differ in a fork, which begins after"),
        (2, {"data.own_tasks": True}, "config.data.own_tasks cannot differ in a fork, whose first tasks"),
    ],
)
def test_a_fork_that_cannot_be_is_one_sentence_and_writes_nothing(whole, tmp_path, step, overrides, why):
    with pytest.raises(ValueError, match=why):
        fork(whole, step, tmp_path / "fork", overrides)
    assert not (tmp_path / "fork").exists()


def test_a_finished_run_is_left_as_it_is(whole, tmp_path, monkeypatch, capsys):
    run, read = tmp_path / "run", lambda path: {p: p.read_bytes() for p in path.rglob("*.json*")}
    shutil.copytree(whole, run)
    (run / "report.html").unlink()
    before = read(run)
    monkeypatch.setattr(training, "evaluate_held_out", None)
    monkeypatch.setattr(training.build, "policy", None)
    told = json.loads((run / "summary.json").read_text())
    assert train(settings("coevolve"), run) == train(settings("coevolve"), run, until=9) == told
    assert train(settings("coevolve"), run, until=3) == {}
    assert read(run) == before and (run / "report.html").exists()
    assert "Held-out success" in capsys.readouterr().out


def test_the_end_of_a_finished_run_is_done_again_where_a_part_of_it_is_gone(whole, tmp_path):
    config, parts = settings("coevolve"), {}
    for name in ("evaluations.jsonl", "policy", "summary.json", "checkpoints", "a key"):
        shutil.copytree(whole, run := tmp_path / name)
        parts[name] = run
    told = json.loads((whole / "summary.json").read_text())
    assert finished(config, parts["policy"]) == told
    evaluations = rows(whole, "evaluations.jsonl")
    write_lines(parts["evaluations.jsonl"] / "evaluations.jsonl", evaluations[:-1])
    shutil.rmtree(parts["policy"] / "policy")
    (parts["summary.json"] / "summary.json").write_text("{")
    shutil.rmtree(parts["checkpoints"] / "checkpoints" / "step_00000004")
    del told["tasks"]
    (parts["a key"] / "summary.json").write_text(json.dumps(told))
    assert {name: finished(config, run) for name, run in parts.items()} == dict.fromkeys(parts)


def test_a_final_evaluation_stays_until_there_is_another_and_a_killed_export_goes(
    whole, tmp_path, monkeypatch
):
    run, config = tmp_path / "run", settings("coevolve")
    shutil.copytree(whole, run)
    shutil.rmtree(run / "policy")
    (run / ".policy-0123abcd").mkdir()
    evaluations = rows(whole, "evaluations.jsonl")

    def stopped(*arguments, **how):
        raise KeyboardInterrupt

    with monkeypatch.context() as m:
        m.setattr(training, "evaluate_held_out", stopped)
        with pytest.raises(KeyboardInterrupt):
            train(config, run)
    assert rows(run, "evaluations.jsonl") == evaluations and (run / "summary.json").exists()
    train(config, run)
    assert rows(run, "evaluations.jsonl") == evaluations
    assert (run / "policy" / "config.json").exists() and not (run / ".policy-0123abcd").exists()


def test_a_fork_leaves_other_folders_alone(whole, tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(ValueError, match="is not empty"):
        fork(whole, 2, tmp_path)
    with pytest.raises(ValueError, match="holds no run"):
        fork(tmp_path, 2, tmp_path / "fork")
    assert [p.name for p in tmp_path.iterdir()] == ["mine.txt"]


def test_a_process_that_dies_lets_go_of_its_workdir(tmp_path):
    claim(tmp_path / "run", settings("static"))
    held = f"import fcntl; f = open({str(tmp_path / 'run' / 'lock')!r}, 'a'); fcntl.flock(f, fcntl.LOCK_EX); "
    program = [sys.executable, "-c", held + "print(1, flush=True); input()"]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline()
        with pytest.raises(ValueError, match="Another process goes on with the run in"):
            claim(tmp_path / "run", settings("random"))  # a run that is starting is not taken over
        assert busy(tmp_path / "run")
        holder.kill()
        holder.wait()
        assert not busy(tmp_path / "run") and not busy(tmp_path / "none")
        claim(tmp_path / "run", settings("static"))


def test_a_start_that_failed_before_it_made_anything_leaves_the_workdir_to_the_next(tmp_path):
    mistyped = settings("static", **{"data.initial_file": "no/such.jsonl"})
    for config in (mistyped, settings("static")):
        claim(tmp_path / "run", config)
    assert configs.digest(configs.of_run(tmp_path / "run")) == configs.digest(settings("static"))
    (tmp_path / "run" / "held_out.jsonl").write_text("")
    with pytest.raises(ValueError, match="of another config"):
        claim(tmp_path / "run", mistyped)


@pytest.mark.parametrize(
    "text, why",
    [("{", "config.json cannot be read"), ("[]", "holds no config"), ("{}", "of another config")],
)
def test_a_config_that_is_none_of_ours_is_named_and_left_alone(tmp_path, text, why):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=why):
        claim(tmp_path, settings("static"))
    assert [p.name for p in tmp_path.iterdir()] == ["config.json"]
    assert (tmp_path / "config.json").read_text() == text


@pytest.mark.parametrize("below", ["", "run"])
def test_a_workdir_that_cannot_be_made_is_one_sentence(tmp_path, below):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="file.* cannot be a workdir .*choose another --workdir"):
        claim(tmp_path / "file" / below, settings("static"))


def test_checkpoints_that_have_no_place_are_refused_at_the_start(tmp_path):
    (tmp_path / "file").write_text("")
    nowhere = settings("static", **{"checkpoint.folder": str(tmp_path / "file" / "checkpoints")})
    with pytest.raises(
        ValueError, match="config.checkpoint.folder is .*file/checkpoints', which cannot be made"
    ):
        claim(tmp_path / "run", nowhere)
    claim(tmp_path / "run", settings("static", **{"checkpoint.folder": str(tmp_path / "there")}))
    assert (tmp_path / "there").is_dir()


def test_d0_is_made_under_a_guard_of_the_held_out_tasks(monkeypatch, tmp_path):
    held_out, guards = [a_task("h", "ls")], []
    monkeypatch.setattr(initial, "held_out_tasks", lambda config, synthesizer: held_out)
    monkeypatch.setattr(initial, "_first_tasks", lambda config, synthesizer: (TaskPool(), SynthesisStats()))
    monkeypatch.setattr(initial, "evaluate_held_out", lambda *args, **how: [])
    monkeypatch.setattr(initial, "leak_guard", lambda config, tasks: tasks)
    made = SimpleNamespace(roles=SimpleNamespace(costs={}))
    synthesizer = lambda guard, fits=None: guards.append((guard, fits)) or made
    initial.bootstrap(TINY, synthesizer, SimpleNamespace(fits="evaluation"), tmp_path)
    assert guards[:2] == [(None, "evaluation"), (held_out, None)]


def test_held_out_tasks_that_are_none_or_repeat_an_id_are_named(whole, tmp_path):
    one, *_ = (whole / "held_out.jsonl").read_text().splitlines(keepends=True)
    for text, why in (
        ("{}\n", "1 of .*held_out.jsonl is no task"),
        (2 * one, "2 of .* has the id held_out-0"),
    ):
        (tmp_path / "held_out.jsonl").write_text(text)
        with pytest.raises(ValueError, match=f"Line {why}"):
            initial.read_held_out(tmp_path)


def test_a_fork_that_was_interrupted_left_nothing_that_could_be_trained(whole, tmp_path, monkeypatch):
    def full(*arguments, **named):
        raise OSError("No space left on device")

    monkeypatch.setattr("coevolve_jax.records.workdir.shutil.copyfile", full)
    with pytest.raises(OSError):
        fork(whole, 2, tmp_path / "fork")
    assert not (tmp_path / "fork").exists()
    monkeypatch.undo()
    (tmp_path / "fork").mkdir()  # an empty folder is allowed
    fork(whole, 2, tmp_path / "fork")
    assert (tmp_path / "fork" / "metrics.jsonl").is_file() and len(list(tmp_path.iterdir())) == 1
    with pytest.raises(ValueError, match="is not empty"):
        fork(whole, 2, tmp_path / "fork")


def test_costs_are_booked(whole):
    costs = json.loads((whole / "ledger.json").read_text())["costs"]
    metrics, tasks = rows(whole, "metrics.jsonl"), rows(whole, "tasks.jsonl")
    assert costs["rollouts/policy"] == 4 * 2 * 4
    assert costs["sampled_tokens/policy"] > 0 and costs["environment_steps/signal"] > 0
    assert (
        costs["tasks_added/signal"]
        == len(tasks) - 8
        == sum(m["evolution"]["added"] for m in metrics if m["evolution"])
    )


def test_a_file_system_without_locks_is_told(tmp_path, monkeypatch, capsys):
    def none(file, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("coevolve_jax.records.files.fcntl.flock", none)
    claim(tmp_path / "run", settings("static"))
    (told,) = capsys.readouterr().err.splitlines()
    assert told == (
        f"{tmp_path / 'run'} lies on a file system without locks: start no second process that writes there."
    )
    with plan_file.claimed(tmp_path, 0, 1), Campaign(tmp_path).claimed():
        pass  # comparisons and campaigns go on there


def test_a_summary_names_what_its_scores_depend_on_and_what_had_no_effect(whole):
    summary = json.loads((whole / "summary.json").read_text())
    assert summary["versions"]["bfcl-eval"] == metadata.version("bfcl-eval")
    assert summary["versions"]["jax"] == metadata.version("jax")
    assert summary["notes"] == []


def test_override_copies_and_names_what_is_wrong():
    config = ConfigDict({"a": {"b": 1}, "c": 2})
    assert configs.override(config, {"a.b": 3}).to_dict() == {"a": {"b": 3}, "c": 2}
    assert config.a.b == 1
    for key in ("a.x", "a.b.c", "b"):
        with pytest.raises(ValueError, match=f"no key '{key}'"):
            configs.override(config, {key: 1})


@pytest.mark.nightly
def test_the_gradients_of_a_run_and_of_another_config_are_compared(whole, tmp_path):
    program = runpy.run_path(str(ROOT / "experiments" / "compare_gradients.py"))
    held = configs.override(configs.of_run(whole), {"learner.kl_coef": 300.0})
    (tmp_path / "config.json").write_text(configs.to_json(held))
    program["run"](whole, tmp_path)
    found = json.loads((tmp_path / "checks.json").read_text())
    last = [rollouts.read_rollouts(whole, step) for step in (2, 3)]
    if any(group.mixed for groups in last for group in groups):
        assert found.keys() == {"cos", "kl_share", "margin"}
        assert found["kl_share"][0] > 0.5 and found["cos"][0] < 1
    else:
        assert found == {}
