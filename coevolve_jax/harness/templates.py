"""The scripted inventor of diagnostics: templates over the fields of a trajectory, ranked on the odd half."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from coevolve_jax.diagnosis import expressions
from coevolve_jax.diagnosis.rewards import TERMS
from coevolve_jax.harness.records import is_text
from coevolve_jax.harness.registry import (
    ALIKE,
    MISSING,
    Diagnostic,
    Evidence,
    Values,
    halves,
    rank_correlation,
)
from coevolve_jax.harness.separation import separate

COUNTS = ("calls", "errors", "malformed", "policy_tokens", "distinct_tools", "repeated_pairs", "longest_run",
          "missed_reference", "extra_calls")  # fmt: skip
PER = ("calls", "turns", "reference_calls")
TOOLS = 24  # the tools called most


class Candidate(NamedTuple):
    """A formula to be tested. auc: on the half that proposers see; None where that is not known."""

    id: str
    formula: str
    auc: float | None = None
    unit: str = "trajectory"
    proposer: str = "templates"


def templates(tools: Collection[str], stops: Collection[str]) -> dict[str, str]:
    """id -> formula: shares of tools, stop reasons, counts, and ratios of counts."""
    return {
        **{f"share_of_{t}": f"double(tools.filter(t, t == '{t}').size()) / double(calls)" for t in tools},
        **{f"stopped_by_{s}": f"stop == '{s}'" for s in stops},
        **{f"count_of_{name}": f"double({name})" for name in COUNTS},
        **{f"{a}_per_{b}": f"double({a}) / double({b})" for a, b in itertools.product(COUNTS, PER) if a != b},
        "logprob_mean": "logprob_mean",
        "tokens_per_message": "double(policy_tokens) / double(calls + malformed + turns)",
        "calls_beyond_reference": "double(calls - reference_calls)",
    }


def named(shown: Evidence) -> tuple[list[str], list[str]]:
    """The tools called most and the stop reasons, which formulas may name."""
    calls = Counter(t for row in shown.rows for t in row["tools"] if re.fullmatch(r"[\w.\- ]{1,80}", t))
    return [t for t, _ in calls.most_common(TOOLS)], sorted({row["stop"] for row in shown.rows})


def checked(
    given: Any,
    known: Sequence[Diagnostic],
    names: Collection[str],
    say: Callable[[str], object],
) -> list[Candidate]:
    """The candidates that are formulas and new. Why another is left out is said.

    given: what a proposer gives; anything else than a list of Candidates of texts is left out too.
    names: the texts that may stand in a formula.
    """
    found, tried = [], {(d.unit, d.formula) for d in known}
    taken = {d.id for d in known}
    if not isinstance(given, list | tuple):
        say(f"What the proposer invents is left out: it is a {type(given).__name__}, and no list.")
        given = ()
    for c in given:
        try:
            if not isinstance(c, Candidate):
                raise expressions.ExpressionError(f"a {type(c).__name__} is no Candidate.")
            if not all(map(is_text, (c.id, c.formula, c.unit, c.proposer))):
                raise expressions.ExpressionError("a field of a Candidate is no text.")
            if c.unit not in ("trajectory", "step") or not re.fullmatch(r"[\w-]{1,60}", c.id, re.ASCII):
                raise expressions.ExpressionError(f"{c.id[:60]!r} of a {c.unit[:60]!r} is no diagnostic.")
            expressions.compile(c.formula, c.unit, names)
            if (c.unit, c.formula) in tried or c.id in taken:
                raise expressions.ExpressionError(f"{c.id} was proposed before.")
            if c.id in TERMS:
                raise expressions.ExpressionError(f"{c.id} is the name of a reward term: choose another one.")
        except expressions.ExpressionError as error:
            say(f"A proposed diagnostic is left out: {error}")
            continue
        found.append(c)
        tried.add((c.unit, c.formula))
        taken.add(c.id)
    return found


def invent(
    found: Evidence,
    *,
    known: Mapping[str, Values] | None = None,
    tried: Collection[str] = (),
    ids: Collection[str] = (),
    count: int = 2,
) -> list[Candidate]:
    """The best templates by distance of their AUC from 0.5 on the odd half of the evidence.

    Args:
      known: registered diagnostics. A template that ranks rollouts as one of them does is left out.
      tried: formulas that earlier tests read.
      ids: of other diagnostics. A template whose id is one of them is left out.
      count: candidates, at most. No two of them rank rollouts alike.
    """
    shown, ranked = halves(found)[0].mixed, []
    tools, stops = named(shown)
    names = {*tools, *stops}
    for id, formula in templates(tools, stops).items():
        values = expressions.compile(formula, "trajectory", names).values(shown.rows)
        told = separate(values, ~shown.solved, shown.group)
        if formula not in tried and id not in ids and told.auc is not None and told.missing <= MISSING:
            ranked.append((Candidate(id, formula, told.auc), values))
    ranked.sort(key=lambda pair: -abs(pair[0].auc - 0.5))
    taken: list[Candidate] = []
    others: list[np.ndarray] = [values(shown.rows) for values in (known or {}).values()]
    for candidate, values in ranked:
        if len(taken) < count and all(rank_correlation(values, other) < ALIKE for other in others):
            taken.append(candidate)
            others.append(values)
    return taken
