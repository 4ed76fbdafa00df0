"""The cost of sampling a token with the in-process engine on a mesh (config.engine.sharded).

XLA's compiler for that mesh gives the figures.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from ml_collections import ConfigDict

from coevolve_jax.distributed import sharding
from coevolve_jax.models import hf_io
from coevolve_jax.models.decoder import ModelConfig
from coevolve_jax.models.paged import BLOCK, PAGE, STRIDE
from coevolve_jax.planning.aot import work as works
from coevolve_jax.planning.aot.programs import hosts_of, on_links
from coevolve_jax.planning.topologies import GB, Topology
from coevolve_jax.rollout.native import rows as cache_rows
from coevolve_jax.rollout.native.programs import Programs

STOP_IDS = 4


class Decoding(NamedTuple):
    """Bytes of one device: its weights, its part of the cache, and the program's own memory (`work`).

    token: the work for one token of every row. Its bytes include what it reads of weights and cache.
    """

    weights: int
    cache: int
    work: int
    token: works.Work

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.work


def compile_decoding(config: ConfigDict, model: ModelConfig, mesh: Mesh, rows: int, columns: int) -> Decoding:
    """Compiles the engine's `decode` with a cache of so many rows and columns (tokens).

    With config.engine.cache_tokens the cache is in pages, for rows of at most so many columns. Raises
    jax.errors.JaxRuntimeError where the compiler refuses the program.
    """
    records = config.learner.replay_routing
    programs = Programs(model, jnp.dtype(config.engine.dtype), records, mesh)
    place = lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)
    shapes = hf_io.abstract_params(model)
    where = sharding.param_shardings(mesh, shapes)
    params = jax.tree.map(place, jax.eval_shape(programs.computed, shapes), where)
    if tokens := config.engine.cache_tokens:
        parts = sharding.token_parts(mesh)
        # As the engine's.
        cache = jax.eval_shape(lambda: programs.empty_pages(tokens // PAGE // parts * parts))
        cache = cache.with_table(jax.ShapeDtypeStruct((rows, -(-columns // STRIDE) * BLOCK), np.int32))
    else:
        cache = jax.eval_shape(lambda: programs.empty(rows, columns))
    cache = jax.tree.map(lambda x, spec: place(x, NamedSharding(mesh, spec)), cache, cache_rows.specs(cache))
    everywhere = sharding.replicated(mesh)
    per_row = lambda dtype, *more: jax.ShapeDtypeStruct((rows, *more), dtype, sharding=everywhere)
    key = place(jax.eval_shape(lambda: jax.random.key(0)), everywhere)
    given = per_row(np.int32), per_row(np.int32), per_row(np.uint32), per_row(np.float32), per_row(np.int32)
    quota = jax.ShapeDtypeStruct((), np.int32, sharding=everywhere)
    compiled = programs.decode.lower(params, cache, key, *given, per_row(np.int32, STOP_IDS), quota).compile()
    loops = works.by_loop(
        str(compiled.as_text()),
        lambda path: "token" if path.count("while") == 1 else "inner",
        hosts_of(mesh),
    )
    token = works.total((1, work) for around, work in loops.items() if around and around[0].kind == "token")
    memory: Any = compiled.memory_analysis()
    held = lambda tree: sum(map(_size, jax.tree.leaves(tree)))
    return Decoding(held(params), held(cache), memory.temp_size_in_bytes, token)


def _size(x: Any) -> int:
    return int(np.prod(x.sharding.shard_shape(x.shape))) * x.dtype.itemsize


def text(decoding: Decoding, topology: Topology, rows: int, columns: int, tokens: int = 0) -> str:
    """Markdown: the memory, and the estimated time of a token at the topology's published peaks.

    tokens: the tokens of all rows together, where they are in pages.
    """
    d, work = decoding, decoding.token
    size = f"at most {columns:,} tokens, {tokens:,} in all" if tokens else f"{columns:,} tokens"
    # Read once for each token; the compiler counts more, because it counts every pass.
    read = d.weights + d.cache
    seconds = {
        "products": work.operations / topology.operations,
        "memory": read / topology.bandwidth,
        "links": on_links(work, topology),
    }
    moved = ", ".join(f"{n} {op} ({size / 1e6:.1f} MB)" for op, (n, size) in sorted(work.collectives.items()))
    together = sum(seconds.values())
    return "\n".join(
        [
            f"**decode**: {rows} rows of {size}; GB per device: weights {d.weights / GB:.2f}, "
            f"cache {d.cache / GB:.2f}, work {d.work / GB:.2f}, together {d.total / GB:.2f} of "
            f"{topology.memory / GB:.0f}.",
            f"A token of every row: {work.operations / 1e12:.3f} 10^12 operations; {moved}.",
            "Estimate, no measurement, at published peaks, weights and cache read once: "
            + ", ".join(f"{name} {1e3 * value:.2f} ms" for name, value in seconds.items())
            + f"; {rows / max(seconds.values()):,.0f} tokens per second where the three overlap, "
            f"{rows / together:,.0f} where they do not.",
        ]
    )
