"""The rows of explorations.jsonl: one context, the steps explored under it, and its proposals."""

from __future__ import annotations

from coevolve_jax.explorers.base import Exploration, Proposal
from coevolve_jax.synthesis.leakage import Near
from coevolve_jax.synthesis.validate import Verdict

OBSERVED = 400  # characters of an answer that explorations.jsonl keeps


def exploration_row(exploration: Exploration, step: int) -> dict:
    """The context and its exploration steps. "proposals" starts empty; `proposal_row` makes its entries."""
    context = exploration.context
    return {
        "step": step,
        "context": {
            "id": context.id,
            "signal": context.signal,
            "task": context.task.id,
            "summary": context.summary,
            "failure_cause": context.failure_cause,
            "instability_pattern": context.instability_pattern,
            "focus_pattern": list(context.focus_pattern),
            "avoid": list(context.avoid),
            "must": list(context.must),
            **(
                {"plan": [p if isinstance(p, str) else p.to_json() for p in context.plan]}
                if context.plan
                else {}
            ),
            **({"calls": list(context.calls)} if context.calls else {}),
            **({"turns": context.turns} if context.turns else {}),
        },
        "triplets": [
            {
                "index": t.index,
                "round": t.round,
                "call": t.call.to_json(),
                "observation": t.observation.text[:OBSERVED],
                "error": t.observation.error,
            }
            for t in exploration.triplets
        ],
        "proposals": [],
    }


def proposal_row(proposal: Proposal, verdict: Verdict, refusal: str | None, leak: Near | None) -> dict:
    """A proposal and its fate.

    Args:
      refusal: why D_t does not take it; None: it does.
      leak: the evaluation task that it is too near to, if any.
    """
    valid = verdict.task is not None
    return {
        "task": verdict.task.id if verdict.task is not None and refusal is None else None,
        "description": proposal.description,
        "triplets": list(proposal.triplets),
        "verdict": "refused" if valid and refusal else verdict.verdict,
        "reason": refusal or verdict.reason,
        **({"near": leak.to_json()} if leak else {}),
        **({"solved": verdict.solved} if verdict.solved is not None else {}),
    }
