"""The config of v000, and that of an ordinary run."""

from __future__ import annotations

from collections.abc import Collection

from ml_collections import ConfigDict

from coevolve_jax import config as configs
from coevolve_jax.config import keys
from coevolve_jax.envs.family import load
from coevolve_jax.harness import levers

RECORDED = {"logging.rollouts_every": 1, "logging.evaluations": True}  # whole groups are kept on disk


def without_harness(config: ConfigDict) -> ConfigDict:
    """The config of an ordinary run: without the sections of the campaign."""
    return ConfigDict(
        {key: value for key, value in config.to_dict().items() if key not in ("harness", "harness_model")}
    )


def _check_sealed(config: ConfigDict) -> None:
    """Raises ValueError unless the splits of training and selection are apart from the test split.

    Where the family has one scenario alone, its splits are of other tasks in it.
    """
    c, test = config.environment, config.harness.test_split
    scenarios = lambda split: {s.id for s in load(c.name, c.python).scenarios(split, c.to_dict())}
    try:
        sealed = scenarios(test)
    except ValueError as error:
        raise ValueError(
            f"config.harness.test_split is {test!r}, which the environment {c.name!r} cannot give "
            f"({str(error).rstrip('.')}): name the split that --final is to read."
        ) from None
    for key in ("train_split", "eval_split"):
        if c[key] == test or (len(sealed) > 1 and sealed & scenarios(c[key])):
            raise ValueError(
                f"config.environment.{key} is {c[key]!r}, which has scenarios of the split {test!r}: a "
                "campaign trains and selects on others, such as train and development, and --final reads "
                "the test once."
            )


def settled(config: ConfigDict) -> ConfigDict:
    """The config of v000 with all that no lever may move by accident, after every check of it.

    Evaluations get the limits that they have now, and whole groups are kept on disk.

    Raises ValueError, in one sentence, where the config has no section `harness`, could not run (as
    `train.train`), or names no seeds or an unknown lever. Also where training or the evaluation would read
    the test split, for held-out queries, and where all runs would share one folder of checkpoints or of
    weights.
    """
    c = config
    if "harness" not in c:
        raise ValueError("The config has no section harness: start from configs/bfcl_harness.py.")
    configs.check(c)
    configs.check_evolution(c)
    configs.check_several_runs(c)
    seeds = c.harness.seeds
    if not seeds or min(seeds) < 0 or len({*seeds}) < len(seeds):
        raise ValueError(
            f"config.harness.seeds is {seeds}: it must name at least one seed, none below 0 and none twice."
        )
    levers.table(c)
    _check_sealed(c)
    if c.evaluation.queries:
        raise ValueError(
            f"config.evaluation.queries is {c.evaluation.queries}: it must be 0 in a campaign, which would "
            "count rollouts without answers as failures."
        )
    pinned = {f"evaluation.{key}": c.rollout[key] for key in _unset_limits(c)}
    return configs.override(c, {**pinned, **RECORDED})


def shared(config: ConfigDict, given: Collection[str]) -> str:
    """A sentence on limits of training that `settled` makes the evaluation's own too; "" if there are none.

    config: before `settled`. given: the keys that its user has set, beside the config file.
    """
    limits = [key for key in _unset_limits(config) if f"rollout.{key}" in given]
    if not limits:
        return ""
    told = " and ".join(f"config.rollout.{key} ({config.rollout[key]})" for key in limits)
    own = " and ".join(f"--config.evaluation.{key}" for key in limits)
    return (
        f"The evaluation has no limit of its own beside {told}, so it keeps the same in all versions, and no "
        f"lever can mend it there: for training alone give {own} too."
    )


def settled_as(config: ConfigDict, first: ConfigDict) -> ConfigDict:
    """The config of ordinary runs, evaluated and recorded as those of a campaign.

    first: of the campaign's v000. A limit of evaluations that `config` sets itself stays.
    """
    pinned = {f"evaluation.{key}": first.evaluation[key] for key in _unset_limits(config)}
    return configs.override(without_harness(config), {**pinned, **RECORDED, "seed": first.seed})


def _unset_limits(config: ConfigDict) -> list[str]:
    """The limits of evaluations that are those of training."""
    c = config
    limits = [key for key in c.evaluation if key in c.rollout and key != "temperature"]
    return [key for key in limits if c.evaluation[key] == keys.REQUIRED[f"evaluation.{key}"].default]
