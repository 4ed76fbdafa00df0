"""The engine protocol: token ids in, sampled token ids and their log-probabilities out."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from coevolve_jax.types import Trajectory


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How to sample one message.

    temperature: 0 is greedy. There is no top_p and no top_k: log-probabilities are those of the full softmax
    at this temperature, so that the learner's importance ratio is unbiased.
    max_new_tokens: a longer message is cut. stop_ids: token ids that end a message.
    json_schema: JSON text, for an engine that `constrains`. The message before the stop id is then JSON of
    that schema, or its beginning where it is cut. Tokens and log-probabilities come from the softmax over the
    tokens that the schema allows. This is not the policy's own softmax: do not train on them.
    """

    temperature: float = 1.0
    max_new_tokens: int = 64
    stop_ids: tuple[int, ...] = ()
    json_schema: str | None = None


@dataclasses.dataclass(frozen=True)
class Request:
    """A request for the next message of a conversation.

    conversation_id: shared by the requests of one trajectory; an engine may keep the KV cache of their common
    prefix. ids: int32 [T], the whole sequence so far. seed: names this trajectory's random stream. Together
    with the position it determines the noise of each token.
    """

    conversation_id: int
    ids: np.ndarray
    sampling: Sampling
    seed: int = 0


def check_logprobs(sampled: Sequence[Trajectory | Completion]) -> None:
    """Raises FloatingPointError for log-probabilities that are not finite: rewards need not show that."""
    if not all(np.isfinite(s.logprobs).all() for s in sampled):
        raise FloatingPointError(
            "The sampler's log-probabilities are not finite: the last update broke the policy (or, before "
            "any update, the model itself gives none); lower config.learner.learning_rate and start again "
            "in a new workdir, or from an earlier checkpoint."
        )


def check_requests(
    requests: Sequence[Request],
    vocabulary: int,
    max_length: int,
    max_new_tokens: int,
    constrains: bool = False,
) -> None:
    """Raises ValueError for requests that an engine of these sizes cannot serve.

    An engine that does not constrain refuses a schema. Two requests of one conversation are refused too: the
    second would have to continue the answer to the first.
    """
    conversation_ids: set[int] = set()
    for r in requests:
        if r.conversation_id in conversation_ids:
            raise ValueError(
                f"Conversation {r.conversation_id} has two requests in one call: send the second when the "
                "first is answered, or give it a conversation_id of its own."
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
            f"{r.ids.min() if r.ids.min() < 0 else r.ids.max()}, but the model's vocabulary has "
            f"{vocabulary}: the tokenizer does not belong to this model."
        )
    if r.sampling.max_new_tokens < 1:
        raise ValueError(
            f"Request of conversation {r.conversation_id} has max_new_tokens {r.sampling.max_new_tokens}: "
            "ask for at least one token."
        )
    if r.sampling.max_new_tokens > max_new_tokens or len(r.ids) + r.sampling.max_new_tokens > max_length:
        raise ValueError(
            f"Request of conversation {r.conversation_id}: {len(r.ids)} tokens plus "
            f"max_new_tokens {r.sampling.max_new_tokens} exceed the engine's max_length {max_length} "
            f"(and max_new_tokens {max_new_tokens}): shorten the prompt or raise them in the config."
        )
    if r.sampling.json_schema is not None and not constrains:
        raise ValueError(
            f"Request of conversation {r.conversation_id} has a JSON schema, and this engine does not "
            "constrain what it samples: leave the schema out, or give the in-process engine a tokenizer."
        )
    if r.sampling.json_schema is not None and not r.sampling.stop_ids:
        raise ValueError(
            f"Request of conversation {r.conversation_id} has a JSON schema and no stop id, so its answer "
            "could not end: name one."
        )


@dataclasses.dataclass(frozen=True)
class Completion:
    """One sampled message.

    ids: int32 [N], the sampled tokens with the stop id. logprobs: float32 [N] in nats.
    finish: "stop", "length", or "abort" where the engine could not complete it (see reason).
    versions: int32 [N], the policy version that sampled each token.
    routing: int16 [len(request.ids) + N - 1, A, K], where the engine records it: the K experts that each of
    the A sparse layers used for each token that was fed. All tokens but the last sampled one were fed.
    """

    ids: np.ndarray
    logprobs: np.ndarray
    finish: str
    versions: np.ndarray
    reason: str = ""
    routing: np.ndarray | None = None


class EngineError(RuntimeError):
    """The engine cannot go on, or cannot take new weights. The message says why and what to do."""


class Engine(Protocol):
    """An engine samples messages. Every engine passes coevolve_jax/testing/engine.py.

    batches: True where it serves one batch after the other, so that callers send many requests at once. False
    where requests come and go.
    constrains: whether it follows `Sampling.json_schema`. An engine that does not refuses requests with one.

    An engine with batches may have the method `advance`, which `generate` repeats:

        async def advance(self, requests: Sequence[Request]) -> list[Completion | None]

    It works on all requests until some are complete. The others get None; the caller sends the same objects
    again with the next call.

    An engine may have further attributes:

    counts: a Counter of its work so far. prefill_tokens: computed prompt tokens. cached_tokens: prompt tokens
    from the cache. decode_tokens: sampled tokens. Servers may add these: queue_seconds: the time that
    requests waited for their turn. queued: the number of requests that report it. paused_seconds: the mean
    time that a server stood still for new weights. messages: the number requested. slow_retries: messages
    that took too long and were sampled again.

    versions: the versions of the servers' packages, by name.

    sleep(): gives back the memory of devices shared with the learner, until `update_weights`.
    """

    batches: bool
    constrains: bool

    async def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Returns one completion per request, in order. A cancelled call leaves nothing behind.

        Raises:
          ValueError, before anything is computed: an id outside the vocabulary, an empty prompt, no room for
            max_new_tokens, a max_new_tokens below 1, a schema that it cannot follow, or two requests of one
            conversation.
          EngineError: the engine cannot go on.
        """
        ...

    def update_weights(self, params: Any, version: int) -> None:
        """Takes new weights. Every later token comes from `params`; caches of older weights are dropped.

        Running requests go on with the new weights; `Completion.versions` shows where they changed.
        Raises ValueError for parameters of another model, and keeps the old weights.
        """

    def release(self, conversation_ids: Sequence[int]) -> None:
        """Forgets the caches of finished trajectories."""

    def close(self) -> None: ...
