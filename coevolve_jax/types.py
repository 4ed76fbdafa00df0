"""The data types that all packages exchange, as frozen dataclasses.

    Task         a scenario and the user's turns in it; `Lineage` says where it comes from
    Trajectory   one rollout of a task: tokens, log-probabilities, `Step`s and an `Outcome`
    Group        the K rollouts of one task
    Signal       a weakness that a trajectory shows; `Evidence` joins it to its group
    Context      the reflection on one piece of evidence; `Triplet`s are explored under it

Every type that is written to disk has `to_json` and `from_json`. Their values are plain JSON: other programs
can read a task pool without this package.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # environment workers import this file and have the standard library only
    import numpy as np

SUCCESS = 0.5  # the least reward (or mean reward of a task) that counts as a success
QUERY = "query"  # Lineage.kind of the held-out tasks that a method may learn from without their answers
GIVEN = ("initial", QUERY)  # kinds of the tasks that D_t has before it evolves
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
    """One user message and the reference calls that satisfy it (empty if the environment family has none)."""

    query: str
    calls: tuple[Call, ...] = ()

    def to_json(self) -> dict:
        return {"query": self.query, "calls": [c.to_json() for c in self.calls]}

    @classmethod
    def from_json(cls, data: Mapping) -> Turn:
        return cls(data["query"], tuple(Call.from_json(c) for c in data.get("calls", ())))


@dataclasses.dataclass(frozen=True)
class Lineage:
    """Where a task comes from.

    Attributes:
      kind: "benchmark", "initial", "held_out", "balanced", "query", "random", "signal", or a name of
        the strategy's.
      signal: the kind of weakness that asked for the task, or the strategy ("blame"); None: unguided
        exploration.
      parent: id of the task that carried the signal or was varied, or of the scenario explored.
      context: id of the reflection.
      explorer: name of the explorer that made it.
      triplets: indices of the exploration steps that it was abstracted from.
      verdict: "accept" or "retain"; `reason` says why.
      step: GRPO step of birth.
      similarity: cosine to the evaluation task `nearest`.
      measure: the measure of leak control that came closest to refusing the task; `similarity` is by it.
      focus: tools that the context asked to explore.
      solved: share of probing rollouts that solved the task before D_t took it; None if it was not probed.
      rule_queries: the rules' query of each turn, if a model worded any of them in other words.
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
    rule_queries: tuple[str, ...] = ()

    def to_json(self) -> dict:
        unknown = {"solved": None, "rule_queries": ()}  # values that are left out
        told = {k: v for k, v in vars(self).items() if k not in unknown or v != unknown[k]}
        return {k: list(v) if isinstance(v, tuple) else v for k, v in told.items()}

    @classmethod
    def from_json(cls, data: Mapping) -> Lineage:
        found: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in data.items()}
        return cls(**found)


@dataclasses.dataclass(frozen=True)
class Task:
    """A task: a scenario and the user's requests in it.

    Attributes:
      scenario: JSON values that the environment family alone reads. It builds the initial state and the tools
        from them; a family without reference calls builds the goal too.
      turns: empty for a bare scenario, which can be explored but not scored.
      system: a system message before the first turn; "" is none.
      examples: worked examples, shown as earlier turns of the conversation, with their calls.
      patterns: the action pattern of each reference call; () where these are the tools' names.
    """

    id: str
    environment: str
    scenario: Mapping[str, Any]
    turns: tuple[Turn, ...] = ()
    description: str = ""
    lineage: Lineage = Lineage("benchmark")
    system: str = ""
    examples: tuple[Turn, ...] = ()
    patterns: tuple[str, ...] = ()

    @property
    def calls(self) -> tuple[Call, ...]:
        return tuple(c for turn in self.turns for c in turn.calls)

    @property
    def actions(self) -> tuple[str, ...]:
        """The action pattern of each reference call."""
        return self.patterns or tuple(call.name for call in self.calls)

    @property
    def is_query(self) -> bool:
        """Whether the task is held out and may be learned from without its answer (evaluation.queries)."""
        return self.lineage.kind == QUERY

    def without_calls(self) -> Task:
        """A copy without reference calls: what a policy is told of the task."""
        return dataclasses.replace(self, turns=tuple(Turn(turn.query) for turn in self.turns), patterns=())

    def to_json(self) -> dict:
        return {
            "id": self.id,
            "environment": self.environment,
            "description": self.description,
            "scenario": self.scenario,
            "turns": [t.to_json() for t in self.turns],
            "lineage": self.lineage.to_json(),
            **({"system": self.system} if self.system else {}),
            **({"examples": [t.to_json() for t in self.examples]} if self.examples else {}),
            **({"patterns": list(self.patterns)} if self.patterns else {}),
        }

    @classmethod
    def from_json(cls, data: Mapping) -> Task:
        """Reads what `to_json` gives, or a task of a person's: id, environment, scenario and turns."""
        return cls(
            id=data["id"],
            environment=data["environment"],
            description=data.get("description", ""),
            scenario=data["scenario"],
            turns=tuple(Turn.from_json(t) for t in data["turns"]),
            lineage=Lineage.from_json(data.get("lineage", {"kind": "benchmark"})),
            system=data.get("system", ""),
            examples=tuple(Turn.from_json(t) for t in data.get("examples", ())),
            patterns=tuple(data.get("patterns", ())),
        )


@dataclasses.dataclass(frozen=True)
class Observation:
    """The environment's answer to one call.

    Attributes:
      text: JSON text as the policy will read it.
      error: the tool refused or failed.
      valid: False if our own infrastructure failed. The whole rollout is then invalid, and `text` says why.
      ends: the call has ended the user turn.
      last_message: the message of the call is the last of the user turn. Its other calls are made too.
      fatal: the call took too long or killed its worker, and `text` says how. The failure is the caller's, so
        the rollout stays valid. The environment is gone: later calls are not made and get the same answer.
    """

    text: str
    error: bool = False
    valid: bool = True
    ends: bool = False
    fatal: bool = False
    last_message: bool = False


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Score of a trajectory.

    An invalid outcome is neither success nor failure: it enters no gradient and fabricates no signal.

    Attributes:
      reward: in [0, 1].
      success: reward >= SUCCESS. A valid outcome with any other value raises ValueError.
      progress: share of user turns that passed before the first failed one.
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
    """One action of a trajectory as text: the call and its answer.

    Attributes:
      turn: index of the user turn.
      text: the policy's own text.
      call: None if the text could not be parsed as a call.
      observation: the answer as the policy reads it; "" for a text that is no call and is ignored.
      pattern: the action pattern that the environment family counts for the rare signal. None stands for the
        tool's name, "" for a call to a tool that the task does not offer.
      message: index of the policy's message that holds the call. A message may hold several.
      macro: name of the macro that the policy called, if this call is one of those that it stands for.
    """

    turn: int
    text: str
    call: Call | None
    observation: str
    error: bool
    pattern: str | None = None
    message: int = 0
    macro: str = ""

    @property
    def ignored(self) -> bool:
        """Whether the text is no call and got no answer: the policy went on as if it had not written it."""
        return self.call is None and not self.observation

    @property
    def action(self) -> str:
        """The action pattern; "" if the step does not call a tool of the task."""
        if self.call is None:
            return ""
        return self.call.name if self.pattern is None else self.pattern

    def to_json(self) -> dict:
        told = {**vars(self), "call": self.call and self.call.to_json()}
        return {k: v for k, v in told.items() if k != "macro" or v}

    @classmethod
    def from_json(cls, data: Mapping) -> Step:
        return cls(**{**data, "call": data["call"] and Call.from_json(data["call"])})


@dataclasses.dataclass(frozen=True)
class Trajectory:
    """One rollout of T tokens, token-exact and append-only.

    Attributes:
      ids: int32 [T], exactly as sampled or as fed to the sampler.
      mask: bool [T], True on the tokens that the policy sampled.
      logprobs: float32 [T], the sampler's log-probabilities in nats (0 where not mask).
      versions: int32 [T], the policy version that sampled each token (-1 where not mask).
      routing: int16 [T, A, K], the K experts that each of A sparse layers used for each token in the sampler.
        -1 for tokens that it was never fed, such as the last. None if it was not recorded.
      turn_starts: index in `ids` of the first token of each user turn.
      hints: (number of steps before it, text) of each hint that the policy was given; its tokens are masked.
        A macro that it was offered is one too: its name and parameters.
      stop: why the rollout ended: "done", "token_limit", "step_limit", "context_limit", "call_failed",
        "environment" or "engine". After "call_failed" (the last call took too long or killed its worker) the
        outcome is a valid failure. After "environment" and "engine" our own infrastructure failed: the
        outcome is invalid.
      ending: digest of the state and the last good answer at the end of each turn and of the rollout. Equal
        endings mean equal effects. "" where it was not asked for, or where the world was lost.
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
    ending: str = ""

    @property
    def truncated(self) -> bool:
        """Whether a limit of tokens, steps or context ended the rollout."""
        return self.stop in ("token_limit", "step_limit", "context_limit")

    @property
    def actions(self) -> tuple[str, ...]:
        """Action patterns of the steps that call a tool of the task, for the rare signal."""
        return tuple(s.action for s in self.steps if s.action)

    def without_tokens(self) -> Trajectory:
        """A copy with empty token arrays: small, enough for reflection, not fit for the learner."""
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
        """JSON values for reflection and for readers, without the token arrays."""
        return {
            "task_id": self.task_id,
            "rollout_index": self.rollout_index,
            "stop": self.stop,
            "outcome": dict(vars(self.outcome)),
            "steps": [s.to_json() for s in self.steps],
            "hints": [list(hint) for hint in self.hints],
            **({"ending": self.ending} if self.ending else {}),
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
            ending=data.get("ending", ""),
        )


@dataclasses.dataclass(frozen=True)
class Group:
    """The rollouts of one task under one policy, from equal initial states, in the order of rollout_index."""

    task: Task
    trajectories: tuple[Trajectory, ...]

    @property
    def valid(self) -> tuple[Trajectory, ...]:
        """The rollouts that our own infrastructure did not fail."""
        return tuple(t for t in self.trajectories if t.outcome.valid)

    @property
    def rewards(self) -> tuple[float, ...]:
        """The environment's own rewards for the valid rollouts, in their order."""
        return tuple(t.outcome.reward for t in self.valid)

    @property
    def score(self) -> float | None:
        """The task's score: the mean reward of the valid rollouts; None if no rollout is valid."""
        rewards = self.rewards
        # fsum rounds once, so the order of the rollouts cannot move a score across the threshold.
        return math.fsum(rewards) / len(rewards) if rewards else None

    @property
    def mixed(self) -> bool:
        """Whether the valid rollouts include both successes and failures."""
        valid = self.valid
        return mixed(sum(t.outcome.success for t in valid), len(valid))

    @property
    def spread(self) -> float:
        """Standard deviation of the valid rollouts' rewards; exactly 0 if they are equal or none."""
        return spread(self.rewards)


def mixed(successes: float, trials: float) -> bool:
    """Whether some trials succeed and others fail. For a mean score pass trials=1."""
    return 0 < successes < trials


def spread(rewards: Sequence[float]) -> float:
    """Standard deviation of one group's rewards; exactly 0 if they are equal or none.

    A group with spread 0 is a zero-variance group. Any spread above 0, however small, is not: GRPO scales the
    differences up again (grpo/advantages.py).
    """
    import numpy as np

    # Test equality first: for equal rewards the deviation from the mean may be a rounding error instead of 0.
    return float(np.std(np.asarray(rewards, np.float64))) if len(set(rewards)) > 1 else 0.0


@dataclasses.dataclass(frozen=True)
class Macro:
    """A tool that stands for calls of a task's own tools. The agent makes these, and graders see them.

    calls: in order. The value of each argument is the name of the macro's parameter that it takes.
    """

    name: str
    calls: tuple[Call, ...]

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the parameters, in the order of their first use."""
        return tuple(dict.fromkeys(name for call in self.calls for name in call.arguments.values()))

    def expand(self, call: Call) -> list[Call]:
        """The calls that a call of the macro stands for.

        An argument that was not given is left out of them. One that the macro does not take is dropped.
        """
        given = call.arguments
        return [
            Call(c.name, {key: given[name] for key, name in c.arguments.items() if name in given})
            for c in self.calls
        ]

    def to_json(self) -> dict:
        return {"name": self.name, "calls": [call.to_json() for call in self.calls]}

    @classmethod
    def from_json(cls, data: Mapping) -> Macro:
        return cls(data["name"], tuple(map(Call.from_json, data["calls"])))


@dataclasses.dataclass(frozen=True)
class Hint:
    """Help that a strategy gives to one rollout.

    The policy reads it, its tokens are masked, and the trajectory records it.

    Attributes:
      before_task: text put before the task's first query.
      before_step: called with the steps so far, before each message but the task's first. The text that it
        returns follows the tools' answers, or comes before a later turn's query; "" adds nothing.
      macros: tools that the rollout is offered besides the task's own. One whose calls the task does not
        offer is left out.
    """

    before_task: str = ""
    before_step: Callable[[Sequence[Step]], str] | None = None
    macros: tuple[Macro, ...] = ()


@dataclasses.dataclass(frozen=True)
class TrainingSample:
    """One trajectory of T tokens with the learner's targets for it.

    Values at tokens that the policy did not sample are ignored.

    Attributes:
      advantages: float32 [T], for the policy gradient. None leaves the trajectory out of it and out of the KL
        term.
      ce_weights: float32 [T], weights of the cross-entropy term (replay, distillation). None: no such term.
      ref_logprobs: float32 [T], log-probabilities in nats that the KL term pulls to. None: the frozen
        reference's.
    """

    trajectory: Trajectory
    advantages: np.ndarray | None
    ce_weights: np.ndarray | None = None
    ref_logprobs: np.ndarray | None = None


@dataclasses.dataclass(frozen=True)
class Signal:
    """A weakness that one trajectory shows.

    Attributes:
      kind: one of SIGNAL_KINDS.
      rollout_index: which of the task's K rollouts carries it.
      step: the GRPO step.
      pattern: the rare action pattern (kind "rare" only).
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
        """The trajectory that carries the signal."""
        return next(t for t in self.group.trajectories if t.rollout_index == self.signal.rollout_index)


@dataclasses.dataclass(frozen=True)
class Context:
    """Reflection on one signal-annotated trajectory (the paper's structured context).

    Attributes:
      signal: the kind of weakness, or the strategy that asks ("blame"); None for unguided exploration.
      task: the task, or bare scenario, whose initial state is explored.
      focus_pattern: action patterns to explore.
      avoid: failed calls, or how they begin, that exploration should not repeat.
      must: action patterns that the calls of every task made under this context include. A task that lacks
        one is refused.
      calls: least and greatest number of reference calls of its tasks; None: the run's limits.
      turns: number of user turns of its tasks; None: the explorer chooses.
      plan: what exploration does first, in order: a call as it is, or an action pattern, whose arguments the
        explorer fills. Then it goes on freely. The steps of the plan are the first goal.
      parent: id of the task that a variant is made of in another scenario; "": that of `task`.
    """

    id: str
    signal: str | None
    task: Task
    summary: str = ""
    failure_cause: str = ""
    instability_pattern: str = ""
    focus_pattern: tuple[str, ...] = ()
    avoid: tuple[str, ...] = ()
    must: tuple[str, ...] = ()
    calls: tuple[int, int] | None = None
    turns: int | None = None
    plan: tuple[Call | str, ...] = ()
    parent: str = ""


@dataclasses.dataclass(frozen=True)
class Triplet:
    """One exploration step. index: position among its context's steps. round: counts from 0."""

    index: int
    round: int
    call: Call
    observation: Observation
