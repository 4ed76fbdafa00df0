"""A fork says what it goes on from and keeps what made it; a workdir keeps how it is served."""

import json
import shutil

import pytest

from coevolve_jax import config as configs
from coevolve_jax.analysis.loading import load_run
from coevolve_jax.records import logs
from coevolve_jax.records.files import write_lines
from coevolve_jax.records.workdir import claim, fork
from tests.support.paths import ROOT

CONFIG = configs.load_file(ROOT / "configs" / "bfcl_tiny.py")


def begun(workdir, config, step=10, **state):
    """Writes what a fork of a step needs of a run. state: what its checkpoint holds, besides what it must."""
    folder = workdir / "checkpoints" / f"step_{step:08d}"
    folder.mkdir(parents=True)
    empty = {"sizes": {}, "evaluations": [], "tasks": {"tasks": [], "records": {}}}
    text = json.dumps({"state": {"digest": configs.digest(config), **empty, **state}})
    (folder / "manifest.json").write_text(json.dumps({"files": {}, "state": text}))
    (workdir / "config.json").write_text(configs.to_json(config))


def test_a_fork_tells_the_run_the_step_and_the_strategy_that_it_goes_on_from(tmp_path):
    theirs = configs.override(CONFIG, {"strategy.name": "static"})
    begun(tmp_path / "run", theirs)
    fork(tmp_path / "run", 10, tmp_path / "fork", {"strategy.name": "random"})
    told = {"step": 10, "config_digest": configs.digest(theirs), "strategy": "static"}
    assert json.loads((tmp_path / "fork" / "forked.json").read_text()) == {
        "run": str(tmp_path / "run"),
        **told,
    }
    assert load_run(tmp_path / "fork").forked["step"] == 10 and load_run(tmp_path / "run").forked == {}


def test_a_fork_has_nothing_of_what_the_run_did_after_the_checkpoint(tmp_path):
    run, rows = tmp_path / "run", [{"step": step} for step in range(12)]
    sizes = {"metrics.jsonl": 10 * len(logs.encode(rows[0])), "signals.jsonl": 0}
    pool = {"tasks": [{"id": "a"}], "records": {"a": {"trained": 1}}}
    begun(run, CONFIG, sizes=sizes, evaluations=rows[:1], tasks=pool)
    for name in ("metrics", "signals", "evaluations", "llm_calls", "costs"):
        write_lines(run / f"{name}.jsonl", rows)
    write_lines(run / "tasks.jsonl", [{"id": i, "record": {"trained": 9}} for i in "ab"])
    for step in (9, 10):
        path = run / "trajectories" / f"step_{step:05d}.jsonl"
        path.parent.mkdir(exist_ok=True)
        write_lines(path, rows[:1])
    before = {path: path.read_bytes() for path in run.rglob("*.jsonl")}
    fork(run, 10, tmp_path / "fork")
    found = load_run(tmp_path / "fork")
    assert (found.rows, found.evaluations) == (rows[:10], rows[:1])
    assert found.signals == found.llm_calls == found.costs == []
    assert found.tasks == [{"id": "a", "record": {"trained": 1}}]
    assert [step for step, _ in found.trajectories] == [9]
    assert {path: path.read_bytes() for path in run.rglob("*.jsonl")} == before


def test_a_run_that_lost_lines_of_a_log_is_not_forked(tmp_path):
    begun(tmp_path / "run", CONFIG, sizes={"metrics.jsonl": 40})
    write_lines(tmp_path / "run" / "metrics.jsonl", [{"step": 0}])
    with pytest.raises(ValueError, match="run/metrics.jsonl holds 12 bytes where the checkpoint recorded 40"):
        fork(tmp_path / "run", 10, tmp_path / "fork")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize(
    "key, value",
    [
        ("model", "models/tiny_qwen3_weak"),
        ("environment.name", "tau2"),
        ("environment.toolsets", ("GorillaFileSystem",)),
        ("environment.train_split", "development"),
        ("environment.eval_split", "test"),
        ("evaluation.tasks", 3),
        ("evaluation.balanced_tasks", 3),
        ("evaluation.balanced_candidates", 3),
        ("evaluation.queries", 3),
        ("evaluation.seed", 3),
        ("data.initial_tasks", 3),
        ("data.initial_file", "tasks.jsonl"),
    ],
)
def test_a_fork_keeps_what_made_its_tasks_and_the_policy_before_rl(tmp_path, key, value):
    begun(tmp_path / "run", CONFIG)
    why = f"config.{key} cannot differ in a fork, whose first tasks, held-out tasks and base policy are those"
    with pytest.raises(ValueError, match=why):
        fork(tmp_path / "run", 10, tmp_path / "fork", {key: value})
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_fork_may_be_run_and_evaluated_otherwise_and_repeat_what_is(tmp_path):
    begun(tmp_path / "run", CONFIG)
    otherwise = {
        "environment.workers": 3, "environment.call_timeout": 9.0, "environment.python": "python",
        "evaluation.num_rollouts": 9, "evaluation.every": 7, "evaluation.max_length": 99,
    }  # fmt: skip
    same = {"model": CONFIG.model, "environment.toolsets": tuple(CONFIG.environment.toolsets)}
    found = fork(tmp_path / "run", 10, tmp_path / "fork", {**same, **otherwise})
    assert found.evaluation.max_length == 99 and (tmp_path / "fork" / "config.json").exists()


def test_a_run_that_goes_on_by_its_own_config_is_served_as_it_was_last(tmp_path):
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    begun(run, CONFIG)
    shutil.copytree(run / "checkpoints", elsewhere)
    served = {"checkpoint.folder": str(elsewhere), "engine.url": "http://a"}
    claim(run, configs.override(CONFIG, served))
    found = configs.of_run(run)
    assert (found.checkpoint.folder, found.engine.url) == (str(elsewhere), "http://a")
    claim(run, found)
    before = (run / "config.json").read_text()
    moved = configs.override(CONFIG, {"checkpoint.folder": str(tmp_path / "mistyped")})
    with pytest.raises(ValueError, match="mistyped' and holds no checkpoint of this run, whose .*elsewhere"):
        claim(run, moved)
    assert (run / "config.json").read_text() == before


@pytest.mark.parametrize("text", ["", '{"steps"'])
def test_a_kill_in_the_first_write_leaves_the_workdir_to_the_same_command(tmp_path, text):
    (tmp_path / "lock").touch()
    (tmp_path / "config.json.tmp").write_text(text)
    claim(tmp_path, CONFIG)
    assert configs.to_json(configs.of_run(tmp_path)) == configs.to_json(CONFIG)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "lock"]
