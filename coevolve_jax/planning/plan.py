"""Bytes per device of one update of a model on a machine, and of rollouts in the same process.

Only shapes are needed. Parameters, optimiser and gradients are exact: their shapes come from
`jax.eval_shape`, their shards from the rules of distributed/sharding.py. Activations and log-probabilities
are arithmetic. docs/notes/memory.md explains it, and tests/planning/test_plan.py compares it with the
compiler's own account.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh
from ml_collections import ConfigDict

from coevolve_jax import config as configs
from coevolve_jax import shipped
from coevolve_jax.distributed import sharding
from coevolve_jax.grpo.losses import uses_kl
from coevolve_jax.grpo.optimizer import make_optimizer
from coevolve_jax.models import hf_io
from coevolve_jax.models.decoder import ModelConfig
from coevolve_jax.planning import rollouts, sizes
from coevolve_jax.planning.topologies import GB, TOPOLOGIES, Topology
from coevolve_jax.rollout.native.store import least_tokens, part_pages

# Share of a device's memory; the rest goes to the runtime, collectives and fragmentation. JAX takes 0.75 of a
# GPU's unless XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise. The documented commands set it to this share.
USABLE = 0.9
PUBLISHED = shipped.ROOT / "configs" / "models"


@dataclasses.dataclass(frozen=True)
class Plan:
    """Bytes per device when a step needs most: in a backward pass, the optimiser's step, or rollouts.

    Attributes:
      parameters: the policy.
      reference: the frozen start, 0 without a KL term.
      optimizer: Adam's moments, 0 with learner.optimizer_offload.
      gradients: the float32 sum over micro-batches, to which each layer's is added in place.
      activations: what every layer keeps for its backward pass.
      layer: the work of one layer and its weights, gathered.
      logprobs: the logits of one chunk, the unembedding and its gradient. They are gone before the backward
        pass reaches the layers, so only the larger of layer and logprobs counts.
      host: moments in the host's memory, for each device.
      in_flight: the host's moments that the optimiser's step has on the device at one time, before and after.
      engine: the weights that an in-process engine computes with, where they are not the policy's own.
      cache: the cache of the engine's conversations. It is given back before an update, unless rollouts run
        ahead.
      ahead: rollouts run ahead, so the cache is there during an update.
      branch: parameters and moments of the copy that `Lab.branch` trains, if the strategy NEEDS it.
      influence: the float32 gradient of the goal that `Lab.influence` keeps, if the strategy NEEDS it. A
        score has the direction of an update, of the same size, beside the gradient.
    """

    parameters: int
    reference: int
    optimizer: int
    gradients: int
    activations: int
    layer: int
    logprobs: int
    host: int = 0
    in_flight: int = 0
    engine: int = 0
    cache: int = 0
    ahead: bool = False
    branch: int = 0
    influence: int = 0

    @property
    def kept(self) -> int:
        """Bytes that are held all the time, or while there is a branch."""
        return self.parameters + self.reference + self.optimizer + self.engine + self.branch + self.influence

    @property
    def update(self) -> int:
        # The optimiser's step writes moments in place on GPUs and TPUs. XLA's CPU backend copies them first.
        backward = self.activations + max(self.layer, self.logprobs)
        work = max(self.in_flight, self.influence, backward)
        return self.kept + self.gradients + work

    @property
    def rollouts(self) -> int:
        """Bytes while the cache is there."""
        return self.cache + (self.update if self.ahead else self.kept)

    @property
    def total(self) -> int:
        return max(self.update, self.rollouts)

    def fits(self, topology: Topology) -> bool:
        return self.total <= USABLE * topology.memory


def load_model(name: str) -> ModelConfig:
    """The architecture of a Hugging Face folder, or of a published model in configs/models by its name."""
    for path in (shipped.folder(name) / "config.json", PUBLISHED / f"{Path(name).name}.json"):
        if path.is_file():
            return ModelConfig.from_hf(json.loads(path.read_text()))
    known = ", ".join(sorted(path.stem for path in PUBLISHED.glob("*.json")))
    raise ValueError(f"config.model is {name!r}: neither a folder with a config.json nor one of {known}.")


def make_mesh(topology: Topology, given: Mapping[str, int], fsdp: int = 0) -> AbstractMesh:
    """The config's mesh on the topology's devices.

    given: that section of the config. fsdp: that axis; 0: what the other axes leave of the devices. A given
    one may leave devices unused.

    Raises ValueError where there are too few devices, or the other axes do not divide them.
    """
    others = {axis: given.get(axis, 1) for axis in sharding.AXES if axis != "fsdp"}
    parts = math.prod(others.values())
    if parts * fsdp > topology.devices or (not fsdp and topology.devices % parts):
        axes = others | ({"fsdp": fsdp} if fsdp else {})
        named = ", ".join(f"config.mesh.{axis}={size}" for axis, size in axes.items())
        wrong = f"need {parts * fsdp} of" if fsdp else "do not divide"
        raise ValueError(f"{named} {wrong} {topology.devices} devices: choose other sizes.")
    fsdp = fsdp or topology.devices // parts
    return AbstractMesh(tuple((others | {"fsdp": fsdp})[axis] for axis in sharding.AXES), sharding.AXES)


def plan(
    model: ModelConfig,
    learner: ConfigDict,
    mesh: Any,
    *,
    rows: int,
    length: int,
    run: ConfigDict | None = None,
) -> Plan:
    """Plans an update and, with `run`, the rollouts of its in-process engine.

    Args:
      learner: that section of a config.
      rows: rows of a micro-batch on each device, or on each group of devices that split them.
      length: tokens of a row.
      run: the whole config, where its engine and what its strategy NEEDS are to be counted.

    Raises:
      ValueError: the mesh does not divide a parameter, or there are adapters.
    """
    if learner.lora_rank:
        raise ValueError(
            f"config.learner.lora_rank is {learner.lora_rank}: adapters cannot be planned; set it to 0."
        )
    params = hf_io.abstract_params(model, jnp.dtype(learner.param_dtype))
    opt_state = jax.eval_shape(make_optimizer(learner, learner.learning_rate).init, params)
    on_host = learner.optimizer_offload
    gradients = [jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, jnp.float32), params)]
    if learner.param_dtype != "float32":  # a micro-batch's own is added as a whole
        gradients.append(params)
    reference = hf_io.abstract_params(model, jnp.dtype(learner.dtype)) if uses_kl(learner) else {}
    tokens = rows * length // sharding.context_parts(mesh)
    activations, work = sizes.activations(model, learner, mesh, tokens)
    weights, cache = rollouts.in_process(run, model, mesh) if run and run.engine.name == "native" else (0, 0)
    needs, moments = configs.needs(run) if run else frozenset(), sizes.shard_bytes(mesh, opt_state)
    copies = int("branch" in needs)
    return Plan(
        parameters=sizes.shard_bytes(mesh, params),
        reference=sizes.shard_bytes(mesh, reference),
        optimizer=0 if on_host else moments,
        gradients=sizes.shard_bytes(mesh, gradients),
        activations=activations,
        layer=work
        + sizes.gathered(params["layers"], learner, mesh)
        + sizes.whole_rows(model, learner, mesh, rows * length),
        logprobs=sizes.logprobs(model, learner, mesh, tokens),
        host=(1 + copies) * moments if on_host else 0,
        in_flight=sizes.in_flight(mesh, params, learner) if on_host else 0,
        engine=weights,
        cache=cache,
        ahead=bool(cache and run and run.rollout.max_staleness),
        branch=copies * (sizes.shard_bytes(mesh, params) + (0 if on_host else moments)),
        influence=sizes.shard_bytes(mesh, gradients[:1]) if "influence" in needs else 0,
    )


def check_fits(config: ConfigDict, model: ModelConfig, mesh: Any, memory: int | None) -> None:
    """Raises ValueError, with the smallest change that mends it, where a run does not fit its devices.

    It fits if the update, and rollouts in this process, need at most `memory` bytes of a device. The engine's
    pages must also hold at least one conversation.

    memory: None where it is not known, as on CPUs; then only pages are checked. Adapters are not planned, so
    with them only pages are checked too.
    """
    if memory is not None and not config.learner.lora_rank:
        _check_memory(config, model, mesh, memory)
    if config.engine.name == "native" and (tokens := config.engine.cache_tokens):
        part_pages(tokens, rollouts.longest(config), rollouts.engine_parts(config, mesh))


def check_context(config: ConfigDict, model: ModelConfig) -> None:
    """Raises ValueError where conversations may be longer than what the model reads."""
    section, most = rollouts.longest_section(config), model.max_position_embeddings
    if rollouts.longest(config) > most:
        scaled = ", or raise that number if its rope is scaled for more" if model.rope_scaling else ""
        raise ValueError(
            f"config.{section}.max_length is {rollouts.longest(config)}, and {config.model} reads {most} "
            f"tokens (max_position_embeddings in its config.json): lower it{scaled}."
        )


def device_rows(learner: ConfigDict, mesh: Any) -> int:
    """Rows of a micro-batch on each device, or on each group of devices that split them."""
    return -(-learner.rows_per_microbatch // sharding.row_parts(mesh))


def _check_memory(config: ConfigDict, model: ModelConfig, mesh: Any, memory: int) -> None:
    """Checks the memory for `check_fits`, of a run that can be planned."""
    learner = config.learner
    size: Any = {"rows": device_rows(learner, mesh), "length": learner.pack_length}
    planned, there = plan(model, learner, mesh, **size, run=config), f"and {memory / GB:.1f} GB are there"
    if asked := planned.branch + planned.influence:
        there = f"{asked / GB:.1f} of them for strategy {config.strategy.name}, {there}"
    if planned.update > memory:
        raise ValueError(
            f"The update needs about {planned.update / GB:.1f} GB of each device, {there}: "
            f"{smallest_change(model, learner, mesh, memory, **size, run=config)}."
        )
    if planned.total > memory:
        change = _cache_change(config, model, mesh, memory, **size)
        raise ValueError(
            f"Rollouts{' beside the update' * planned.ahead} need about {planned.total / GB:.1f} GB of each "
            f"device, {planned.cache / GB:.1f} of them for at most {rollouts.cached_tokens(config, 1):,} "
            f"cached tokens, {there}: {_told(change) if change else _no_cache(config)}."
        )


class _Change(NamedTuple):
    """Settings by key, without "config.", and the plan that they lead to on so many devices."""

    settings: dict[str, Any]
    plan: Plan
    devices: int


def smallest_change(
    model: ModelConfig,
    learner: ConfigDict,
    mesh: Any,
    memory: float,
    *,
    rows: int,
    length: int,
    scale: float = 1.0,
    run: ConfigDict | None = None,
) -> str:
    """Names settings with which a device needs at most `memory` bytes, as the end of a sentence.

    It tries these in order, and names the first with which the update fits:

      1. Layers computed again (remat).
      2. Fewer rows per micro-batch.
      3. Both.
      4. Rows split over devices as well.
      5. The same with moments in the host's memory.
      6. The same without that, on more devices.

    With `run`, settings of the in-process engine follow where its rollouts would not fit then, or its pages
    would hold no conversation. Changes of the numbers, such as bfloat16 moments, are not tried.

    scale: a compiler's figure of the update divided by the plan's, which corrects plans. run: as for `plan`.
    """
    axes, remat, offload = dict(mesh.shape), bool(learner.remat), learner.optimizer_offload
    # Each change: remat, offload of moments, rows, factors for all devices and for those of a row.
    changes = [(True, offload, rows, 1, 1)] * (not remat)
    changes += [(remat, offload, fewer, 1, 1) for fewer in range(rows - 1, 0, -1)]
    split = [2**k for k in range(4)]
    lengths = (length, *learner.pack_length_buckets)
    places = (offload,) if run and "influence" in configs.needs(run) else (offload, True)
    changes += [(True, moments, 1, 1, parts) for moments in places for parts in split]
    changes += [(True, offload, 1, 2**n, parts) for n in range(1, 9) for parts in split]
    for again, moments, fewer, times, parts in changes:
        fsdp, left = divmod(times * axes["fsdp"], parts)
        new = axes | {"fsdp": fsdp, "context": parts * axes["context"]}
        if left or (parts > 1 and any(n % (2 * new["context"]) for n in lengths)):
            continue
        changed = learner.copy_and_resolve_references()
        changed.remat, changed.optimizer_offload = again, moments
        try:
            larger: Any = AbstractMesh(tuple(new.values()), tuple(new))
            planned = plan(model, changed, larger, rows=fewer, length=length, run=run)
        except ValueError:  # so many devices do not divide a parameter
            break
        if scale * planned.update > memory:
            continue
        told: dict[str, Any] = {"learner.remat": True} if again != remat else {}
        if fewer != rows or times > 1 or parts > 1:
            told["learner.rows_per_microbatch"] = fewer * sharding.row_parts(larger)
        if parts > 1:
            told["mesh.context"] = new["context"]
        if times > 1 or parts > 1:
            told["mesh.fsdp"] = fsdp
        if moments != offload:
            told["learner.optimizer_offload"] = True
        if not (run and run.engine.name == "native"):
            return _told(_Change(told, planned, larger.size), scale)
        if planned.rollouts <= memory and not rollouts.too_few(run, larger):
            return _told(_Change(told, planned, larger.size), scale)
        changed = _changed(run, told)
        more = _cache_change(changed, model, larger, memory, rows=fewer, length=length)
        return _told(more._replace(settings=told | more.settings), scale) if more else _no_cache(run)
    return "no number of such devices holds a row of this length: use devices with more memory"


def _cache_change(
    run: ConfigDict, model: ModelConfig, mesh: Any, memory: float, *, rows: int, length: int
) -> _Change | None:
    """The change with which rollouts fit beside what is kept, and pages hold a conversation.

    The cache keeps its tokens where it can. Else it gets a power of two of them in pages, or the fewest that
    it may have. It is on one device, all, or more of them. None where none of that is enough.

    rows, length: as for `plan`, on this mesh.
    """
    axes, all_rows = dict(mesh.shape), rows * sharding.row_parts(mesh)
    own, before = run.engine.sharded, run.engine.cache_tokens
    spreads = model.num_key_value_heads % mesh.shape["tensor"] == 0
    wants = [(True, 1)] * (spreads and (mesh.size > 1 or own))
    wants += [(False, 1)] * (not own)
    wants += [(True, 2**n) for n in range(1, 9)] * spreads
    for sharded, times in wants:
        changed = _changed(run, {"engine.sharded": sharded, "engine.cache_tokens": before})
        fsdp = times * axes["fsdp"]
        larger: Any = AbstractMesh(tuple((axes | {"fsdp": fsdp}).values()), tuple(axes))
        held = sharding.row_parts(larger)
        size: Any = {"rows": -(-all_rows // held), "length": length, "run": changed}
        try:
            without = plan(model, run.learner, larger, **size)
        except ValueError:  # so many devices do not divide a parameter
            break
        parts = rollouts.engine_parts(changed, larger)
        room = (memory - without.rollouts + without.cache) // rollouts.token_bytes(changed, model, larger)
        room, least = int(room) * parts, least_tokens(rollouts.longest(run), parts)
        power = 1 << max(room, 1).bit_length() - 1
        choices = (before, min(power, max(rollouts.cached_tokens(run, 1), least)), least)
        tokens = next((n for n in choices if least <= n <= room), None)
        if tokens is None:
            continue
        told: dict[str, Any] = {"engine.cache_tokens": tokens} if tokens != before else {}
        if sharded != own:
            told["engine.sharded"] = True
        if times > 1:
            if run.learner.rows_per_microbatch % held:
                told["learner.rows_per_microbatch"] = size["rows"] * held
            told["mesh.fsdp"] = fsdp
        changed.engine.cache_tokens = tokens
        return _Change(told, plan(model, run.learner, larger, **size), larger.size)
    return None


def _changed(run: ConfigDict, settings: Mapping[str, Any]) -> ConfigDict:
    changed = run.copy_and_resolve_references()
    with changed.unlocked():  # the config may be older than an option
        changed.update_from_flattened_dict(settings)
    return changed


def _told(change: _Change, scale: float = 1.0) -> str:
    """A change as the end of a sentence."""
    devices = {"mesh.fsdp": f" ({change.devices} devices)"}
    told = [f"config.{key}={value}{devices.get(key, '')}" for key, value in change.settings.items()]
    takes = f"{max(scale * change.plan.update, change.plan.rollouts) / GB:.1f} GB by plan"
    if "learner.optimizer_offload" in change.settings:
        takes += f", and {change.plan.host / GB:.1f} GB of the host's memory for each device"
    return f"set {' and '.join(told)} ({takes})"


def _no_cache(run: ConfigDict) -> str:
    return (
        "no number of such devices holds a conversation of "
        f"config.{rollouts.longest_section(run)}.max_length={rollouts.longest(run):,} tokens beside what the "
        "learner keeps: use devices with more memory"
    )


def table(
    config: ConfigDict,
    topologies: Sequence[str],
    lengths: Sequence[int] = (),
    rows: int = 0,
    fsdp: int = 0,
) -> str:
    """A Markdown table in GB (10**9 bytes) per device, with a line per topology and row length.

    lengths: tokens of a row; none: the config's. rows: as for `plan`; 0: the config's on each mesh. fsdp: as
    in `make_mesh`. Notes below the table name what GPUs need, pages that are too few, and the moments in the
    host's memory. Of several topologies they also name those that the config cannot be planned on, and why.

    Raises ValueError where the config can be planned on none.
    """
    model, learner = load_model(config.model), config.learner
    count = sum(math.prod(p.shape) for p in jax.tree.leaves(hf_io.abstract_params(model)))
    names = [field.name for field in dataclasses.fields(Plan) if field.default is dataclasses.MISSING]
    names += ["engine", "cache"] * (config.engine.name == "native")
    names += [need for need in ("branch", "influence") if need in configs.needs(config)]
    per = f"{rows} row(s) per device" if rows else f"{learner.rows_per_microbatch} row(s) per micro-batch"
    lines = [
        f"{os.path.basename(config.model)}: {count:,} parameters, compute in {learner.dtype}, {per}, "
        "GB per device",
        "",
        "| topology | mesh | tokens per row | " + " | ".join(names) + " | total | of | fits |",
        "|---|---|" + "---:|" * (len(names) + 3) + "---|",
    ]
    notes: list[str] = []
    if any(TOPOLOGIES[name].platform == "gpu" for name in topologies):
        notes.append(
            f"A plan fits where its total is at most {USABLE:.0%} of the memory: on GPUs start the run with "
            f"XLA_PYTHON_CLIENT_MEM_FRACTION={USABLE}, for JAX takes 75% by itself."
        )
    refused: list[str] = []
    for name in topologies:
        topology = TOPOLOGIES[name]
        try:
            mesh = make_mesh(topology, config.mesh, fsdp)
            held = rows or device_rows(learner, mesh)
            plans = {
                length: plan(model, learner, mesh, rows=held, length=length, run=config)
                for length in lengths or (learner.pack_length,)
            }
        except ValueError as error:
            refused.append(f"{name} cannot be planned: {error}")
            if len(refused) == len(topologies):
                raise ValueError(refused[0] if len(refused) > 1 else str(error)) from None
            continue
        axes = " ".join(f"{axis}={size}" for axis, size in mesh.shape.items() if size > 1)
        least = rollouts.too_few(config, mesh)
        for length, p in plans.items():
            cells = [f"{x / GB:.1f}" for x in (*(getattr(p, part) for part in names), p.total)]
            tokens = f"{held} x {length:,}" if held > 1 else f"{length:,}"
            fits = "yes" if p.fits(topology) and not least else "no"
            lines.append(f"| {' | '.join([name, axes, tokens, *cells, f'{topology.memory // GB}', fits])} |")
        if least:
            notes.append(
                f"{name}: the engine wants config.engine.cache_tokens={least} or more, so that each part "
                "holds a conversation."
            )
        p = next(iter(plans.values()))
        if p.host:
            each = min(topology.devices // topology.hosts, mesh.size)
            notes.append(f"{name}: the moments take {each * p.host / GB:.1f} GB of the memory of each host.")
    return "\n".join([*lines, *(line for note in notes + refused for line in ("", note))])
