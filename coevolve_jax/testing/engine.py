"""The conformance suite of engines (rollout/engine.py).

    policy = build.policy("models/tiny_qwen3")
    check_engine(lambda: MyEngine(policy, max_length=MAX_LENGTH, max_new_tokens=MAX_NEW_TOKENS), policy)

The in-process engine and a real SGLang server pass it. tests/rollout/test_engines.py runs both, and also
shows the faults that the suite finds. Log-probabilities must equal those of models/decoder.py within 1e-4:
serve the weights in float32.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from coevolve_jax import event_loop
from coevolve_jax.build import Policy
from coevolve_jax.models.config import ModelConfig
from coevolve_jax.models.decoder import Decoder
from coevolve_jax.rollout.engine import Completion, Engine, Request, Sampling

MAX_LENGTH, MAX_NEW_TOKENS = 128, 64  # limits of the checked engine
_ATOL = 1e-4  # nats


@dataclasses.dataclass(frozen=True)
class Subject:
    """A checked engine, with the weights of `policy` as version 0. Each check restores these weights."""

    engine: Engine
    policy: Policy

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        completions = event_loop.run(self.engine.generate(requests))
        _expect(
            len(completions) == len(requests),
            f"{len(requests)} requests gave {len(completions)} completions.",
        )
        return completions

    def logprobs(self, ids: np.ndarray, params: Any = None, temperature: float = 1.0) -> np.ndarray:
        """Returns log-probabilities [len(ids), V] of the next tokens, computed for the whole sequence."""
        tokens = np.zeros((1, MAX_LENGTH), np.int32)
        tokens[0, : len(ids)] = ids
        params = self.policy.params if params is None else params
        return np.asarray(_forward(self.policy.config)(params, tokens, temperature))[: len(ids)]


def check_engine(make: Callable[[], Engine], policy: Policy, *, only: Collection[str] = ()) -> None:
    """Runs all checks, or those named in `only`, on one engine, and closes it.

    make: returns an engine with the policy's weights as version 0, max_length MAX_LENGTH and max_new_tokens
    MAX_NEW_TOKENS. policy: that of models/tiny_qwen3. Some checks rely on it, and say so where it differs.

    Raises:
      AssertionError: the name of a check and, in one sentence, the engine's fault.
    """
    engine = make()
    try:
        for name in only or CHECKS:
            try:
                CHECKS[name](Subject(engine, policy))
            except AssertionError as error:
                raise AssertionError(f"{name}: {error}") from None
            except Exception as error:
                raise AssertionError(f"{name}: the engine raised {type(error).__name__}: {error}") from error
    finally:
        engine.close()


def ask(
    conversation_id: int,
    ids: Sequence[int] | np.ndarray,
    *,
    temperature: float = 1.0,
    seed: int = 0,
    new: int = 8,
    stop: tuple[int, ...] = (2,),
) -> Request:
    """Returns a request for at most `new` tokens."""
    return Request(conversation_id, np.asarray(ids, np.int32), Sampling(temperature, new, stop), seed)


def check_completion(
    subject: Subject,
    prompt: np.ndarray | Sequence[int],
    completion: Completion,
    *,
    temperature: float = 1.0,
    weights: Mapping[int, Any] | None = None,
) -> None:
    """Checks that each log-probability is the learner's, for the weights of the token's version.

    weights: version -> params. Without them, any version stands for the policy's own weights.
    """
    c, ids = completion, np.concatenate([prompt, completion.ids])
    sizes = len(c.ids), len(c.logprobs), len(c.versions)
    _expect(
        len(set(sizes)) == 1, f"{sizes[0]} ids came with {sizes[1]} log-probabilities, {sizes[2]} versions."
    )
    for version in np.unique(c.versions):
        _expect(
            not weights or version in weights, f"A token names version {version}, which nobody has pushed."
        )
        logp = subject.logprobs(ids, weights[version] if weights else None, temperature or 1.0)
        here = np.flatnonzero(c.versions == version)
        want = logp[len(prompt) - 1 + here, c.ids[here]]
        _expect_close(c.logprobs[here], want, f"The log-probabilities of the tokens of version {version}")


def check_tokens(subject: Subject, lengths: Sequence[int], seed: int) -> None:
    """Checks that up to four random prompts give tokens of the vocabulary with finite log-probabilities."""
    rng = np.random.default_rng(seed)
    requests = [ask(i, rng.integers(0, 1000, n), seed=seed + i) for i, n in enumerate(lengths)]
    out = subject.generate(requests)
    subject.engine.release(range(4))
    for c in out:
        told = f"prompts of {list(lengths)} tokens of seed {seed} gave {c.ids.tolist()}"
        _expect(1 <= len(c.ids) <= 8, f"Of at most 8 tokens, {told}.")
        known = (c.ids >= 0).all() and (c.ids < subject.policy.config.vocab_size).all()
        _expect(known, f"Ids outside the vocabulary: {told}.")
        sound = np.isfinite(c.logprobs).all() and (c.logprobs <= 0).all()
        _expect(sound, f"Log-probabilities must be finite and at most 0: {told} with {c.logprobs.tolist()}.")
        ended = c.finish == "stop" if c.ids[-1] == 2 else c.finish == "length" and len(c.ids) == 8
        _expect(ended, f"With stop id 2 and a budget of 8, {told} and finish {c.finish!r}.")


def moved(params: Any, scale: float = 0.05) -> Any:
    """Returns the parameters of another policy: adds noise of this standard deviation."""
    keys = jax.random.split(jax.random.key(0), len(jax.tree.leaves(params)))
    return jax.tree.unflatten(
        jax.tree.structure(params),
        [x + scale * jax.random.normal(k, x.shape) for x, k in zip(jax.tree.leaves(params), keys)],
    )


# ---- The checks ----------------------------------------------------------------------------------------


def _logprobs_are_those_of_the_learner(subject: Subject, temperature: float) -> None:
    prompt = np.arange(30, 51)
    (c,) = subject.generate([ask(100, prompt, temperature=temperature, new=24)])
    subject.engine.release([100])
    check_completion(subject, prompt, c, temperature=temperature)
    if temperature == 0:
        logp = subject.logprobs(np.concatenate([prompt, c.ids]))
        best = logp[len(prompt) - 1 : -1].argmax(-1)
        _expect_equal(c.ids, best, "At temperature 0, the ids must be the likeliest ones, and")


def _turns_reuse_the_prefix_and_stay_exact(subject: Subject) -> None:
    engine, rng = subject.engine, np.random.default_rng(0)
    ids, served = rng.integers(5, 900, 20), 0
    for turn in range(3):
        counts = getattr(engine, "counts", None)
        before = counts["cached_tokens"] if counts else 0
        (c,) = subject.generate([ask(1, ids, seed=9)])
        check_completion(subject, ids, c)
        if counts and served:  # engines that count must have cached all of the last turn
            had = counts["cached_tokens"] - before
            _expect(had >= served - 1, f"Turn {turn} found {had} of {served} tokens of the last one cached.")
        served = len(ids) + len(c.ids) - 1
        ids = np.concatenate([ids, c.ids, rng.integers(5, 900, 7)])
    engine.release([1])


def _what_shares_a_batch_does_not_matter(subject: Subject) -> None:
    """Checks it where budgets, temperatures and stop ids differ. Only greedy requests must repeat."""
    rng = np.random.default_rng(1)
    # More than an engine of four slots has.
    prompts = [rng.integers(5, 900, n) for n in (3, 40, 11, 26, 9, 33)]
    prompts[4] = prompts[2]  # they differ in budget and stop id only
    (free,) = subject.generate([ask(9, prompts[2], temperature=0.0, stop=(), new=20)])
    subject.engine.release([9])
    budgets, temperatures = [8, 1, 20, 3, 16, 5], [0.7, 0.0, 0.0, 0.0, 0.0, 0.7]
    stops = [(), (), tuple(free.ids[3:4].tolist()), (), (), ()]
    settings = list(zip(prompts, budgets, temperatures, stops))

    def request(conversation_id: int, i: int) -> Request:
        p, n, temperature, stop = settings[i]
        return ask(conversation_id, p, temperature=temperature, seed=i, new=n, stop=stop)

    together = subject.generate([request(10 + i, i) for i in range(6)])
    subject.engine.release(range(10, 16))
    for i, (p, n, temperature, _) in enumerate(settings):
        check_completion(subject, p, together[i], temperature=temperature)
        if temperature:  # equal seeds need not give equal samples
            size = len(together[i].ids)
            _expect(size == n, f"Request {i} of a batch, without a stop id, gave {size} of {n} tokens.")
            continue
        (alone,) = subject.generate([request(50 + i, i)])
        subject.engine.release([50 + i])
        _expect_equal(alone.ids, together[i].ids, f"Request {i} of a batch, asked alone,")
        _expect_close(
            alone.logprobs, together[i].logprobs, f"The log-probabilities of request {i}, asked alone,"
        )


def _samples_of_one_prompt_differ(subject: Subject) -> None:
    prompt = np.arange(40, 60)
    members = subject.generate([ask(i, prompt, seed=i, new=16) for i in range(4)])
    subject.engine.release(range(4))
    distinct = len({tuple(m.ids) for m in members})
    _expect(distinct > 1, f"Four requests of other seeds gave {members[0].ids.tolist()}, all of them.")
    for m in members:
        check_completion(subject, prompt, m)


def _tokens_are_drawn_from_the_full_softmax(subject: Subject) -> None:
    """Finds a top_p, a top_k or another temperature behind log-probabilities of the full softmax.

    Compares the sum of the tokens' log-probabilities with its mean, in standard deviations. A sound engine
    fails once in a million draws.
    """
    rng, apart, variance = np.random.default_rng(3), 0.0, 0.0
    prompts = [rng.integers(5, 900, 20) for _ in range(16)]
    completions = subject.generate([ask(i, p, seed=i, stop=(), new=24) for i, p in enumerate(prompts)])
    subject.engine.release(range(16))
    for p, c in zip(prompts, completions):
        logp = subject.logprobs(np.concatenate([p, c.ids]))[len(p) - 1 : -1].astype(np.float64)
        mean = (np.exp(logp) * logp).sum(-1)
        apart += (logp[np.arange(len(c.ids)), c.ids] - mean).sum()
        variance += ((np.exp(logp) * logp**2).sum(-1) - mean**2).sum()
    deviations = apart / variance**0.5
    _expect(
        abs(deviations) < 5,
        f"Tokens are too {'likely' if deviations > 0 else 'unlikely'} for samples of the full softmax: "
        f"their log-probabilities sum to {deviations:.1f} standard deviations from the mean.",
    )


def _stop_ids_and_budgets_are_kept(subject: Subject) -> None:
    prompt = np.arange(40, 60)
    (free,) = subject.generate([ask(7, prompt, temperature=0.0, stop=(), new=40)])
    told = f"{len(free.ids)} tokens, finish {free.finish!r}"
    _expect(len(free.ids) == 40 and free.finish == "length", f"40 tokens without a stop id gave {told}.")
    stop = int(free.ids[3])
    first = free.ids.tolist().index(stop)
    (stopped,) = subject.generate([ask(8, prompt, temperature=0.0, stop=(stop,), new=40)])
    _expect(stopped.finish == "stop", f"With stop id {stop}, finish is {stopped.finish!r}, not 'stop'.")
    _expect_equal(stopped.ids, free.ids[: first + 1], f"With stop id {stop}, which is the last one returned,")
    sizes = len(stopped.logprobs), len(stopped.versions)
    _expect(sizes == (first + 1,) * 2, f"{first + 1} ids came with {sizes} log-probabilities and versions.")
    subject.engine.release([7, 8])


def _no_other_token_stops_not_even_the_models_own_end(subject: Subject) -> None:
    """Finds servers that stop at the end of text of the model's config, whatever the request says."""
    chat = subject.policy.chat
    end, prompt = chat.stop_ids[0], chat.prompt([], "Done.")
    (free,) = subject.generate([ask(7, prompt, temperature=0.0, stop=(), new=40)])
    on_the_way = end in free.ids[:-1]
    _expect(on_the_way, f"Without stop ids, no token came after the model's own end, {end}: {free.ids}.")
    never = next(i for i in range(5, subject.policy.config.vocab_size) if i not in free.ids)
    (same,) = subject.generate([ask(8, prompt, temperature=0.0, stop=(never,), new=40)])
    subject.engine.release([7, 8])
    _expect(same.finish == "length", f"With a stop id that never comes, finish is {same.finish!r}.")
    _expect_equal(same.ids, free.ids, "With a stop id that never comes, the ids")
    check_completion(subject, prompt, same)


def _new_weights_are_used_at_once_and_old_caches_dropped(subject: Subject) -> None:
    engine, params = subject.engine, subject.policy.params
    prompt, other = np.arange(40, 60), moved(params)
    (old,) = subject.generate([ask(1, prompt, seed=2)])
    check_completion(subject, prompt, old)
    engine.update_weights(other, 7)
    try:
        ids = np.concatenate([prompt, old.ids, [9, 10]])
        (new,) = subject.generate([ask(1, ids, temperature=0.0, stop=())])
    finally:
        engine.update_weights(params, 0)
    told = f"{old.versions.tolist()} before version 7 was pushed, {new.versions.tolist()} after it"
    _expect((old.versions == 0).all() and (new.versions == 7).all(), f"The tokens' versions are {told}.")
    check_completion(subject, ids, new, weights={7: other})
    best = subject.logprobs(np.concatenate([ids, new.ids]))[len(ids) - 1 : -1].max(-1)
    apart = np.abs(best - new.logprobs).max()
    _expect(apart > 0.1, f"New weights move log-probabilities by {apart} only: the old ones still generate.")


def _weights_of_another_model_are_refused(subject: Subject) -> None:
    engine, params = subject.engine, subject.policy.params
    prompt = np.arange(30, 50)
    wider = jax.tree.map(lambda x: jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, 1)]), params)
    try:
        engine.update_weights(wider, 5)
    except ValueError:
        pass
    else:
        engine.update_weights(params, 0)
        raise AssertionError("Parameters of other shapes were taken: raise ValueError and keep the old ones.")
    (after,) = subject.generate([ask(1, prompt, seed=2)])
    _expect((after.versions == 0).all(), f"Versions after refused weights are {after.versions.tolist()}.")
    check_completion(subject, prompt, after)


def _a_request_that_meets_new_weights_says_from_where(subject: Subject) -> None:
    engine, params = subject.engine, subject.policy.params
    other, prompts = moved(params, 0.02), [np.arange(40 + i, 60) for i in range(3)]
    requests = [ask(i, p, stop=(), new=MAX_NEW_TOKENS) for i, p in enumerate(prompts)]

    async def meet(wait: float) -> list[Completion]:
        asked = asyncio.ensure_future(engine.generate(requests))
        await asyncio.sleep(wait)
        await asyncio.to_thread(engine.update_weights, other, 1)
        return await asked

    met = set()
    for wait in (0.02, 0.05, 0.1, 0.15, 0.2, 0.3) * 5:  # until an update comes during sampling
        try:
            completions = event_loop.run(meet(wait))
        finally:
            engine.release(range(3))
            engine.update_weights(params, 0)
        for p, c in zip(prompts, completions, strict=True):
            rising = len(c.ids) == MAX_NEW_TOKENS and (np.diff(c.versions) >= 0).all()
            _expect(rising, f"{MAX_NEW_TOKENS} tokens of rising versions were due, not {c.versions}.")
            check_completion(subject, p, c, weights={0: params, 1: other})
        met |= {len(set(c.versions.tolist())) for c in completions}
        if engine.batches or 2 in met:  # an engine with batches finishes them before an update
            return
    raise AssertionError("No request under way went on with new weights.")


def _a_schema_is_heeded_or_refused(subject: Subject) -> None:
    """Checks that an answer is JSON of the schema, with tokens no less likely than among all tokens."""
    prompt, stop, values = np.arange(40, 60), subject.policy.chat.stop_ids, [["a", 1], "b", {"c": None}]
    sampling = Sampling(1.0, 32, stop, json.dumps({"enum": values}))
    requests = [Request(i, prompt, sampling, seed=i) for i in range(4)]
    if not subject.engine.constrains:
        return _what_cannot_be_served_is_refused(subject, requests[1], "schema")
    completions = subject.generate(requests)
    subject.engine.release(range(4))
    for c in completions:
        text = subject.policy.chat.decode(c.ids[:-1])
        fits = c.finish == "stop" and json.loads(text) in values
        _expect(fits, f"Of one of {values}, {text!r} came with finish {c.finish!r}.")
        logp = subject.logprobs(np.concatenate([prompt, c.ids]))
        free = logp[len(prompt) - 1 + np.arange(len(c.ids)), c.ids]
        sound = (c.logprobs <= _ATOL).all() and (c.logprobs >= free - _ATOL).all()
        _expect(sound, f"Among what is allowed no token is less likely than among all, {free}: {c.logprobs}.")


def _what_is_cancelled_leaves_nothing_behind(subject: Subject) -> None:
    engine, prompt = subject.engine, np.arange(40, 60)
    requests = [ask(i, prompt, stop=(), new=MAX_NEW_TOKENS) for i in range(4)]

    async def cancel() -> bool:
        asked = asyncio.ensure_future(engine.generate(requests))
        await asyncio.sleep(0.01)
        asked.cancel()
        try:
            await asked
        except asyncio.CancelledError:
            return True
        return False

    _expect(event_loop.run(cancel()), "A request that was cancelled raised no CancelledError.")
    engine.release(range(4))
    (c,) = subject.generate([ask(0, prompt[5:], new=12)])
    engine.release([0])
    check_completion(subject, prompt[5:], c)


def _what_cannot_be_served_is_refused(subject: Subject, bad: Request, why: str) -> None:
    """Checks that a request is refused before anything runs, like `rollout.engine.check_requests` does."""
    try:
        subject.generate([ask(0, [5, 6]), bad])
    except ValueError as error:
        _expect(why in str(error), f"The refusal does not say {why!r} but {str(error)!r}.")
    else:
        raise AssertionError(f"A request that must be refused for {why!r} was served.")
    finish = subject.generate([ask(2, [5, 6])])[0].finish
    _expect(finish in ("stop", "length"), f"The request after one that was refused ends with {finish!r}.")
    subject.engine.release([2])


def _every_sampled_token_is_in_the_vocabulary(subject: Subject) -> None:
    rng = np.random.default_rng(0)
    for seed in range(10):
        check_tokens(subject, rng.integers(1, 61, rng.integers(1, 5)).tolist(), seed)


_REFUSED = {
    "no_tokens": ([], 4, "no tokens"),
    "an_id_above_the_vocabulary": ([5, 10**6], 4, "vocabulary has"),
    "a_negative_id": ([5, -1], 4, "token id -1"),
    "too_long_a_sequence": (list(range(120)), 16, "exceed the engine's max_length"),
    "too_large_a_budget": ([5], MAX_NEW_TOKENS + 1, "max_new_tokens"),
    "no_budget": ([5], 0, "max_new_tokens 0"),
    "a_negative_budget": ([5], -1, "max_new_tokens -1"),
}
_SECOND = ask(0, [5, 6, 7])  # shares its conversation with the good request beside it
_PLAIN = (
    _turns_reuse_the_prefix_and_stay_exact,
    _what_shares_a_batch_does_not_matter,
    _samples_of_one_prompt_differ,
    _tokens_are_drawn_from_the_full_softmax,
    _stop_ids_and_budgets_are_kept,
    _no_other_token_stops_not_even_the_models_own_end,
    _new_weights_are_used_at_once_and_old_caches_dropped,
    _weights_of_another_model_are_refused,
    _a_request_that_meets_new_weights_says_from_where,
    _a_schema_is_heeded_or_refused,
    _what_is_cancelled_leaves_nothing_behind,
    _every_sampled_token_is_in_the_vocabulary,
)
CHECKS: dict[str, Callable[[Subject], None]] = {
    **{
        f"logprobs_are_those_of_the_learner_at_temperature_{temperature}": functools.partial(
            _logprobs_are_those_of_the_learner, temperature=temperature
        )
        for temperature in (0.0, 0.7, 1.0)
    },
    **{check.__name__.removeprefix("_"): check for check in _PLAIN},
    **{
        f"refused_before_anything_runs_{name}": functools.partial(
            _what_cannot_be_served_is_refused, bad=ask(1, ids, new=new), why=why
        )
        for name, (ids, new, why) in _REFUSED.items()
    },
    "refused_before_anything_runs_two_requests_of_a_conversation": functools.partial(
        _what_cannot_be_served_is_refused, bad=_SECOND, why="two requests"
    ),
}


# ---- Assertions ----------------------------------------------------------------------------------------


@functools.cache
def _forward(config: ModelConfig) -> Callable[[Any, np.ndarray, float], jax.Array]:
    def run(params, tokens, temperature):
        logp = jax.nn.log_softmax(Decoder(config).apply({"params": params}, tokens))
        return jax.nn.log_softmax(logp / temperature)[0]

    return jax.jit(run)


def _expect(condition: Any, sentence: str) -> None:
    if not condition:
        raise AssertionError(sentence)


def _expect_equal(got: np.ndarray, want: np.ndarray, what: str) -> None:
    same = np.array_equal(got, want)
    _expect(same, f"{what} are {np.asarray(got).tolist()} and should be {np.asarray(want).tolist()}.")


def _expect_close(got: np.ndarray, want: np.ndarray, what: str) -> None:
    _expect(np.shape(got) == np.shape(want), f"{what} are {np.size(got)} and should be {np.size(want)}.")
    far = np.flatnonzero(~np.isclose(got, want, rtol=1e-7, atol=_ATOL))
    if len(far):
        i = far[0]
        raise AssertionError(
            f"{what} differ at {len(far)} places, first at {i}: {got[i]}, and {want[i]} was due."
        )
