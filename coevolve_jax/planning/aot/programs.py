"""A config's update and score, compiled for a topology from shapes alone.

The result is memory by part, work by loop, and the estimated time.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from ml_collections import ConfigDict

from coevolve_jax.distributed import sharding
from coevolve_jax.grpo import logprobs, losses, optimizer_offload
from coevolve_jax.grpo.learner import Learner
from coevolve_jax.grpo.packing import Batch
from coevolve_jax.models import expert_all_to_all, hf_io
from coevolve_jax.models.decoder import ModelConfig
from coevolve_jax.planning.aot import host_memory
from coevolve_jax.planning.aot import work as works
from coevolve_jax.planning.aot.batches import Load
from coevolve_jax.planning.aot.hlo import Loop
from coevolve_jax.planning.sizes import shard_bytes
from coevolve_jax.planning.topologies import Topology

GIB = 2**30
ONCE, MICROBATCH, LAYER, VOCABULARY = "once", "micro-batch", "layer", "vocabulary"
ROUND, OTHER = "round", "other loop"  # counted with the loop around them
# Products of the size of queries times keys in an attention kernel, by a word in its name.
_PRODUCTS = {"dkv": 4, "dq": 3, "fwd": 2, "forward": 2}
# The TPU compiler's refusal of a program: memory that it needs, and memory that there is.
REFUSED = re.compile(
    r"Used ([\d.]+)([MG]) of ([\d.]+)([MG]) hbm|\(([\d.]+)([MG])\) exceeds available HBM \(([\d.]+)([MG])\)"
)


class Size(NamedTuple):
    """The size of a micro-batch.

    rows: those on each device, or on each group of devices that split them. length: tokens of a row.
    """

    rows: int
    length: int


@dataclasses.dataclass(frozen=True)
class Account:
    """The compiler's figures for one program. Bytes are those of one device.

    Attributes:
      parts: name -> bytes of its arguments, new results and working memory. Empty where the compiler refused
        the program.
      peak: the most bytes at one time. That is the sum of the parts, except on TPUs. Their compiler reuses
        the memory of dead arrays, so there it is the compiler's own count.
      limit: the bytes that it may take. The compiler for TPUs refuses a program that takes more; the one for
        GPUs refuses nothing.
      loops: the work in each kind of loop.
      times: how often each kind of loop runs in a whole update.
      host: bytes of pinned host memory, which are not among the others.
    """

    parts: dict[str, int]
    peak: int
    limit: int
    loops: dict[str, works.Work]
    times: dict[str, int]
    host: int = 0

    @property
    def fits(self) -> bool:
        return bool(self.parts) and self.peak <= self.limit


def compile_programs(
    config: ConfigDict,
    model: ModelConfig,
    mesh: Mesh,
    topology: Topology,
    size: Size,
    usable: float,
    load: Load,
) -> dict[str, Account]:
    """Compiles the update and, where the learner uses it, the score. Returns name -> account.

    Nothing is allocated on any device. Raises ValueError as `Learner` does.

    usable: the share of a GPU's memory that a program may take; the TPU compiler knows its own limit. load:
    that of a whole update.
    """
    reference = hf_io.abstract_params(model, jnp.dtype(config.learner.dtype))
    on_host = config.learner.optimizer_offload
    learner = Learner(
        model, config.learner, reference, temperature=config.rollout.temperature, mesh=mesh, seed=config.seed
    )
    rows = size.rows * sharding.row_parts(mesh)
    micros = -(-config.rollout.tasks_per_step * config.rollout.group_size // rows)
    shape = micros, rows, size.length
    batch = abstract_batch(
        shape, learner.routing, prefix_sharing=config.learner.prefix_sharing, ages=losses.uses_ages(config)
    )
    programs = {"update": learner.lower}
    if learner.scores:
        programs["score"] = learner.lower_score
    given = {
        "parameters": shard_bytes(mesh, learner.abstract_state.params),
        "reference": shard_bytes(mesh, reference) if learner.keeps_reference else 0,
        "optimizer": 0 if on_host else shard_bytes(mesh, learner.abstract_state.opt_state),
    }
    layers = load.microbatches * model.num_hidden_layers
    times = {ONCE: 1, MICROBATCH: load.microbatches, LAYER: layers, VOCABULARY: load.blocks}
    work = lambda text: _work(text, model, mesh, size, load)
    accounts = {}
    for name, lower in programs.items():
        try:
            lowered = lower(batch)
            if on_host and topology.platform == "gpu" and name == "update":
                host_memory.place_donated(lowered)
            compiled = lowered.compile()
        except jax.errors.JaxRuntimeError as error:
            refused = REFUSED.search(str(error))
            if not refused:
                raise
            used, unit, there, unit_there = filter(None, refused.groups())
            peak, limit = _bytes(used, unit), _bytes(there, unit_there)
            accounts[name] = Account({}, peak, limit, {}, times)
            continue
        own = {part: size for part, size in given.items() if name == "update" or part != "optimizer"}
        memory: Any = compiled.memory_analysis()
        parts = _parts(memory, own)
        host = memory.host_argument_size_in_bytes + memory.host_temp_size_in_bytes
        peak, limit = sum(parts.values()), topology.memory
        if topology.platform == "tpu":
            peak = memory.peak_memory_in_bytes - host
        if topology.platform == "gpu":
            limit = int(usable * limit)
        accounts[name] = Account(parts, peak, limit, work(compiled.as_text()), times, host)
    return accounts


def abstract_batch(
    shape: tuple[int, int, int], routing: tuple[int, int], *, prefix_sharing: bool = False, ages: bool = False
) -> Batch[Any]:
    """A batch of so many micro-batches, rows and tokens, as shapes. routing: as for `Learner`."""
    wanted = {"parents": prefix_sharing, "ages": ages}
    more = {name: jax.ShapeDtypeStruct(shape, jnp.int32) for name, wants in wanted.items() if wants}
    array = lambda dtype, *axes: jax.ShapeDtypeStruct((*shape, *axes), dtype)
    return Batch(
        tokens=array(jnp.int32),
        positions=array(jnp.int32),
        segment_ids=array(jnp.int32),
        targets=array(jnp.int32),
        mask=array(jnp.bool_),
        sampler_logprobs=array(jnp.float32),
        advantages=array(jnp.float32),
        used=jax.ShapeDtypeStruct((), jnp.int32),
        routing=array(jnp.int16, *routing),
        **more,
    )


def kind(path: str) -> str:
    """The kind of a loop, from its path in the traced program."""
    if path.endswith("layers/while"):
        return LAYER
    if re.search(rf"\b{logprobs.SCOPE}\)*/while$", path):
        return VOCABULARY
    if re.search(rf"\b{optimizer_offload.SCOPE}\)*/while$", path):
        return OTHER
    if re.search(rf"\b{expert_all_to_all.SCOPE}\)*/while$", path):
        return ROUND
    return MICROBATCH if path.count("while") == 1 else OTHER


def seconds(account: Account, topology: Topology) -> dict[str, float]:
    """Estimated seconds of a whole update at the published peaks, which no program reaches.

    They are those of products, of memory, and of the links between devices. "overlapped" sums the largest of
    the three in each loop.
    """
    totals = {"products": 0.0, "memory": 0.0, "links": 0.0, "overlapped": 0.0}
    for name, work in account.loops.items():
        one = {
            "products": work.operations / topology.operations,
            "memory": work.bytes / topology.bandwidth,
            "links": on_links(work, topology),
        }
        one["overlapped"] = max(one.values())
        for part, value in one.items():
            totals[part] += account.times[name] * value
    return totals


def on_links(work: works.Work, topology: Topology) -> float:
    """Seconds that a device takes to send its bytes."""
    return work.within / topology.link + work.between / (topology.hosts_link or topology.link)


def hosts_of(mesh: Mesh) -> list[int]:
    """The host of each device of a mesh's programs."""
    return [device.process_index for device in mesh.devices.flat]


def _work(text: str, model: ModelConfig, mesh: Mesh, size: Size, load: Load) -> dict[str, works.Work]:
    """A program's work by kind of loop, with the operations of its kernels.

    Attention multiplies the pairs of the load. A grouped product takes each token once per expert; each round
    of an exchange takes an equal part of these.
    """
    tensor, tokens = mesh.shape["tensor"], size.rows * size.length // sharding.context_parts(mesh)
    pairs = tokens * model.num_experts_per_tok if model.sparse_layers else 0
    rounds = (
        expert_all_to_all.even_rounds(pairs, mesh.shape["expert"])
        if pairs and mesh.shape["expert"] > 1
        else 1
    )
    # 2 operations for each pair, and for each weight of an expert.
    attention = 2 * model.num_attention_heads * model.head_dim / tensor
    experts = 2 * pairs / rounds * model.hidden_size * (model.moe_intermediate_size or 0) / tensor

    def operations(path: str) -> float:
        if "grouped_matmul" in path:
            return experts
        return next((attention * _PRODUCTS[word] * n for word, n in load.pairs.items() if word in path), 0)

    extra = lambda work: sum(calls * operations(path) for path, calls in work.kernels.items())
    loops = by_kind(works.by_loop(text, kind, hosts_of(mesh)), rounds)
    return {name: work._replace(operations=work.operations + extra(work)) for name, work in loops.items()}


def by_kind(found: Mapping[tuple[Loop, ...], works.Work], rounds: int) -> dict[str, works.Work]:
    """Sums the work by the innermost loop of a known kind around it.

    A loop inside that one multiplies its work by its trips. Where these are not known, a loop over rounds
    counts `rounds` times, any other loop once.
    """
    parts: dict[str, list[tuple[int, works.Work]]] = {}
    turns = lambda loop: loop.trips or (rounds if loop.kind == ROUND else 1)
    for loops, work in found.items():
        inner = list(itertools.takewhile(lambda loop: loop.kind in (ROUND, OTHER), reversed(loops)))
        name = loops[-len(inner) - 1].kind if len(inner) < len(loops) else ONCE
        parts.setdefault(name, []).append((math.prod(map(turns, inner)), work))
    return {name: works.total(some) for name, some in parts.items()}


def _parts(m: Any, given: Mapping[str, int]) -> dict[str, int]:
    return {
        **given,
        "batch": m.argument_size_in_bytes - sum(given.values()),
        "results": m.output_size_in_bytes - m.alias_size_in_bytes,
        "work": m.temp_size_in_bytes,
        "code": m.generated_code_size_in_bytes,
    }


def _bytes(number: str, unit: str) -> int:
    return int(float(number) * {"M": 2**20, "G": GIB}[unit])
