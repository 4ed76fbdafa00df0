"""Operation counts of an update beside those of the traced program, and a step's throughput."""

import dataclasses
import math
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict

from coevolve_jax.grpo import flops
from coevolve_jax.grpo.packing import pack
from coevolve_jax.loop import timing
from coevolve_jax.loop.collect import Collected
from coevolve_jax.models.attention import BLOCKS
from coevolve_jax.models.decoder import Decoder
from coevolve_jax.planning import topologies
from coevolve_jax.rollout.utilization import Usage, serving, slow_note
from tests.support.grpo_cases import MODEL, init_params, make_learner, samples, trajectory

SPARSE = dataclasses.replace(
    MODEL, model_type="qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=12
)


def products(jaxpr) -> float:
    """Operations of a traced program's matrix products, each loop's as often as it runs."""
    total = 0.0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            left = equation.invars[0].aval.shape
            total += 2.0 * math.prod(equation.outvars[0].aval.shape) * math.prod(left[i] for i in contracted)
        elif equation.primitive.name.startswith("ragged_dot"):
            rows, width = equation.invars[0].aval.shape
            total += 2.0 * rows * width * equation.outvars[0].aval.shape[-1]
        inner = [getattr(p, "jaxpr", p) for p in jax.tree.leaves(list(equation.params.values()))]
        times = equation.params.get("length", 1) if equation.primitive.name == "scan" else 1
        total += times * sum(products(p) for p in inner if hasattr(p, "eqns"))
    return total


@pytest.mark.parametrize("config", [MODEL, dataclasses.replace(MODEL, model_type="qwen2"), SPARSE])
def test_a_forward_pass_is_what_the_traced_model_does(config):
    rows, length = (
        3,
        BLOCKS,
    )  # as many tokens as blocks: plain attention then computes no masked pair
    model, tokens = Decoder(config, attention="plain"), jnp.zeros((rows, length), jnp.int32)
    params = jax.eval_shape(model.init, jax.random.key(0), tokens)["params"]
    forward = lambda p: model.apply({"params": p}, tokens).sum()
    counted = flops.forward(config, rows * length, rows * length * (length + 1) // 2, rows * length)
    traced = products(jax.make_jaxpr(forward)(params).jaxpr)
    if config is SPARSE:  # it also sorts tokens, and weights the experts' outputs
        assert counted <= traced <= 1.03 * counted
    else:
        assert traced == counted
        assert products(jax.make_jaxpr(jax.grad(forward))(params).jaxpr) == 3 * counted


def test_a_batch_counts_by_its_samples_without_padding():
    rng = np.random.default_rng(0)
    made = samples([trajectory(rng, n) for n in (5, 9, 20, 31)], [1.0, -1.0, 0.5, 2.0])
    lengths = [len(s.trajectory.ids) for s in made]
    learned = sum(int(s.trajectory.mask[1:].sum()) for s in made)
    pairs = sum(n * (n + 1) // 2 for n in lengths)
    one = flops.forward(MODEL, sum(lengths), pairs, learned)
    for max_rows in (2, 8):
        batch = pack(made, pack_length=32, rows_per_microbatch=2, max_rows=max_rows)
        assert flops.of_batch(MODEL, batch) == one
        params = init_params()
        for passes, changes in ((4, {}), (3, {"kl_coef": 0.0}), (3, {"lora_rank": 2})):
            assert make_learner(params, **changes).flops(batch, 1) == passes * one
        given = batch._replace(ref_logprobs=batch.advantages)  # then the reference does not run
        assert make_learner(params).flops(given, 1) == 3 * one
        scoring = make_learner(params, epochs=2, tis_cap=2.0, kl_coef=0.0)
        assert scoring.flops(batch, 2) == (2 * 3 + 1) * one


def test_speeds_are_of_the_step_and_mfu_only_where_the_peak_is_known(monkeypatch):
    config = ConfigDict({"learner": {"epochs": 2}, "mesh": {"data": 1, "fsdp": 4}})
    made = samples([trajectory(np.random.default_rng(0), n) for n in (10, 30)], [1.0, -1.0])
    costs = Counter({"sampled_tokens/policy": 90, "sampled_tokens/probe": 10, "rollouts/policy": 7})
    collected = Collected([], Usage({}, Counter()), costs, 4.0)
    told = lambda: timing.throughput(config, collected, made, 6e12, {"rollout": 0.1, "update": 0.5})
    assert told() == {"rollout_tokens": 25.0, "update_tokens": 160.0}
    monkeypatch.setitem(topologies.PEAKS, jax.devices()[0].device_kind, 100 * topologies.TERA)
    assert told() == {"rollout_tokens": 25.0, "update_tokens": 160.0, "mfu": pytest.approx(0.03)}


def test_peaks_of_devices_are_those_of_their_topologies():
    published = {t.operations for t in topologies.TOPOLOGIES.values() if t.operations}
    assert published <= set(topologies.PEAKS.values())


def test_slow_messages_are_told_where_they_are_more_than_one_in_a_hundred():
    told = serving(Counter(messages=200, slow_retries=3, prefill_tokens=5))
    assert told == {"prefill_tokens": 5, "messages": 200, "slow_retries": 3}
    assert "3 slow messages were sampled anew, for 200 asked for" in slow_note(told)
    few = serving(Counter(messages=200, slow_retries=2))
    assert few["slow_retries"] == 2 and not slow_note(few)
    none = serving(Counter(messages=200))  # Usage drops zeros
    assert none["slow_retries"] == 0 and not slow_note(none)
    assert serving(Counter(decode_tokens=1)) == {"decode_tokens": 1} and not slow_note({})
