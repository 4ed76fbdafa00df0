"""Sums over the costs of a run, as its ledger has them: by service, an explorer's own under a prefix."""

from collections.abc import Mapping
from typing import Any

ROLLOUTS = "rollouts/"  # before the role
EXPLORER = "explorer/"  # before the keys of what an explorer books itself, its rollouts too


def total(costs: Mapping[str, Any], prefix: str) -> Any:
    """Returns the sum of the costs whose key begins so, those that an explorer booked too."""
    return sum(n for key, n in costs.items() if key.removeprefix(EXPLORER).startswith(prefix))
