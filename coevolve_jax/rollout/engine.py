"""The engine protocol: token ids in, sampled token ids and their log-probabilities out."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from coevolve_jax.types import Trajectory


@dataclasses.dataclass(frozen=True)
class Sampling:
    """temperature 0 is greedy. top_p is 1 and there is no top_k: log-probabilities are those of the
    full softmax at this temperature, so that the learner's importance ratio is unbiased.

    json_schema: JSON text, for an engine that `constrains`. What comes before the stop id is then JSON of that schema;
    cut at max_new_tokens it is the beginning of such. A token is drawn from those alone that the schema allows there, and
    log-probabilities are of the softmax over these: not the policy's own, so nothing is to be learned from them."""

    temperature: float = 1.0
    max_new_tokens: int = 64
    stop_ids: tuple[int, ...] = ()
    json_schema: str | None = None


@dataclasses.dataclass(frozen=True)
class Request:
    """ids: int32 [T], the whole sequence so far. conversation_id: requests of one trajectory share it, and
    an engine may keep the KV cache of the common prefix. seed: names this trajectory's
    random stream; with the position it determines the noise of each token."""

    conversation_id: int
    ids: np.ndarray
    sampling: Sampling
    seed: int = 0


def check_logprobs(trajectories: Sequence[Trajectory]) -> None:
    """Raises FloatingPointError where the policy gives no probabilities, which its rewards need not show."""
    if not all(np.isfinite(t.logprobs).all() for t in trajectories):
        raise FloatingPointError(
            "The sampler's log-probabilities are not finite: the last update broke the policy (or, before any update, the "
            "model itself gives none); lower config.learner.learning_rate and start again in a new workdir, or from an "
            "earlier checkpoint."
        )


def check_requests(
    requests: Sequence[Request],
    vocabulary: int,
    max_length: int,
    max_new_tokens: int,
    constrains: bool = False,
) -> None:
    """Raises ValueError for a request that no engine of these sizes can serve, or that has a schema where the engine does
    not heed it, and for two of one conversation: the second would have to go on with the first one's answer."""
    conversation_ids: set[int] = set()
    for r in requests:
        if r.conversation_id in conversation_ids:
            raise ValueError(
                f"Conversation {r.conversation_id} has two requests in one call: send the second when the first is answered, or give "
                "it a conversation_id of its own."
            )
        conversation_ids.add(r.conversation_id)
        _check_request(r, vocabulary, max_length, max_new_tokens, constrains)


def _check_request(
    r: Request, vocabulary: int, max_length: int, max_new_tokens: int, constrains: bool
) -> None:
    if len(r.ids) == 0:
        raise ValueError(f"Request of conversation {r.conversation_id} has no tokens: send at least one.")
    if r.ids.min() < 0 or r.ids.max() >= vocabulary:
        raise ValueError(
            f"Request of conversation {r.conversation_id} has token id "
            f"{r.ids.min() if r.ids.min() < 0 else r.ids.max()}, but the model's vocabulary has {vocabulary}: the tokenizer does not belong to this model."
        )
    if r.sampling.max_new_tokens < 1:
        raise ValueError(
            f"Request of conversation {r.conversation_id} has max_new_tokens {r.sampling.max_new_tokens}: "
            "ask for at least one token."
        )
    if r.sampling.max_new_tokens > max_new_tokens or len(r.ids) + r.sampling.max_new_tokens > max_length:
        raise ValueError(
            f"Request of conversation {r.conversation_id}: {len(r.ids)} tokens plus max_new_tokens {r.sampling.max_new_tokens} "
            f"exceed the engine's max_length {max_length} (and max_new_tokens {max_new_tokens}): shorten the prompt or "
            "raise them in the config."
        )
    if r.sampling.json_schema is not None and not constrains:
        raise ValueError(
            f"Request of conversation {r.conversation_id} has a JSON schema, and this engine does not constrain what it samples: leave "
            "the schema out, or give the in-process engine a tokenizer."
        )
    if r.sampling.json_schema is not None and not r.sampling.stop_ids:
        raise ValueError(
            f"Request of conversation {r.conversation_id} has a JSON schema and no stop id, so its answer could not end: name one."
        )


@dataclasses.dataclass(frozen=True)
class Completion:
    """ids: int32 [N] sampled, the stop id included. logprobs: float32 [N] in nats.
    finish: "stop", "length" or "abort", which the engine could not complete, for the reason given.
    versions: int32 [N], the policy version that sampled each token.
    routing: int16 [len(request.ids) + N - 1, A, K], where the engine records it: the K experts that each of the A
    sparse layers used for each token that was fed, which are all but the last one sampled."""

    ids: np.ndarray
    logprobs: np.ndarray
    finish: str
    versions: np.ndarray
    reason: str = ""
    routing: np.ndarray | None = None


class EngineError(RuntimeError):
    """The engine cannot go on, or not take new weights; the message says why and what to do."""


class Engine(Protocol):
    """What generates; every engine passes coevolve_jax/testing/engine.py.

    batches: True where it serves one batch after the other, so that one asks for many completions at once;
    False where requests come and go. One that serves batches may have a method more, of which `generate` is then the
    repetition:

        async def advance(self, requests: Sequence[Request]) -> list[Completion | None]

    goes on with all of them until some are complete; the others, None, come back with the next call, the same objects.

    counts: where it has this, a Counter of what it has done so far. prefill_tokens: computed of what it was sent;
    cached_tokens: those that it had cached; decode_tokens: sampled. A server may tell of more: queue_seconds: that requests
    waited for their turn, and queued: how many told it; paused_seconds: that each stood still for new weights;
    messages: asked for, and slow_retries: how often one took too long and was sampled anew.

    versions: where it has this, of the packages that servers compute with, by name.

    One that shares devices with the learner may have `sleep()`: it gives back its memory until `update_weights`.

    constrains: whether it heeds `Sampling.json_schema`; one that does not refuses requests that have one.
    """

    batches: bool
    constrains: bool

    async def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """One completion per request, in order. When it is cancelled, nothing of it is kept.

        Raises:
          ValueError: an id outside the vocabulary, an empty prompt, one that leaves no room for its
            max_new_tokens or asks for none, a schema that cannot be heeded, or two requests of one conversation; nothing has been
            computed then.
          EngineError: it cannot go on.
        """
        ...

    def update_weights(self, params: Any, version: int) -> None:
        """Every token sampled after this call comes from `params`; caches of older weights are dropped.

        Requests under way go on with the new weights; `Completion.versions` tells where they changed.
        Raises ValueError for parameters of another model; the old weights are kept then.
        """

    def release(self, conversation_ids: Sequence[int]) -> None:
        """Forgets the caches of finished trajectories."""

    def close(self) -> None: ...
