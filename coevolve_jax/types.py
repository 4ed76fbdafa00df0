"""The data contract between the packages: frozen dataclasses, and what a group of rollouts says of itself.

Everything that is written to disk has `to_json` / `from_json`, whose values
are plain JSON, so that a task pool can be read without this package.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # environment workers import this file and have the standard library only
    import numpy as np

SUCCESS = 0.5  # a trajectory, or a task's score, is a success from this reward on
SIGNAL_KINDS = ("forgetting", "boundary", "rare")


@dataclasses.dataclass(frozen=True)
class Call:
    """One tool call. `arguments` holds JSON values by parameter name."""

    name: str
    arguments: Mapping[str, Any]

    def to_json(self) -> dict:
        return {"name": self.name, "arguments": dict(self.arguments)}

    @classmethod
    def from_json(cls, data: Mapping) -> Call:
        return cls(data["name"], dict(data["arguments"]))


@dataclasses.dataclass(frozen=True)
class Turn:
    """One user message and, where the environment family has them, the reference calls that satisfy it."""

    query: str
    calls: tuple[Call, ...] = ()

    def to_json(self) -> dict:
        return {"query": self.query, "calls": [c.to_json() for c in self.calls]}

    @classmethod
    def from_json(cls, data: Mapping) -> Turn:
        return cls(data["query"], tuple(Call.from_json(c) for c in data["calls"]))


@dataclasses.dataclass(frozen=True)
class Lineage:
    """Where a task comes from.

    kind: "benchmark", "initial", "random" or "signal". signal: the kind of
    weakness that asked for it. parent: id of the task whose trajectory carried
    the signal (for "initial": the scenario explored). context: id of the
    reflection. triplets: ids of the exploration steps it was abstracted from.
    verdict: "accept" or "retain", with the reason. step: GRPO step of birth.
    similarity: cosine to the evaluation task `nearest`, by the `measure` of leak control that came closest to refusing
    the task. focus: tools that the context asked to explore.
    solved: the share of probing rollouts that solved it before it was taken; None: nobody tried.
    """

    kind: str
    signal: str | None = None
    parent: str | None = None
    context: str | None = None
    explorer: str | None = None
    triplets: tuple[int, ...] = ()
    verdict: str | None = None
    reason: str = ""
    step: int = 0
    similarity: float = 0.0
    nearest: str | None = None
    measure: str = "features"
    focus: tuple[str, ...] = ()
    solved: float | None = None

    def to_json(self) -> dict:
        told = {k: v for k, v in vars(self).items() if k != "solved" or v is not None}
        return {**told, "triplets": list(self.triplets), "focus": list(self.focus)}

    @classmethod
    def from_json(cls, data: Mapping) -> Lineage:
        return cls(**{**data, "triplets": tuple(data["triplets"]), "focus": tuple(data["focus"])})


@dataclasses.dataclass(frozen=True)
class Task:
    """A task: a scenario and what the user asks in it.

    scenario: JSON values from which the environment family builds the initial state, the tools and, where it
    has no reference calls, the goal. Nobody else reads it.
    turns is empty for a bare scenario, which can be explored but not scored.
    """

    id: str
    environment: str
    scenario: Mapping[str, Any]
    turns: tuple[Turn, ...] = ()
    description: str = ""
    lineage: Lineage = Lineage("benchmark")

    @property
    def calls(self) -> tuple[Call, ...]:
        return tuple(c for turn in self.turns for c in turn.calls)

    def to_json(self) -> dict:
        return {
            "id": self.id,
            "environment": self.environment,
            "description": self.description,
            "scenario": self.scenario,
            "turns": [t.to_json() for t in self.turns],
            "lineage": self.lineage.to_json(),
        }

    @classmethod
    def from_json(cls, data: Mapping) -> Task:
        return cls(
            id=data["id"],
            environment=data["environment"],
            description=data["description"],
            scenario=data["scenario"],
            turns=tuple(Turn.from_json(t) for t in data["turns"]),
            lineage=Lineage.from_json(data["lineage"]),
        )


@dataclasses.dataclass(frozen=True)
class Observation:
    """What the environment answers to one call.

    text: JSON text as the policy will read it. error: the tool refused or
    failed. valid: False when our own infrastructure failed;
    the whole rollout is then invalid and text says why. ends: the call has ended the user turn.
    fatal: the call took too long or killed its worker, which is the caller's failure and no fault of ours. text says
    how. Its world is gone: no later call in it is made, and each is answered alike.
    """

    text: str
    error: bool = False
    valid: bool = True
    ends: bool = False
    fatal: bool = False


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Score of a trajectory.

    reward in [0, 1]; success is reward >= SUCCESS; progress is the share of user
    turns that passed before the first failed one. An invalid outcome is neither success nor failure: it
    enters no gradient and fabricates no signal.
    """

    reward: float
    success: bool
    valid: bool = True
    progress: float = 0.0
    reason: str = ""

    def __post_init__(self):
        if self.valid and self.success != (self.reward >= SUCCESS):
            raise ValueError(
                f"An outcome has reward {self.reward} and success {self.success}: a reward is a success from "
                f"{SUCCESS} on, and only then."
            )


@dataclasses.dataclass(frozen=True)
class Step:
    """One action of a trajectory as text: what was called and what came back.

    call is None where the policy's text could not be parsed as a call. pattern: what the environment family
    counts as the action for the rare signal; None is the name of the tool, "" a call to what is no tool of the task.
    """

    turn: int
    text: str
    call: Call | None
    observation: str
    error: bool
    pattern: str | None = None

    @property
    def action(self) -> str:
        """The action pattern; "" where this is no call to a tool of the task."""
        if self.call is None:
            return ""
        return self.call.name if self.pattern is None else self.pattern

    def to_json(self) -> dict:
        return {**vars(self), "call": self.call and self.call.to_json()}

    @classmethod
    def from_json(cls, data: Mapping) -> Step:
        return cls(**{**data, "call": data["call"] and Call.from_json(data["call"])})


@dataclasses.dataclass(frozen=True)
class Trajectory:
    """One rollout, token-exact and append-only.

    ids: int32 [T], exactly as sampled or as fed to the sampler.
    mask: bool [T], True on the tokens that the policy sampled.
    logprobs: float32 [T], the sampler's log-probabilities in nats (0 where not mask).
    versions: int32 [T], the policy version that sampled each token (-1 where not mask).
    routing: int16 [T, A, K], where it was recorded: the experts that each sparse layer of the sampler used for each
    token; -1 for tokens that it was never fed, such as the last.
    turn_starts: index in ids of the first token of each user turn.
    hints: (number of steps before it, text) of each hint that the policy was given; its tokens are masked.
    stop: "done", "token_limit", "step_limit", "context_limit", "call_failed", "environment" or "engine". call_failed: the
    last call took too long or killed its worker, and the outcome is a valid failure. The last two: our own
    infrastructure failed, and the outcome is invalid.
    """

    task_id: str
    rollout_index: int
    ids: np.ndarray
    mask: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    turn_starts: tuple[int, ...]
    steps: tuple[Step, ...]
    stop: str
    outcome: Outcome
    routing: np.ndarray | None = None
    hints: tuple[tuple[int, str], ...] = ()

    @property
    def actions(self) -> tuple[str, ...]:
        """Action patterns for the rare signal, of the steps that are calls to a tool of the task."""
        return tuple(s.action for s in self.steps if s.action)

    def without_tokens(self) -> Trajectory:
        """What reflection needs: fit to be remembered, not for the learner."""
        import numpy as np

        none = np.zeros(0, np.int32)
        return dataclasses.replace(
            self,
            ids=none,
            mask=none.astype(bool),
            logprobs=none.astype(np.float32),
            versions=none,
            turn_starts=(),
            routing=None,
        )

    def to_json(self) -> dict:
        """What reflection and readers need; the token arrays are left out."""
        return {
            "task_id": self.task_id,
            "rollout_index": self.rollout_index,
            "stop": self.stop,
            "outcome": dataclasses.asdict(self.outcome),
            "steps": [s.to_json() for s in self.steps],
            "hints": [list(hint) for hint in self.hints],
        }

    @classmethod
    def from_json(cls, data: Mapping) -> Trajectory:
        """A trajectory `without_tokens`."""
        import numpy as np

        none = np.zeros(0, np.int32)
        return cls(
            task_id=data["task_id"],
            rollout_index=data["rollout_index"],
            ids=none,
            mask=none.astype(bool),
            logprobs=none.astype(np.float32),
            versions=none,
            turn_starts=(),
            steps=tuple(Step.from_json(s) for s in data["steps"]),
            stop=data["stop"],
            outcome=Outcome(**data["outcome"]),
            hints=tuple((at, text) for at, text in data["hints"]),
        )


@dataclasses.dataclass(frozen=True)
class Group:
    """The rollouts of one task under one policy, all from equal initial states, in the order of rollout_index."""

    task: Task
    trajectories: tuple[Trajectory, ...]

    @property
    def valid(self) -> tuple[Trajectory, ...]:
        """Without the rollouts that our own infrastructure failed."""
        return tuple(t for t in self.trajectories if t.outcome.valid)

    @property
    def rewards(self) -> tuple[float, ...]:
        """The environment's own rewards of the valid rollouts, in their order."""
        return tuple(t.outcome.reward for t in self.valid)

    @property
    def score(self) -> float | None:
        """The task's score: the mean reward of the valid rollouts; None where no rollout is valid."""
        rewards = self.rewards
        # fsum rounds once, so that the order of the rollouts cannot move a score across the threshold.
        return math.fsum(rewards) / len(rewards) if rewards else None

    @property
    def mixed(self) -> bool:
        """Whether the valid rollouts hold both outcomes, success and failure."""
        valid = self.valid
        return mixed(sum(t.outcome.success for t in valid), len(valid))

    @property
    def spread(self) -> float:
        """Standard deviation of the rewards of the valid rollouts. Exactly 0 where they are equal, or none."""
        return spread(self.rewards)


def mixed(successes: float, trials: float) -> bool:
    """Whether some trials succeed and others fail. A mean score counts as the successes of one trial."""
    return 0 < successes < trials


def spread(rewards: Sequence[float]) -> float:
    """Standard deviation of one group's rewards, exactly 0 where they are equal or none.

    A group is a zero-variance group where this is 0, however small the differences of another group are: GRPO scales
    those up again (grpo/advantages.py).
    """
    import numpy as np

    # Equal rewards are asked for first: their deviation from the mean may be a rounding error instead of 0.
    return float(np.std(np.asarray(rewards, np.float64))) if len(set(rewards)) > 1 else 0.0


@dataclasses.dataclass(frozen=True)
class Hint:
    """Help that a strategy gives to one rollout. The policy reads it, its tokens are masked, and the
    trajectory records it.

    before_task: put before the task's first query. before_step: called with the steps so far each time that tools
    have answered; what it returns ("" for nothing) follows their answers.
    """

    before_task: str = ""
    before_step: Callable[[Sequence[Step]], str] | None = None


@dataclasses.dataclass(frozen=True)
class TrainingSample:
    """What the learner learns from one trajectory of T tokens. Numbers at tokens that the policy did not sample do
    not count.

    advantages: float32 [T], for the policy gradient; None keeps the trajectory out of it and of the KL term.
    ce_weights: float32 [T], weights of the cross-entropy (replay, distillation); None is no such term.
    ref_logprobs: float32 [T], log-probabilities in nats that the KL term pulls to; None: the frozen reference's.
    """

    trajectory: Trajectory
    advantages: np.ndarray | None
    ce_weights: np.ndarray | None = None
    ref_logprobs: np.ndarray | None = None


@dataclasses.dataclass(frozen=True)
class Signal:
    """A weakness that a trajectory shows.

    kind: one of SIGNAL_KINDS. rollout_index: which of the K rollouts. pattern: the
    rare action pattern (kind "rare" only). step: the GRPO step.
    """

    kind: str
    task_id: str
    rollout_index: int
    step: int
    pattern: str | None = None

    def to_json(self) -> dict:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Mapping) -> Signal:
        return cls(**data)


@dataclasses.dataclass(frozen=True)
class Evidence:
    """A signal with the group of rollouts that shows it."""

    signal: Signal
    group: Group

    @property
    def task(self) -> Task:
        return self.group.task

    @property
    def trajectory(self) -> Trajectory:
        """The one that carries the signal."""
        return next(t for t in self.group.trajectories if t.rollout_index == self.signal.rollout_index)

    @property
    def siblings(self) -> tuple[Trajectory, ...]:
        """The other rollouts of the group."""
        return tuple(t for t in self.group.trajectories if t.rollout_index != self.signal.rollout_index)


@dataclasses.dataclass(frozen=True)
class Context:
    """Reflection on one signal-annotated trajectory (the paper's structured context).

    must: tools that every task made under this context has to call; a task without one of them is refused.
    """

    id: str
    signal: str | None
    task: Task
    summary: str
    failure_cause: str
    instability_pattern: str
    focus_pattern: tuple[str, ...]
    avoid: tuple[str, ...]
    must: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Triplet:
    """One exploration step. index: position within its context; round: from 0."""

    index: int
    round: int
    call: Call
    observation: Observation
