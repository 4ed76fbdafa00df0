"""The config of v000, and that of an ordinary run."""

from __future__ import annotations

from ml_collections import ConfigDict

from coevolve_jax import config as configs
from coevolve_jax.config import keys


def without_harness(config: ConfigDict) -> ConfigDict:
    """The config of an ordinary run: without the sections of the campaign."""
    return ConfigDict(
        {key: value for key, value in config.to_dict().items() if key not in ("harness", "harness_model")}
    )


def settled(config: ConfigDict) -> ConfigDict:
    """The config of v000 with all that no lever may move by accident.

    Evaluations get the limits that they have now, and whole groups are kept on disk.

    Raises ValueError where the evaluation would read the test split, and for held-out queries.
    """
    c = config
    if c.environment.eval_split == "test":
        raise ValueError(
            "config.environment.eval_split is 'test': a campaign selects on another split, and --final reads "
            "the test once."
        )
    if c.evaluation.queries:
        raise ValueError(
            f"config.evaluation.queries is {c.evaluation.queries}: it must be 0 in a campaign, which would "
            "count rollouts without answers as failures."
        )
    limits = [key for key in c.evaluation if key in c.rollout and key != "temperature"]
    default = {key: keys.REQUIRED[f"evaluation.{key}"].default for key in limits}
    pinned = {key: c.rollout[key] for key in limits if c.evaluation[key] == default[key]}
    return configs.override(
        c,
        {
            **{f"evaluation.{key}": value for key, value in pinned.items()},
            "logging.rollouts_every": 1,
            "logging.evaluations": True,
        },
    )
