"""When the training set evolves."""

from __future__ import annotations

from ml_collections import ConfigDict

# Keys of the config that this reads.
KEYS = ("evolution.every", "evolution.async_steps", "evolution.freeze_last_steps")


def evolutions(config: ConfigDict) -> range:
    """The steps after which D_t evolves.

    They come every config.evolution.every steps, and none in the last config.evolution.freeze_last_steps. D_t
    has grown config.evolution.async_steps steps later, and what is born is then trained on.
    """
    c = config.evolution
    return range(c.every - 1, config.steps - c.freeze_last_steps - c.async_steps, c.every)


def still_evolves(config: ConfigDict, step: int) -> bool:
    """Whether D_t evolves after this step or after a later one."""
    due = evolutions(config)
    return len(due) > 0 and step <= due[-1]
