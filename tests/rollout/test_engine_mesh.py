"""The in-process engine on a mesh gives the output of one device, and its weights stay in place.

The meshes run in a process of their own, with this file as its program: JAX fixes the number of devices at
its start.
"""

import dataclasses
import json
import re
import sys
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from coevolve_jax import config as configs
from coevolve_jax.distributed import sharding
from coevolve_jax.models import hf_io
from coevolve_jax.models.paged import BLOCK, PAGE, PagedCache
from coevolve_jax.planning.aot.decoding import compile_decoding
from coevolve_jax.rollout.native.engine import NativeEngine
from coevolve_jax.rollout.native.programs import Programs
from coevolve_jax.testing.engine import moved
from tests.distributed.test_multiprocess import converse
from tests.distributed.test_sharding import MODELS, random_params, start

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

MESHES = {
    "data, fsdp and tensor": ("qwen3", dict(data=2, fsdp=2, tensor=2)),
    "fsdp and context": ("qwen2", dict(fsdp=4, context=2)),
    "fsdp, expert and tensor": ("qwen3_moe", dict(fsdp=2, expert=2, tensor=2)),
}
COLLECTIVE = re.compile(
    r"\w+\[([\d,]*)\]\S* (?:all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)\("
)


def said_on(config, mesh, cache_tokens=0):
    """`converse` with an engine on this mesh, or on one device."""
    params = random_params(config, seed=2)
    place = lambda tree: jax.device_put(tree, sharding.param_shardings(mesh, tree)) if mesh else tree
    engine = NativeEngine(
        config,
        place(params),
        slots=5,
        cache_tokens=cache_tokens,
        max_length=160,
        max_new_tokens=40,
        seed=1,
        record_routing=config.num_experts > 0,
        mesh=mesh,
    )
    return converse(engine, lambda: place(moved(params)), lambda turn: mesh and check_shards(engine, mesh))


def check_shards(engine, mesh):
    """Each device has its own rows, or pages, and heads of the cache."""
    rows, heads = sharding.token_parts(mesh), mesh.shape["tensor"]
    cache = getattr(engine._store.cache, "kv", engine._store.cache)
    if isinstance(cache, PagedCache):
        for x in jax.tree.leaves((cache.k, cache.v)):
            assert {s.data.shape[:2] for s in x.addressable_shards} == {(x.shape[0] // heads, 3)}
        return
    for x in jax.tree.leaves(cache):
        assert {s.data.shape[:2] for s in x.addressable_shards} == {(x.shape[0] // rows, x.shape[1] // heads)}


def check_cast(mesh):
    """Cast parameters keep the learner's placement; those used in float32 are float32, whatever they were."""
    config = MODELS["qwen3_moe"]
    params = random_params(config, seed=2)
    params = jax.tree.map(
        lambda x, s: jax.device_put(x.astype(jnp.bfloat16), s), params, sharding.param_shardings(mesh, params)
    )
    cast = Programs(config, jnp.bfloat16, True, mesh).cast(params)
    for (path, x), before in zip(
        jax.tree_util.tree_leaves_with_path(cast), jax.tree.leaves(params), strict=True
    ):
        assert x.sharding.is_equivalent_to(before.sharding, x.ndim), path
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        assert (x.dtype == jnp.float32) == name.endswith(("scale", "/gate/kernel")), name


def moved_elements(mesh):
    """Sizes of what devices exchange for a token, and the size of the smallest kernel's part, in elements.

    A device that gathered weights would receive at least such a part.
    """
    config = dataclasses.replace(MODELS["qwen3"], hidden_size=256, intermediate_size=256)
    shapes, where = (
        hf_io.abstract_params(config),
        sharding.param_shardings(mesh, hf_io.abstract_params(config)),
    )
    params = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, where)
    programs, rows = Programs(config, jnp.float32, False, mesh), 4
    per_row = [np.zeros(rows, dtype) for dtype in (np.int32, np.int32, np.uint32, np.float32, np.int32)]
    stop_ids = np.full((rows, 4), -1, np.int32)
    lowered = programs.decode.lower(
        params, programs.empty(rows, 32), jax.random.key(0), *per_row, stop_ids, np.int32(1)
    )
    sizes = [
        prod(map(int, filter(None, m[1].split(","))))
        for m in COLLECTIVE.finditer(lowered.compile().as_text())
    ]
    kernels = [
        prod(x.shape[-2:]) // mesh.shape["tensor"]
        for x in jax.tree.leaves(shapes)
        if prod(x.shape[-2:]) > 1024
    ]
    return sizes, min(kernels)


def main(folder):
    for name, config in MODELS.items():
        np.savez(f"{folder}/{name}.npz", **said_on(config, None))
    for name, (model, sizes) in MESHES.items():
        mesh = sharding.make_mesh(**sizes)
        np.savez(f"{folder}/{name}.npz", **said_on(MODELS[model], mesh))
        # Each part has pages for one conversation: five have a place, with four or eight parts.
        pages = said_on(MODELS[model], mesh, cache_tokens=192 * sharding.token_parts(mesh))
        np.savez(f"{folder}/{name} in pages.npz", **pages)
    check_cast(sharding.make_mesh(fsdp=2, expert=2, tensor=2))
    mesh = sharding.make_mesh(data=2, fsdp=2, tensor=2)
    with open(f"{folder}/moved.json", "w") as file:
        json.dump(moved_elements(mesh), file)
    served = configs.defaults()
    compiled = compile_decoding(served, MODELS["qwen3"], mesh, rows=8, columns=128)
    with open(f"{folder}/compiled.json", "w") as file:
        json.dump(compiled._asdict() | {"token": compiled.token._asdict()}, file)
    served.engine.cache_tokens = 11 * PAGE
    with open(f"{folder}/paged.json", "w") as file:
        json.dump(compile_decoding(served, MODELS["qwen3"], mesh, rows=8, columns=128).cache, file)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("engines")
    assert start([__file__, str(made)], devices=8).wait() == 0
    return made


@pytest.mark.parametrize("pages", [False, True], ids=["rows", "pages"])
@pytest.mark.parametrize("name", MESHES)
def test_a_mesh_says_what_one_device_says(folder, name, pages):
    got, want = (np.load(folder / f"{n}.npz") for n in (name + " in pages" * pages, MESHES[name][0]))
    assert set(got) == set(want)
    assert any(key.startswith("routing") for key in got) == ("expert" in name)
    for key in want:
        np.testing.assert_allclose(got[key], want[key], rtol=1e-5, atol=1e-5, err_msg=key)


def test_weights_stay_where_they_are(folder):
    sizes, kernel = json.loads((folder / "moved.json").read_text())
    assert sizes and max(sizes) < kernel / 2


def test_what_a_token_takes_is_told_by_the_compiled_program(folder):
    told, c = json.loads((folder / "compiled.json").read_text()), MODELS["qwen3"]
    rows, columns, layers, heads = 8, 128, c.num_hidden_layers, c.num_attention_heads
    assert told["cache"] == 2 * 2 * layers * rows * c.num_key_value_heads * c.head_dim * columns // 8
    params = hf_io.abstract_params(c)
    kernels = sum(prod(x.shape) for x in jax.tree.leaves(params) if len(x.shape) == 3)
    scales = 4 * sum(
        prod(x.shape) for path, x in jax.tree_util.tree_leaves_with_path(params) if path[-1].key == "scale"
    )
    assert told["weights"] == 2 * (kernels + c.vocab_size * c.hidden_size) // 4 + scales
    products = (
        2 * rows * (kernels + c.vocab_size * c.hidden_size) + 4 * rows * layers * heads * c.head_dim * columns
    )
    assert told["token"]["operations"] == products / 8
    assert set(told["token"]["collectives"]) >= {"all-gather", "all-reduce"}
    # Eleven pages give two to each of four parts; the table has two rows.
    pages = 2 * 2 * layers * 2 * c.num_key_value_heads // 2 * c.head_dim * PAGE
    assert json.loads((folder / "paged.json").read_text()) == pages + 2 * BLOCK * 4


def test_a_mesh_that_would_cut_a_head_is_refused():
    mesh = jax.sharding.AbstractMesh((1, 1, 1, 1, 4), sharding.AXES)
    with pytest.raises(
        ValueError, match="2 key-value heads .* tensor axis of 4: .*config.engine.sharded=False"
    ):
        NativeEngine(MODELS["qwen3"], {}, slots=4, max_length=96, max_new_tokens=8, seed=0, mesh=mesh)


if __name__ == "__main__":
    main(*sys.argv[1:])
