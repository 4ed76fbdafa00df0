"""Skills: rules of diagnosis that a campaign begins with, learns, and trusts by what became of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from coevolve_jax.diagnosis import expressions
from coevolve_jax.harness.records import Expectation, Proposal, Skill, Verdict

Row = Mapping[str, float | None]


def _skill(
    name: str,
    trigger: str,
    lever: str,
    move: str,
    because: str,
    diagnostic: str,
    direction: str,
    least: float,
) -> Skill:
    return Skill(name, trigger, lever, move, because, Expectation(diagnostic, direction, least))


BUILT_IN: tuple[Skill, ...] = (
    _skill(
        "cut-off", "truncated > 0.15", "rollout.max_length", "x2",
        "A limit ends many rollouts before they can succeed.", "truncated", "down", 0.05,
    ),
    _skill(
        "cut-off-message", "truncated > 0.15", "rollout.max_new_tokens", "x2",
        "A limit ends many rollouts before they can succeed.", "truncated", "down", 0.05,
    ),
    _skill(
        "cut-off-turn", "truncated > 0.15", "rollout.max_steps", "x2",
        "A limit ends many rollouts before they can succeed.", "truncated", "down", 0.05,
    ),
    _skill(
        "small-groups", "group_size <= 4.0 && dead_first > 0.4", "rollout.group_size", "x2",
        "Groups are so small that most have equal rewards.", "dead_first", "down", 0.05,
    ),
    _skill(
        "old-weights", "staleness >= 2.0", "rollout.max_staleness", "down",
        "Rollouts come from weights many updates old.", "staleness", "down", 0.5,
    ),
    _skill(
        "filtered-away", "kept < 0.5 && dead < 0.9", "learner.group_filter", "False",
        "Most groups with a spread are not learned from.", "kept", "up", 0.2,
    ),
    _skill(
        "no-noise", "dead_first > 0.5 && logprob_first > -0.05", "rollout.temperature", "x1.25",
        "Rollouts of a task are nearly alike from the first step on.", "dead_first", "down", 0.05,
    ),
    _skill(
        "too-hot", "temperature > 1.2 && gain < 0.05", "rollout.temperature", "/1.25",
        "Rollouts are sampled so freely that little is learned from them.", "logprob_first", "up", 0.0,
    ),
    _skill(
        "certain-too-soon", "logprob_last > -0.02 && dead_last > dead_first + 0.1 && kl_last > 0.02",
        "learner.learning_rate", "/3",
        "The policy has become certain and its groups have lost their spread.", "dead_last", "down", 0.05,
    ),
    _skill(
        "paid-by-length", "length_paid > 0.3", "reward.terms", "remove length",
        "Longer rollouts get more advantage, whatever comes of them.", "length_paid", "down", 0.1,
    ),
    _skill(
        "paid-by-brevity", "length_paid < -0.3", "reward.terms", "remove brevity",
        "Shorter rollouts get more advantage, whatever comes of them.", "length_paid", "up", 0.1,
    ),
    _skill(
        "paid-for-itself", "shaped_last - shaped_first > gain + 0.03", "reward.terms", "remove *",
        "The reward trained on rises faster than success does.", "gain", "up", 0.0,
    ),
    _skill(  # without the pull no divergence is measured
        "on-a-leash", "kl_coef >= 0.1 && gain < 0.05", "learner.kl_coef", "0",
        "The pull to the start outweighs what is learned.", "gain", "up", 0.0,
    ),
    _skill(
        "tight-clip", "clipped_last > 0.15 && kl_last < 0.01", "learner.clip_high", "x1.5",
        "Many tokens are clipped although the policy hardly leaves its start.", "clipped_last", "down", 0.05,
    ),
    _skill(
        "too-slow", "kl_last < 0.01 && gain < 0.05 && dead_last < 0.8", "learner.learning_rate", "x3",
        "The policy hardly leaves its start although groups have a spread.", "kl_last", "up", 0.0,
    ),
    _skill(
        "clipped", "clipped_last > 0.15 && epochs > 1.0", "learner.epochs", "down",
        "Many tokens are clipped in later updates on the same batch.", "clipped_last", "down", 0.05,
    ),
    _skill(
        "used-up", "dead_last > 0.6 && success_last > 0.7", "data.sampling", "variance",
        "Most tasks are always solved by now, so their groups teach nothing.", "dead_last", "down", 0.05,
    ),
    _skill(
        "waste", "dead > 0.5", "learner.dynamic_sampling", "up",
        "Half of the rollouts belong to groups without spread.", "active", "up", 0.05,
    ),
    _skill(
        "forgotten-tasks", "retire_after >= 1.0 && dead < 0.5", "data.retire_after", "up",
        "Tasks are given up after few visits although most still teach.", "active", "up", 0.0,
    ),
    _skill(
        "long-steps", "grad_norm_last > 3.0 * max_grad_norm", "learner.max_grad_norm", "x3",
        "The bound on the gradient cuts nearly every update.", "gain", "up", 0.0,
    ),
    _skill(
        "fixed-tasks", "gain < 0.05 && dead_last > 0.5 && kl_last > 0.02", "strategy.name", "random",
        "The policy moves, its tasks teach no more, and no new ones come.", "mixed_last", "up", 0.02,
    ),
)  # fmt: skip


def holding(skills: Sequence[Skill], row: Row) -> list[Skill]:
    """The skills whose trigger holds for a row, the most trusted first; ties keep their order.

    A trigger that reads a missing value does not hold.
    """
    known = {name: float(value) for name, value in row.items() if value is not None}
    return sorted((s for s in skills if _holds(s.trigger, known)), key=lambda s: -s.trust)


def _holds(trigger: str, row: dict[str, float]) -> bool:
    value = expressions.compile(trigger, "trend").value(row)
    return bool(value)


def learned(
    skills: Sequence[Skill], version: str, proposal: Proposal, verdict: Verdict, parent: Row
) -> list[Skill]:
    """The skills after a verdict: the one that was followed has held or failed; a promotion may teach one.

    A new skill's trigger is a bound on the diagnostic that the hypothesis named, halfway between the parent's
    value and the value that was asked for.
    """
    good = verdict.kind == "promoted"
    if verdict.kind not in ("promoted", "rejected", "invalid"):
        return list(skills)  # it was never trained
    told = [
        dataclasses.replace(
            s, held=(*s.held, version) if good else s.held, failed=s.failed if good else (*s.failed, version)
        )
        if s.id == proposal.skill
        else s
        for s in skills
    ]
    aim = proposal.expects
    if not good or proposal.skill or aim is None:
        return told
    value = parent.get(aim.diagnostic)
    if value is None:
        return told
    bound = value + (aim.least / 2 if aim.direction == "up" else -aim.least / 2)
    sign = "<=" if aim.direction == "up" else ">="
    new = Skill(
        id=f"from-{version}",
        trigger=f"{aim.diagnostic} {sign} {bound!r}",
        lever=proposal.lever,
        move=proposal.move,
        because=proposal.because,
        expects=aim,
        held=(version,),
        origin=version,
    )
    return [*told, new]
