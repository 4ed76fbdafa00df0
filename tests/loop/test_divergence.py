"""A diverging run is a result: its workdir records it, and its comparison completes with it."""

import json
import sys

import pytest

from coevolve_jax.analysis import report
from coevolve_jax.comparison import cell_files, cells, plan, results, variations
from coevolve_jax.comparison.plan import Cell
from coevolve_jax.comparison.table import table
from coevolve_jax.config import load_file, override
from coevolve_jax.records.workdir import fork
from coevolve_jax.train import train
from tests.comparison.test_comparison import SMALL, command
from tests.support import forked
from tests.support.paths import ROOT

pytestmark = pytest.mark.slow

# The first update breaks the policy, which the next rollouts find.
BREAKING = [
    "steps=30",
    "learner.max_grad_norm=1e30",
    "learner.warmup_steps=2",
    "checkpoint.every=1",
    "learner.learning_rate=1e15",
    "evaluation.every=0",
]


def configured(texts):
    config = load_file(ROOT / "configs" / "bfcl_tiny.py")
    changes = dict(text.split("=", 1) for text in texts)
    return override(config, {key: variations.parse_value(config, key, text) for key, text in changes.items()})


@pytest.fixture(scope="module")
def broken(tmp_path_factory):
    """A comparison whose only cell has diverged."""
    folder = tmp_path_factory.mktemp("comparison") / "broken"
    small = [text for text in SMALL if not text.startswith("evolution.")]  # the arm's tasks do not grow
    config, cell = configured([*small, *BREAKING]), Cell("static", 0)
    cell.start(folder).mkdir(parents=True)
    train(plan.start_config(config, cell), cell.start(folder), until=0)
    cells.prepare(folder, config, cell)
    with pytest.raises(FloatingPointError, match="not finite"):
        train(plan.cell_config(config, cell), cell.workdir(folder))
    return folder, cell, plan.cell_config(config, cell)


def test_a_run_that_diverges_notes_the_step_and_why(broken):
    folder, cell, _ = broken
    workdir = cell.workdir(folder)
    steps = len((workdir / "metrics.jsonl").read_text().splitlines())
    noted = json.loads((workdir / "failure.json").read_text())
    assert noted.keys() == {"step", "why"} and noted["step"] == steps == 1
    assert "The sampler's log-probabilities are not finite" in noted["why"]
    assert (workdir / "checkpoints" / "step_00000001").exists()
    assert not (workdir / "summary.json").exists() and cells.ended(workdir)
    page = report.write_report(workdir).read_text()
    assert f"The run diverged at step {steps}. " in page


def test_a_last_update_that_breaks_the_policy_is_seen_by_the_last_evaluation(broken, tmp_path):
    folder, cell, _ = broken
    config = fork(cell.workdir(folder), 0, tmp_path / "run", {"steps": 1})
    with pytest.raises(FloatingPointError, match="the last update broke the policy"):
        train(config, tmp_path / "run")
    assert json.loads((tmp_path / "run" / "failure.json").read_text())["step"] == 1
    assert not (tmp_path / "run" / "summary.json").exists()


def test_its_comparison_finishes_and_does_not_run_it_again(broken, quick):
    folder, cell, config = broken
    noted = (cell.workdir(folder) / "failure.json").read_bytes()
    heeded = [
        text for text in SMALL if not text.startswith("evolution.")
    ]  # by an arm whose tasks do not grow
    (folder / "plan.json").write_text(json.dumps({"config": _numbers(configured([*heeded, *BREAKING]))}))
    small = [text for text in heeded if text.partition("=")[0] not in {b.partition("=")[0] for b in BREAKING}]
    done = forked.run(command(folder, "--arms=static", "--seeds=0", small=[*small, *BREAKING]), quick)
    assert done.returncode == 0, done.stderr
    assert f"Diverged, which is a result: static, seed 0 (step {json.loads(noted)['step']})." in done.stdout
    assert (cell.workdir(folder) / "failure.json").read_bytes() == noted
    assert not (folder / "cells/static/seed_0.log").exists()  # nothing started
    assert (folder / "report.html").exists() and "not finished" not in done.stdout


def _numbers(config):
    from coevolve_jax import config as configs

    return json.loads(json.dumps(configs.numbers(config.to_dict())))


def test_a_cell_that_diverges_is_no_failure_and_is_tried_again_only_where_asked(tmp_path, monkeypatch):
    code = (
        "import pathlib, sys; folder = pathlib.Path(sys.argv[1]); n = len(list(folder.glob('try_*')));"
        "assert not (folder / 'failure.json').exists(); (folder / f'try_{n}').touch();"
        "n == 2 and sys.exit('Error: a server is gone');"
        '(folder / \'failure.json\').write_text(\'{"step": 4, "why": "not finite"}\'); '
        "sys.exit('Error: not finite')"
    )
    monkeypatch.setattr(cells, "command", lambda workdir: [sys.executable, "-c", code, str(workdir)])
    monkeypatch.setattr(cells, "begun", lambda start: True)
    config, cell, told = configured(SMALL), Cell("static", 0), []
    workdir = cell.workdir(tmp_path)
    workdir.mkdir(parents=True)
    note = lambda cell, failure: told.append(failure)
    assert cells.run_all(tmp_path, config, [cell], 1, note) == [] and told == [None]
    assert cells.diverged(workdir) == {"step": 4, "why": "not finite"}
    assert cells.run_all(tmp_path, config, [cell], 1, note) == [] and told == [None]
    assert cells.run_all(tmp_path, config, [cell], 1, note, retry=True) == [] and told == [None, None]
    assert sorted(path.name for path in workdir.glob("try_*")) == ["try_0", "try_1"]
    first, second = cell_files.ran(workdir)
    assert second["commit"] == cells.commit() and {*second} == {"commit", "machine", "date"}
    assert first == {**second, "diverged": {"step": 4, "why": "not finite"}}
    with monkeypatch.context() as patch:  # ended before its turn comes, it has its result still
        patch.setattr(cells, "run_side_by_side", lambda *works: [])
        cells.run_all(tmp_path, config, [cell], 1, note, retry=True)
    assert cells.diverged(workdir)
    # The failure is no divergence this time.
    (failure,) = cells.run_all(tmp_path, config, [cell], 1, note, retry=True)
    assert "a server is gone" in failure.why and not cells.ended(workdir)
    assert [entry.get("diverged", {}).get("step") for entry in cell_files.ran(workdir)] == [4, 4, None]
    # It goes on in this place, which is no other try.
    assert cells.run_all(tmp_path, config, [cell], 1, note) == []
    assert len(cell_files.ran(workdir)) == 3


@pytest.mark.nightly
def test_a_run_that_passes_the_step_forgets_that_it_diverged(tmp_path):
    config, workdir = configured([*SMALL, "checkpoint.every=1"]), tmp_path / "run"
    train(config, workdir, until=0)
    (workdir / "failure.json").write_text(json.dumps({"step": 1, "why": "not finite"}))
    train(config, workdir, until=1)
    assert (workdir / "failure.json").exists()  # step 1 is yet to come
    train(config, workdir)
    assert not (workdir / "failure.json").exists() and (workdir / "summary.json").exists()


def test_a_seed_that_diverged_in_every_arm_leaves_a_table(tmp_path):
    asked = {"arms": ["a"], "seeds": [0], "reads": "development", "machine": "m", "date": "d", "command": "c"}
    found = results.summarise([], [{"arm": "static", "seed": 0, "diverged": 1}], asked)
    assert any("static, seed 0 (step 1)" in note for note in found["notes"])
    (entry,) = found["arms"]
    assert entry["n"] == 0 and entry["diverged"] == [0] and entry["if_diverged_failed"]["mean"] == 0.0
    json.dumps(found, allow_nan=False)
    assert "diverged: seeds 0" in table({**found, "signals": []})
