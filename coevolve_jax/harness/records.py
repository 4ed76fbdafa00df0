"""The records of a campaign. Each is written once, as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from fnmatch import fnmatch
from typing import Any, Literal

ROUNDING = 1e-9  # 0.35 - 0.3 is a change by 0.05
LONGEST = 4000  # characters of a text
RULES = ("score", "target", "reward", "gating", "audit")  # the conditions of a verdict (verdict.py)
Kind = Literal["start", "promoted", "rejected", "invalid", "refused", "failed"]


def is_text(value: Any) -> bool:
    """Whether a value is a text that a record can hold: of UTF-8, and not above LONGEST."""
    try:
        return isinstance(value, str) and len(value) <= LONGEST and value.encode().decode() == value
    except UnicodeEncodeError:  # half of a pair of surrogates
        return False


@dataclasses.dataclass(frozen=True)
class Expectation:
    """A change that a hypothesis says will happen, so that it can fail.

    Attributes:
      diagnostic: a value of the version's row (evidence.py).
      direction: "up" or "down".
      least: the least change that counts, in the diagnostic's unit.
    """

    diagnostic: str
    direction: str
    least: float = 0.0

    @property
    def text(self) -> str:
        """The change in words."""
        least = f" by {self.least:g} at least" if self.least else ""
        return f"{self.diagnostic} {self.direction}{least}"

    def holds(self, before: float | None, after: float | None) -> bool:
        """Whether a value has changed as expected. False where one is missing."""
        if before is None or after is None:
            return False
        change = after - before if self.direction == "up" else before - after
        return change >= self.least - ROUNDING and change > 0


@dataclasses.dataclass(frozen=True)
class Proposal:
    """One lever moved once, and why.

    Attributes:
      parent: id of the version whose config is changed.
      lever, move: names (levers.py). changes: the config values that they give.
      because: one sentence.
      evidence: diagnostic -> the parent's value that speaks for it.
      expects: None where the proposer has no hypothesis.
      proposer: its name. skill: id of the skill that it follows, or "".
    """

    parent: str
    lever: str
    move: str
    changes: Mapping[str, Any]
    because: str
    proposer: str
    evidence: Mapping[str, float | None] = dataclasses.field(default_factory=dict)
    expects: Expectation | None = None
    skill: str = ""

    def to_json(self) -> dict:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Mapping) -> Proposal:
        changes = changes_from_json(data["changes"])
        expects = data["expects"] and Expectation(**data["expects"])
        return cls(**{**data, "changes": changes, "expects": expects})


def changes_from_json(data: Mapping[str, Any]) -> dict[str, Any]:
    """Changes of a config as they were before JSON wrote their tuples as lists."""
    return {key: tuple(value) if isinstance(value, list) else value for key, value in data.items()}


@dataclasses.dataclass(frozen=True)
class Rule:
    """One condition of a verdict and a sentence with its numbers.

    value, bound: where a bound decides.
    """

    name: str
    ok: bool
    sentence: str
    value: float | None = None
    bound: float | None = None


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The decision about a version.

    Attributes:
      kind: "promoted"; "rejected"; "invalid", where an independent verifier refuses its successes or a lever
        moved the judge; "refused", before it was trained in full, by a backtest, its first steps or a person;
        "failed", where it could not run.
      difference: mean over seeds of child - parent on the selection set, a rate; None without runs.
      se: its standard error. by_seed: seed -> difference.
      rules: all conditions, in their order. The first that does not hold decides.
    """

    kind: Kind
    rules: tuple[Rule, ...]
    success: float | None = None
    difference: float | None = None
    se: float | None = None
    by_seed: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @property
    def decided(self) -> Rule | None:
        """The first condition that does not hold; None for a promotion."""
        return next((rule for rule in self.rules if not rule.ok), None)

    @property
    def higher_and_refused(self) -> bool:
        """Whether the version scored higher than its parent and was still not promoted."""
        return self.kind != "promoted" and any(r.name == "score" and r.ok for r in self.rules)

    def to_json(self) -> dict:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Mapping) -> Verdict:
        return cls(**{**data, "rules": tuple(Rule(**rule) for rule in data["rules"])})


@dataclasses.dataclass(frozen=True)
class Skill:
    """A rule of diagnosis: when the trigger holds for a version, move this lever.

    Attributes:
      trigger: an expression over the version's row (diagnosis/expressions.py).
      move: of the lever. In a built-in skill * stands for any text.
      because: one sentence.
      held, failed: ids of the versions that followed it and were promoted, or were trained and were not.
      origin: "built-in", or the version whose promotion taught it.
    """

    id: str
    trigger: str
    lever: str
    move: str
    because: str
    expects: Expectation
    held: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()
    origin: str = "built-in"

    def says(self, lever: str, move: str) -> bool:
        same = fnmatch(move, self.move) if self.origin == "built-in" else move == self.move
        return lever == self.lever and same

    @property
    def trust(self) -> float:
        """Posterior mean that it helps, from one success and one failure in advance."""
        return (1 + len(self.held)) / (2 + len(self.held) + len(self.failed))

    def to_json(self) -> dict:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Mapping) -> Skill:
        told = {key: tuple(data[key]) for key in ("held", "failed")}
        return cls(**{**data, **told, "expects": Expectation(**data["expects"])})
