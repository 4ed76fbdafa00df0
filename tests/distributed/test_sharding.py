"""Every mesh gives the update of one device; parameters and optimiser state are born sharded.

The meshes run in a process of their own, with this file as its program: JAX fixes the number of devices at
its start.
"""

import dataclasses
import os
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from coevolve_jax.distributed import sharding
from coevolve_jax.grpo.learner import Learner
from coevolve_jax.grpo.packing import pack
from coevolve_jax.models import hf_io
from coevolve_jax.models.decoder import ModelConfig
from coevolve_jax.types import Outcome, TrainingSample, Trajectory
from tests.support.grpo_cases import samples
from tests.support.paths import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

STEPS = 10
QWEN3 = ModelConfig(
    "qwen3",
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    rope_theta=1e4,
    tie_word_embeddings=True,
    initializer_range=0.2,
)
MODELS = {
    "qwen3": QWEN3,
    "qwen2": dataclasses.replace(QWEN3, model_type="qwen2", tie_word_embeddings=False),
    "llama": dataclasses.replace(
        QWEN3, model_type="llama", tie_word_embeddings=False, attention_bias=True, mlp_bias=True
    ),
    "qwen3_moe": dataclasses.replace(
        QWEN3,
        model_type="qwen3_moe",
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        norm_topk_prob=True,
    ),
}
# Name -> (model, mesh). tensor=8 cuts heads of 16 in halves and in quarters.
MESHES = {
    "data": ("qwen3", dict(data=8)),
    "fsdp": ("qwen3", dict(fsdp=8)),
    "tensor": ("qwen3", dict(tensor=8)),
    "fsdp and tensor": ("qwen2", dict(fsdp=4, tensor=2)),
    "data, fsdp and tensor": ("qwen3", dict(data=2, fsdp=2, tensor=2)),
    "fsdp and tensor, llama": ("llama", dict(fsdp=4, tensor=2)),
    "rows over expert": ("qwen3", dict(data=2, fsdp=2, expert=2)),
    "expert": ("qwen3_moe", dict(data=2, expert=4)),
    "fsdp, expert and tensor": ("qwen3_moe", dict(fsdp=2, expert=2, tensor=2)),
    "data and context": ("qwen3", dict(data=2, context=4)),
    "fsdp, context and tensor": ("qwen2", dict(fsdp=2, context=2, tensor=2)),
    "data, expert and context": ("qwen3_moe", dict(data=2, expert=2, context=2)),
}


def settings(config):
    """The demo's `learner` section for short rows.

    Without clipping, so that gradients can be read; with KL for one model only, since it doubles the compile
    time.
    """
    sys.path.insert(0, str(ROOT / "configs"))
    from bfcl_tiny import get_config

    c = get_config().learner
    c.pack_length, c.rows_per_microbatch, c.logprob_chunk = 16, 8, 64
    c.max_grad_norm, c.kl_coef = 1e9, 0.1 * (config.model_type in ("qwen2", "llama"))
    c.router_balance = 0.1
    # Adam turns the rounding of a gradient near zero into a large part of a step.
    c.learning_rate = 2e-5
    return c


def random_params(config, seed=0):
    rng = np.random.default_rng(seed)
    draw = lambda p: jnp.asarray(rng.normal(0, 0.2, p.shape) + (p.ndim < 3 and p.shape[-1] < 50), p.dtype)
    return jax.tree.map(draw, hf_io.abstract_params(config))


def trajectories(rng, count=12):
    def one(length):
        mask = rng.random(length) < 0.7
        mask[0], mask[-1] = False, True
        return Trajectory(
            task_id="t",
            rollout_index=0,
            ids=rng.integers(0, 64, length).astype(np.int32),
            mask=mask,
            logprobs=np.where(mask, rng.normal(-4, 0.2, length), 0).astype(np.float32),
            versions=np.where(mask, 0, -1).astype(np.int32),
            turn_starts=(0,),
            steps=(),
            stop="done",
            outcome=Outcome(1.0, True),
        )

    return [one(int(n)) for n in rng.integers(5, 15, count)]


def batches(c, imitate=False):
    """imitate: every third rollout learns by cross-entropy instead."""
    rng = np.random.default_rng(1)
    for _ in range(STEPS):
        found = trajectories(rng)
        rollouts = samples(found, rng.normal(size=len(found)))
        if imitate:
            rollouts[::3] = [
                TrainingSample(s.trajectory, None, 0.1 * np.abs(s.advantages)) for s in rollouts[::3]
            ]
        yield pack(
            rollouts,
            pack_length=c.pack_length,
            rows_per_microbatch=c.rows_per_microbatch,
            max_rows=len(found),
        )


def train(config, mesh):
    """Ten updates on a mesh. Returns their results by name, and the final state."""
    c = settings(config)
    params = random_params(config)
    place = lambda tree: jax.device_put(tree, sharding.param_shardings(mesh, tree))
    learner = Learner(config, c, place(random_params(config, seed=2)), temperature=1.0, mesh=mesh)
    state = learner.init(place(params))
    check_shards(state, learner, mesh)
    results, losses = {}, []
    for i, batch in enumerate(batches(c, imitate=config.model_type == "qwen3_moe")):
        state, metrics = learner.update(state, batch)
        losses.append(float(metrics["loss"]))
        if i == 0:
            # Adam's first moment after one step is (1 - b1) times the gradient.
            named(results, "gradient", jax.device_get(first_moment(state)), 1 / (1 - c.adam_b1))
    named(results, "params", state.params)
    results["losses"] = np.array(losses)
    check_shards(state, learner, mesh)
    return results


def first_moment(state):
    has_mu = lambda s: hasattr(s, "mu")
    return next(s.mu for s in jax.tree.leaves(state.opt_state, is_leaf=has_mu) if has_mu(s))


def named(results, prefix, tree, scale=1):
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        results[prefix + jax.tree_util.keystr(path)] = np.asarray(leaf) * np.float32(scale)


def check_shards(state, learner, mesh):
    """Each device holds its part, and no more, of the parameters and of both moments."""
    for leaf, wanted in zip(jax.tree.leaves(state), jax.tree.leaves(learner.abstract_state), strict=True):
        assert leaf.sharding == wanted.sharding, (leaf.sharding, wanted.sharding)
    parts = mesh.size // mesh.shape["data"]
    for tree in (state.params, first_moment(state)):
        mlp = tree["layers"]["mlp"]
        kernel = mlp.get("experts", mlp)["up_proj"]["kernel"]
        assert len(kernel.addressable_shards) == mesh.size
        assert all(shard.data.size * parts == kernel.size for shard in kernel.addressable_shards)


def main(folder):
    alone = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape([1] * len(sharding.AXES)), sharding.AXES)
    for name, config in MODELS.items():
        np.savez(f"{folder}/{name}.npz", **train(config, alone))
    for name, (model, sizes) in MESHES.items():
        np.savez(f"{folder}/{name}.npz", **train(MODELS[model], sharding.make_mesh(**sizes)))


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("meshes")
    assert start([__file__, str(folder)], devices=8).wait() == 0
    return lambda name: dict(np.load(folder / f"{name}.npz"))


# Otherwise XLA's CPU runtime starts independent collectives in any order, which differs between devices and
# processes: then they wait for each other, or gloo mixes them up.
IN_ORDER = "--xla_cpu_enable_concurrency_optimized_scheduler=false"


def start(args, devices):
    """Starts a Python process with this many CPU devices."""
    env = os.environ | {
        "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} {IN_ORDER} --xla_force_host_platform_device_count={devices}",
        "PYTHONPATH": str(ROOT),
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "NPROC": "16",  # threads, so that waiting collectives do not take all
    }
    return subprocess.Popen([sys.executable, *args], cwd=ROOT, env=env)


@pytest.mark.parametrize("name", MESHES)
def test_a_mesh_gives_losses_gradients_and_ten_steps_of_one_device(results, name):
    got, want = results(name), results(MESHES[name][0])
    assert got.keys() == want.keys() and len(got["losses"]) == STEPS
    for key in want:
        np.testing.assert_allclose(got[key], want[key], rtol=1e-5, atol=1e-5, err_msg=key)


@pytest.mark.parametrize("model", MODELS)
def test_the_updates_that_are_compared_do_something(results, model):
    """Otherwise equal results would show nothing."""
    found = results(model)
    assert np.ptp(found["losses"]) > 1e-2
    gradients = {k: np.abs(v).max() for k, v in found.items() if k.startswith("gradient")}
    assert min(gradients.values()) > 1e-3, gradients
    before = {}
    named(before, "params", random_params(MODELS[model]))
    assert all(np.abs(found[k] - before[k]).max() > 1e-4 for k in before)


def test_experts_are_split_over_their_axis():
    mesh = jax.sharding.AbstractMesh((1, 2, 4, 1, 2), sharding.AXES)
    kernels = lambda experts: {
        "layers": {
            "mlp": {
                "experts": {
                    "up_proj": {"kernel": jax.ShapeDtypeStruct((3, experts, 16, 24), np.float32)},
                    "down_proj": {"kernel": jax.ShapeDtypeStruct((3, experts, 24, 16), np.float32)},
                }
            }
        }
    }
    tree = kernels(8)
    shapes = jax.tree.map(lambda s, p: s.shard_shape(p.shape), sharding.param_shardings(mesh, tree), tree)
    assert jax.tree.leaves(shapes, is_leaf=lambda x: isinstance(x, tuple)) == [(3, 1, 12, 16), (3, 1, 16, 12)]
    with pytest.raises(ValueError, match=r"experts/down_proj/kernel .* expert \* fsdp axis of 8"):
        sharding.param_shardings(mesh, kernels(6))


def test_rows_that_the_mesh_does_not_divide_are_named():
    mesh = jax.sharding.AbstractMesh((2, 2, 1, 1, 1), sharding.AXES)
    with pytest.raises(ValueError, match="6 rows .* data 2 . fsdp 2 . expert 1 = 4; .*rows_per_microbatch"):
        sharding.place_batch(mesh, {"tokens": np.zeros((3, 6, 5))}, axis=1)


@dataclasses.dataclass(frozen=True)
class Device:
    """Stands in for a missing device, with the attributes that JAX reads for a mesh."""

    id: int
    platform: str
    device_kind: str
    slice_index: int
    coords: tuple[int, int, int]
    core_on_chip: int = 0

    @property
    def process_index(self) -> int:
        return self.slice_index


def devices(platform, kind, hosts=1, grid=(8, 1)) -> list[Any]:
    places = [(host, x, y) for host in range(hosts) for y in range(grid[1]) for x in range(grid[0])]
    return [Device(i, platform, kind, host, (x, y, 0)) for i, (host, x, y) in enumerate(places)]


@pytest.mark.parametrize("platform, kind", [("gpu", "NVIDIA H100 80GB HBM3"), ("cpu", "cpu")])
def test_a_mesh_lies_on_devices_of_several_hosts(platform, kind):
    """JAX counts hosts of GPUs as slices; jax.make_mesh builds none of several slices."""
    mesh = sharding.make_mesh(fsdp=8, tensor=2, devices=devices(platform, kind, hosts=2))
    assert [d.id for d in mesh.devices.flat] == list(range(16)) and mesh.shape["fsdp"] == 8


@pytest.mark.parametrize("sizes", [dict(fsdp=8, tensor=2), dict(fsdp=8, context=2), dict(data=2, fsdp=8)])
def test_axes_of_a_mesh_may_share_one_of_a_tpus_torus(sizes):
    """On a v6e-16 (4 x 4 chips), jax.make_mesh builds only meshes whose axes are 4 or 16."""
    mesh = sharding.make_mesh(**sizes, devices=devices("tpu", "TPU v6 lite", grid=(4, 4)))
    assert sorted(d.id for d in mesh.devices.flat) == list(range(16))
    assert {axis: size for axis, size in mesh.shape.items() if size > 1} == sizes


def test_several_slices_of_tpus_are_refused():
    with pytest.raises(ValueError, match="These 32 chips are of 2 TPU slices"):
        sharding.make_mesh(fsdp=32, devices=devices("tpu", "TPU v6 lite", hosts=2, grid=(4, 4)))


@pytest.mark.parametrize("spec", ["", "10.0.0.1:80", "host:80,2,2", "host,2,0", "automatic"])
def test_a_place_among_processes_that_cannot_be_is_refused(spec):
    with pytest.raises(ValueError, match="place in a run.*HOST:PORT,PROCESSES,INDEX"):
        sharding.start_processes(spec)


if __name__ == "__main__":
    main(sys.argv[1])
