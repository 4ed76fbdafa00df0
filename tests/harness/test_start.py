"""The config of v000: no split that training or selection reads meets the sealed test.

Its runs keep their checkpoints apart.
"""

import re

import pytest

from coevolve_jax import config as configs
from coevolve_jax.harness import start
from tests.harness.support import config
from tests.support import forked
from tests.support.paths import ROOT

APPWORLD = {"name": "appworld", "train_split": "own_train", "eval_split": "own_development"}


def given(**environment):
    c = config()
    c.environment.update(environment)
    return c


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({"eval_split": "test"}, "eval_split is 'test', which has scenarios of the split 'test'"),
        ({"eval_split": "evaluation"}, "eval_split is 'evaluation'.*such as train and development"),
        ({"eval_split": "sequential_test"}, "eval_split is 'sequential_test'"),
        ({"train_split": "test"}, "train_split is 'test'"),
        ({"train_split": "evaluation"}, "train_split is 'evaluation'"),
        ({"train_split": "sequential_train"}, "train_split is 'sequential_train'"),
    ],
)
def test_a_campaign_neither_trains_nor_selects_on_test_scenarios(environment, says):
    with pytest.raises(ValueError, match=f"^config.environment.{says}"):
        start.settled(given(**environment))


def test_the_sealed_split_is_the_one_that_the_campaign_names():
    says = (
        "^config.harness.test_split is 'test', which the environment 'appworld' cannot give .*no split 'test'"
    )
    with pytest.raises(ValueError, match=says):
        start.settled(given(**APPWORLD))
    c = given(eval_split="development")
    c.harness.test_split = "sequential_test"
    with pytest.raises(ValueError, match="has scenarios of the split 'sequential_test'"):
        start.settled(c)


def test_splits_apart_from_the_test_and_a_family_of_one_scenario_pass(monkeypatch):
    start.settled(given())
    (one,) = start.load("bfcl").scenarios("train")[:1]

    class Single:
        def scenarios(self, split, settings):
            return [one]

    monkeypatch.setattr(start, "load", lambda name, python: Single())
    start.settled(given())
    with pytest.raises(ValueError, match="eval_split is 'test'"):
        start.settled(given(eval_split="test"))


def test_a_limit_that_becomes_the_evaluations_too_is_said():
    c = configs.load_file(ROOT / "configs" / "bfcl_harness.py", "")
    both = configs.override(c, {"rollout.max_steps": 2, "rollout.max_new_tokens": 8})
    given = ["rollout.max_steps", "learner.learning_rate"]
    assert start.settled(both).evaluation.max_steps == 2
    assert start.shared(both, given) == (
        "The evaluation has no limit of its own beside config.rollout.max_steps (2), so it keeps the same in "
        "all versions, and no lever can mend it there: for training alone give --config.evaluation.max_steps "
        "too."
    )
    several = start.shared(both, [*given, "rollout.max_new_tokens"])
    assert "config.rollout.max_steps (2)" in several and "config.rollout.max_new_tokens (8)" in several
    assert "--config.evaluation.max_steps" in several and "--config.evaluation.max_new_tokens" in several
    apart = configs.override(both, {"evaluation.max_steps": 20})
    assert start.shared(apart, given) == start.shared(c, ()) == ""


@pytest.mark.parametrize("key", ["checkpoint.folder", "engine.push_folder"])
def test_a_campaign_refuses_one_folder_of_checkpoints_or_weights_for_all_its_runs(key):
    c = configs.override(config(), {key: "gs://bucket/run"})
    says = f"^config.{key} is 'gs://bucket/run', which one run alone can use: leave it empty"
    with pytest.raises(ValueError, match=says):
        start.settled(c)


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("harness.versions", -1, "config.harness.versions is -1: it must be at least 1."),
        ("harness.noise", -1.0, "config.harness.noise is -1.0: it must be between 0.0 and 0.5"),
        ("harness.noise", 2.5, "config.harness.noise is 2.5: it must be between 0.0 and 0.5: it is a rate"),
        ("harness.seeds", (), "config.harness.seeds is (): it must name at least one seed"),
        ("harness.seeds", (0, 0), "config.harness.seeds is (0, 0): it must name at least one seed"),
        ("harness.levers", ("hope",), "config.harness.levers names 'hope': use some of reward.terms, "),
        ("harness.bounds", ("data.hope=0:1",), "config.harness.bounds names 'data.hope', which is no lever"),
        ("learner.learning_rate", -1.0, "config.learner.learning_rate is -1.0: it must be above 0."),
        ("strategy.name", "hope", "config.strategy.name is 'hope': it must be one of "),
        ("evolution.every", 1000, "config.steps is 24, and from step 0 on strategy coevolve first lets"),
    ],
)
def test_a_value_that_no_campaign_could_run_with_is_refused(key, value, says):
    c = configs.load_file(ROOT / "configs" / "bfcl_harness.py", "strategy=coevolve")
    with pytest.raises(ValueError, match=f"^{re.escape(says)}"):
        start.settled(configs.override(c, {key: value}))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("--approve=v001 --refuse=v001", "--approve=v001 and --refuse=v001 contradict each other: give one"),
        ("--replay --approve=v001", "--replay writes nothing, so --approve=v001 has no effect with it: give"),
        ("--replay --refuse=v001", "--replay writes nothing, so --refuse=v001 has no effect with it: give"),
        ("--replay --final", "--replay writes nothing, so --final has no effect with it: give one of them."),
        ("--replay --reopen", "--replay writes nothing, so --reopen has no effect with it: give"),
        ("--reopen", "--reopen has no effect without --final: give both."),
        ("--reference=runs/other", "--reference=runs/other has no effect without --final: give both."),
        ("--why=no", "--why=no has no effect without --approve or --refuse: give one."),
    ],
)
def test_flags_that_contradict_or_do_nothing_are_one_sentence(given, says, tmp_path, quick):
    flags = f"--config={ROOT}/configs/bfcl_harness.py", f"--workdir={tmp_path}/campaign", *given.split()
    done = forked.run(["experiments/evolve_harness.py", *flags], quick)
    assert done.returncode == 1 and not done.stdout and done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith(f"Error: {says}") and not list(tmp_path.iterdir())


def test_a_config_without_the_section_of_a_campaign_is_refused():
    with pytest.raises(ValueError, match="^The config has no section harness: start from configs/"):
        start.settled(configs.load_file(ROOT / "configs" / "bfcl_tiny.py"))
