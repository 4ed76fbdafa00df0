"""Sums over the costs of a run, as its ledger has them: by service, an explorer's own under a prefix."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

ROLLOUTS = "rollouts/"  # before the role
SAMPLED = "sampled_tokens/"  # before the role
STEPS = "environment_steps/"  # before the kind of the tasks that they made
SERVING = "serving/"  # before the names of the engine's counts
EXPLORER = "explorer/"  # before the keys of what an explorer books itself, its rollouts too


def under(costs: Mapping[str, Any], prefix: str) -> Counter:
    """Returns the costs whose key begins so, by the rest of the key."""
    return Counter({key.removeprefix(prefix): n for key, n in costs.items() if key.startswith(prefix)})


def total(costs: Mapping[str, Any], prefix: str) -> Any:
    """Returns the sum of the costs whose key begins so, those that an explorer booked too."""
    return sum(n for key, n in costs.items() if key.removeprefix(EXPLORER).startswith(prefix))
