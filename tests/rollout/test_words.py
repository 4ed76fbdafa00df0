"""A real SGLang server with text: an explorer asks it over HTTP, and its engine fits answers to schemas."""

from types import SimpleNamespace

import numpy as np
import pytest

from coevolve_jax import build
from coevolve_jax.envs import bfcl
from coevolve_jax.rollout.sglang.engine import SGLangEngine
from coevolve_jax.rollout.sglang.fleet import Member
from coevolve_jax.rollout.sglang.push import Pusher
from coevolve_jax.synthesis.explore import unguided
from coevolve_jax.synthesis.pipeline import SynthesisRequest
from coevolve_jax.synthesis.task_pool import TaskPool
from coevolve_jax.testing.engine import MAX_LENGTH, MAX_NEW_TOKENS, check_engine
from tests.explorers.test_llm_explorer import pool, synthesizer  # noqa: F401 (fixture)
from tests.rollout.test_server import TINY, post

pytestmark = pytest.mark.server


@pytest.fixture
def server(to_be_struck):
    """The server with the weights of the tiny policy."""
    server = to_be_struck().wait_until_ready()
    given = post(server, "/update_weights_from_disk", {"model_path": str(TINY), "weight_version": "0"})
    assert given["success"], given
    return server


@pytest.mark.nightly
def test_a_real_server_whose_model_knows_nothing(server, pool):
    """SGLang serves the tiny policy, which never saw such prompts.

    Its answers fit the schemas where the server constrains them, and make no sense. The run refuses, counts
    and survives all of them.
    """
    scenarios = bfcl.scenarios("train", {"toolsets": ("TicketAPI",)})[:3]
    spoken_to = SimpleNamespace(url=f"{server.url}/v1")
    for constrained in (True, False):
        made = synthesizer(spoken_to, pool, json_schema=constrained, max_tokens=100)
        contexts = [unguided(s, f"c{n}") for n, s in enumerate(scenarios)]
        stats = made.synthesize(
            TaskPool(),
            contexts,
            SynthesisRequest(wanted=2, kind="signal", step=4, rng=np.random.default_rng(0)),
        )
        costs = made.roles.costs
        failed = {k.partition("/")[2]: n for k, n in costs.items() if "faults/" in k or "refused/" in k}
        assert stats.added == 0 and costs["llm_requests/explore"] >= 18 and costs["llm_tokens"] > 10_000
        assert sum(failed.values()) >= 18 - stats.environment_steps
        assert failed.keys() <= {"no_such_tool", "truncated", "wrong_schema", "no_json", "empty"}
        # A constrained answer is JSON of the right form, unless it is truncated; only its content is wrong.
        assert ("no_such_tool" in failed) == constrained or "truncated" in failed


def test_the_engine_over_a_real_server_constrains_what_it_samples(server):
    """The policy as its own explorer, served with text (tests/explorers/test_policy_explorer.py)."""
    policy = build.policy(TINY)
    engine = SGLangEngine(
        policy.config,
        policy.params,
        members=[Member(server.url)],
        pusher=Pusher(policy.config, TINY),
        max_length=MAX_LENGTH,
        max_new_tokens=MAX_NEW_TOKENS,
        constrains=True,
    )
    names = ["a_schema_is_heeded_or_refused", "logprobs_are_those_of_the_learner_at_temperature_0.7"]
    check_engine(lambda: engine, policy, only=names)
