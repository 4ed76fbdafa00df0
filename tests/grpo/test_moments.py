"""Adam's moments in host memory: the bits of moments on the device, and what accelerators' compilers do.

Updates, checkpoints and changes of place are covered. The learners run in a process of their own, with this
file as its program: JAX fixes the number of devices at its start.
"""

import os
import subprocess
import sys
import tempfile
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from coevolve_jax.config import load_file
from coevolve_jax.distributed import sharding
from coevolve_jax.grpo.learner import Learner
from coevolve_jax.grpo.optimizer_offload import step_by_layer
from coevolve_jax.planning import plan
from coevolve_jax.planning.aot import devices, host_memory
from coevolve_jax.planning.topologies import TOPOLOGIES
from coevolve_jax.records import checkpoint
from tests.distributed.test_sharding import MODELS, batches, random_params, settings, start
from tests.support.paths import ROOT

pytestmark = pytest.mark.slow

# Stacks of two lengths, like those of a model that mixes dense and sparse layers.
PARAMS = {
    "embed_tokens": {"embedding": np.ones((6, 4), np.float32)},
    "layers": {
        "norm": {"scale": np.ones((3, 4), np.float32)},
        "mlp": {"kernel": np.ones((2, 4, 8), np.float32)},
    },
}


def test_the_step_sees_one_layer_at_a_time_on_the_device_and_gives_what_it_gives_of_all():
    grads = jax.tree.map(lambda p: np.random.default_rng(0).normal(size=p.shape).astype(np.float32), PARAMS)
    adam = optax.adam(0.1)
    seen = []

    def step(params, grads, state):
        moments = [x for x in jax.tree.leaves(state) if x.ndim]
        seen.extend((x.shape, jax.typeof(x).memory_space) for x in moments)
        updates, state = adam.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    @jax.jit
    def by_layer(params, grads, state):
        return step_by_layer(step, params, grads, state)

    host = NamedSharding(sharding.make_mesh(), P(), memory_kind="pinned_host")
    state = adam.init(PARAMS)
    placed = jax.tree.map(lambda x: jax.device_put(x, host) if x.ndim else x, state)
    got = by_layer(PARAMS, grads, placed)
    assert {space for _, space in seen} == {jax.memory.Space.Device}
    assert {shape for shape, _ in seen} == {(6, 4), (1, 4), (1, 4, 8)}
    kinds = {x.sharding.memory_kind for x in jax.tree.leaves(got[1]) if x.ndim}
    assert kinds == {"pinned_host"}
    wanted = jax.jit(step)(PARAMS, grads, state)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), got, wanted)


def main():
    """Compares three updates on the device with two on the host and a third from a checkpoint on either."""
    config, mesh = MODELS["qwen3"], sharding.make_mesh(fsdp=4, tensor=2)
    place = lambda tree: jax.device_put(tree, sharding.param_shardings(mesh, tree))
    learners = {}
    for where in ("device", "host"):
        c = settings(config)
        c.update(optimizer_offload=where == "host", max_grad_norm=0.1, weight_decay=0.01, warmup_steps=2)
        reference = place(random_params(config, seed=2))
        learners[where] = Learner(config, c, reference, temperature=1.0, mesh=mesh)
    batch = list(batches(c))[:3]

    def updated(where, state, batches):
        for given in batches:
            state, metrics = learners[where].update(state, given)
            assert metrics["applied"] and metrics["finite"]
        for x, wanted in zip(
            jax.tree.leaves(state), jax.tree.leaves(learners[where].abstract_state), strict=True
        ):
            assert x.sharding == wanted.sharding
        return state

    begun = lambda where: learners[where].init(place(random_params(config)))
    want = jax.device_get(updated("device", begun("device"), batch))
    same = lambda got: jax.tree.map(np.testing.assert_array_equal, jax.device_get(got), want)
    on_host = updated("host", begun("host"), batch[:2])
    kinds = {x.sharding.memory_kind for x in jax.tree.leaves(on_host.opt_state) if x.ndim}
    assert kinds == {"pinned_host"}
    with tempfile.TemporaryDirectory() as folder:
        writer = checkpoint.Writer()
        writer.save(folder, 2, on_host, {})
        same(updated("host", on_host, batch[2:]))  # overwrites the state while it is saved
        writer.close()
        for where in learners:
            found = checkpoint.restore(folder, learners[where].abstract_state)
            assert found
            same(updated(where, found[1], batch[2:]))


@pytest.mark.nightly
def test_bits_do_not_depend_on_where_the_moments_are():
    assert start([__file__], devices=8).wait() == 0


def test_a_platform_without_pinned_memory_is_refused():
    device = SimpleNamespace(platform="metal", addressable_memories=lambda: [SimpleNamespace(kind="device")])
    mesh: Any = SimpleNamespace(local_devices=[device], devices=np.array([device]))
    with pytest.raises(
        ValueError, match="platform metal have no pinned host memory .they have device.: set it to"
    ):
        sharding.check_host_memory(mesh)
    sharding.check_host_memory(sharding.make_mesh())


def test_the_plan_has_the_moments_with_the_host_and_a_layer_of_them_on_the_device():
    config = load_file(ROOT / "configs" / "bfcl_qwen3_30b_a3b.py")
    model, mesh = plan.load_model(config.model), plan.make_mesh(TOPOLOGIES["h100-8"], {})
    planned = lambda: plan.plan(model, config.learner, mesh, rows=1, length=25600)
    before, config.learner.optimizer_offload = planned(), True
    after = planned()
    assert (after.host, after.optimizer) == (before.optimizer, 0)
    assert 0 < after.in_flight < after.host / 16 and after.total == before.total - after.host
    assert not before.fits(TOPOLOGIES["h100-8"]) and after.fits(TOPOLOGIES["h100-8"])
    small = load_file(ROOT / "configs" / "bfcl_qwen2_5_0_5b.py")
    small.learner.optimizer_offload = True
    one = plan.make_mesh(TOPOLOGIES["gpu-1x24"], {})
    tied = plan.plan(plan.load_model(small.model), small.learner, one, rows=1, length=1024)
    assert tied.in_flight == 4 * 4 * (151_936 * 896 + 896)  # its embedding is larger than a layer
    told = plan.table(config, ["h100-8"], [25600], 1)
    each = 8 * after.host / plan.GB
    assert f"h100-8: the moments take {each:.1f} GB of the memory of each host." in told


# A step of Adam alone, compiled for described devices.
PROGRAM = """
import sys
from tests.grpo.test_moments import account
print(*account(sys.argv[1]))
"""


def account(name):
    """(bytes of a device's parameters, device memory of the step, host memory of the step)."""
    topology = TOPOLOGIES[name]
    mesh = sharding.make_mesh(fsdp=topology.devices, devices=devices.describe(topology))
    shape = {"layers": {"kernel": jax.ShapeDtypeStruct((16, 1024, 1024), jnp.float32)}}
    adam = optax.adam(0.1)
    own = NamedSharding(mesh, P(None, "fsdp"))
    placed = lambda tree: jax.tree.map(lambda x: own if x.ndim else sharding.replicated(mesh), tree)
    state = jax.eval_shape(adam.init, shape)
    given = (placed(shape), placed(shape), sharding.in_host_memory(placed(state), state))

    def step(params, grads, state):
        updates, state = adam.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    made = jax.jit(
        lambda *given: step_by_layer(step, *given),
        in_shardings=given,
        out_shardings=given[::2],
        donate_argnums=(0, 2),
    )
    lowered = made.lower(shape, shape, state)
    if topology.platform == "gpu":
        host_memory.place_donated(lowered)
    m: Any = lowered.compile().memory_analysis()
    used = m.argument_size_in_bytes + m.output_size_in_bytes - m.alias_size_in_bytes + m.temp_size_in_bytes
    return (
        4 * 16 * 1024**2 // topology.devices,
        used,
        m.host_argument_size_in_bytes + m.host_temp_size_in_bytes,
    )


@pytest.mark.skipif(
    not devices.installed(), reason="the compilers for accelerators are not installed: run make aot"
)
@pytest.mark.parametrize("name", ["h100-4", "v6e-4"])
def test_compilers_keep_the_moments_on_the_host(name):
    environ = os.environ | {"PYTHONPATH": str(ROOT), "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, name], env=environ, capture_output=True, text=True, check=True
    )
    params, used, host = map(int, run.stdout.split()[-3:])
    assert host == 2 * params
    assert 2 * params < used < 2.5 * params  # parameters, gradients, and a few layers' moments


if __name__ == "__main__":
    main()
