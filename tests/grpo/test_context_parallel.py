"""Rows split over a mesh: the cases that tests/distributed/test_sharding.py lacks, in one update.

They are sequence-level ratios, shared prompts, replayed routing, router balancing, cross-entropy and given
scores. Segments and prompts cross the borders of parts. The devices belong to a process of their own, with
this file as its program.
"""

import sys

import jax
import numpy as np
import pytest

from coevolve_jax.distributed import sharding
from coevolve_jax.grpo.learner import Learner
from coevolve_jax.models import context_parallel
from coevolve_jax.models.decoder import Decoder
from tests.distributed.test_sharding import named, start
from tests.grpo.test_shared_prompts import packed, rollouts
from tests.support.grpo_cases import learner_config, moved
from tests.support.update_programs import EXPERTS

pytestmark = pytest.mark.slow

MESHES = {"one": dict(), "fsdp and context": dict(fsdp=2, context=2)}
SETTINGS = dict(
    ratio="sequence",
    aggregate="sequence",
    tis_cap=2.0,
    epochs=2,
    router_balance=0.1,
    replay_routing=True,
    prefix_sharing=True,
    attention="chunked",
    remat=True,
)


def main(folder):
    params = jax.jit(Decoder(EXPERTS).init)(jax.random.key(0), np.zeros((1, 4), np.int32))["params"]
    for name, sizes in MESHES.items():
        mesh = sharding.make_mesh(**sizes)
        place = lambda tree: jax.device_put(tree, sharding.param_shardings(mesh, tree))
        config = learner_config(**SETTINGS)
        learner = Learner(EXPERTS, config, place(params), temperature=0.8, mesh=mesh)
        found = rollouts([(9, [15, 4, 18]), (3, [12, 1]), (14, [5])], 0, routing=learner.routing)
        batch = packed(found, True, routing=learner.routing)
        assert batch.parents.size and batch.routing.size and batch.ce_weights.size
        score = learner.score(learner.init(place(params)), batch)
        given = place(moved(params)), place(params), sharding.place_batch(mesh, batch, axis=1), score
        gradients, metrics = jax.jit(learner.gradients)(*given)
        results = {"score": np.asarray(score)}
        named(results, "gradient", gradients)
        named(results, "metric", metrics)
        np.savez(f"{folder}/{name}.npz", **results)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("meshes")
    assert start([__file__, str(folder)], devices=4).wait() == 0
    return {name: dict(np.load(folder / f"{name}.npz")) for name in MESHES}


@pytest.mark.parametrize("name", list(MESHES)[1:])
def test_an_update_with_everything_is_that_of_one_device(results, name):
    got, want = results[name], results["one"]
    assert got.keys() == want.keys() and np.ptp(want["score"]) > 1
    for key in want:
        np.testing.assert_allclose(got[key], want[key], rtol=1e-5, atol=1e-5, err_msg=key)


def test_a_part_is_from_both_ends_of_the_row():
    found = [context_parallel.places(part, 2, 12).tolist() for part in range(2)]
    assert found == [[0, 1, 2, 9, 10, 11], [3, 4, 5, 6, 7, 8]]


if __name__ == "__main__":
    main(sys.argv[1])
