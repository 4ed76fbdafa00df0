"""The compiler's account of a config's programs, as text."""

from __future__ import annotations

import dataclasses

import jax
from ml_collections import ConfigDict

from coevolve_jax.distributed import sharding
from coevolve_jax.planning import plan
from coevolve_jax.planning.aot import batches, devices, programs
from coevolve_jax.planning.aot import decoding as decode
from coevolve_jax.planning.topologies import GB, TOPOLOGIES, Topology


def compiled(
    config: ConfigDict,
    name: str,
    size: programs.Size,
    lengths: batches.Lengths | None = None,
    fsdp: int = 0,
) -> str:
    """Compiles a run's programs for a topology and reports in Markdown.

    Each program has its memory by part beside the plan's, its work by loop and its estimated time. If it does
    not fit, the report says what to change.

    Args:
      config: of a run.
      name: of a topology.
      lengths: of the rollouts for which the time is estimated. None: each fills a row.
      fsdp: as in `plan.make_mesh`.

    Raises:
      ValueError: the compilers are not installed, or the topology, the mesh or the model does not allow it.
    """
    topology, model = TOPOLOGIES[name], plan.load_model(config.model)
    axes = dict(plan.make_mesh(topology, config.mesh, fsdp).shape)
    mesh = sharding.make_mesh(**axes, devices=devices.describe(topology))
    planned = plan.plan(model, config.learner, mesh, rows=size.rows, length=size.length, run=config)
    holders, context = sharding.row_parts(mesh), sharding.context_parts(mesh)
    load = batches.load(config, holders, *size, topology.platform, lengths, context)
    accounts = programs.compile_programs(config, model, mesh, topology, size, plan.USABLE, load)
    sizes = " ".join(f"{axis}={n}" for axis, n in axes.items() if n > 1)
    lines = [
        f"{config.model} on {name} ({sizes}), {size.rows} row(s) of {size.length:,} tokens per device, "
        "GB per device",
        "",
        f"The batch: {load.rows:,} rows, {load.full:.0%} full, in {load.microbatches} micro-batch(es).",
    ]
    for program, account in accounts.items():
        account = _beside(account, planned.engine)
        lines += ["", f"**{program}**: {_verdict(account)}"]
        if program == "update":
            lines[-1] += f" The plan is {planned.update / GB:.1f} GB."
        if account.parts:
            if account.host:
                lines.append(_host(account.host, topology))
            lines += ["", *_memory(account), "", *_work(account, topology)]
        if not account.fits and program == "update":
            scale = account.peak / planned.update
            change = plan.smallest_change(
                model,
                config.learner,
                mesh,
                account.limit,
                rows=size.rows,
                length=size.length,
                scale=scale,
                run=config,
            )
            lines += ["", f"What would fit: {change}, corrected by what the compiler asks for here."]
    if planned.cache:
        lines += [
            "",
            f"**rollouts**: {planned.rollouts / GB:.1f} GB by plan, {planned.cache / GB:.1f} of them the "
            "cache when it is full; --program=decode compiles them.",
        ]
    return "\n".join(lines)


def decoding(config: ConfigDict, name: str, rows: int, columns: int, fsdp: int = 0) -> str:
    """Reports in Markdown what the in-process engine takes of a topology to sample a token.

    name: the topology. rows: conversations that each sample a token. columns: tokens that the cache has for
    each. fsdp: as in `plan.make_mesh`.

    Raises ValueError as `compiled` does, and where the cache does not fit.
    """
    topology, model = TOPOLOGIES[name], plan.load_model(config.model)
    axes = dict(plan.make_mesh(topology, config.mesh, fsdp).shape)
    mesh = sharding.make_mesh(**axes, devices=devices.describe(topology))
    if rows % sharding.token_parts(mesh):
        raise ValueError(
            f"{rows} rows do not divide by {sharding.token_parts(mesh)} devices: pass --rows as a multiple."
        )
    try:
        found = decode.compile_decoding(config, model, mesh, rows, columns)
    except jax.errors.JaxRuntimeError as error:
        if not programs.REFUSED.search(str(error)):
            raise
        raise ValueError(
            f"A cache of {rows} rows of {columns:,} tokens does not fit {name}, says the compiler: pass "
            "fewer --rows, a smaller --pack_length, or fewer tokens in pages (--config.engine.cache_tokens)."
        ) from None
    sizes = " ".join(f"{axis}={n}" for axis, n in axes.items() if n > 1)
    title = f"{config.model} on {name} ({sizes}), {config.engine.dtype}"
    text = f"{title}\n\n{decode.text(found, topology, rows, columns, config.engine.cache_tokens)}"
    if config.learner.lora_rank:  # adapters cannot be planned
        return text
    run = config.copy_and_resolve_references()
    run.engine.update(name="native", sharded=True)
    kept = plan.plan(model, run.learner, mesh, rows=1, length=run.learner.pack_length, run=run).kept
    together = kept + found.cache + found.work
    return (
        f"{text}\n\nWith the parameters, reference and moments that the learner keeps beside it, by plan: "
        f"{together / GB:.1f} GB of {topology.memory / GB:.0f}, which "
        f"{'fits' if together <= plan.USABLE * topology.memory else 'does not fit'}."
    )


def _beside(account: programs.Account, engine: int) -> programs.Account:
    """Adds the weights of an in-process engine to what the device holds during the program."""
    if not engine:
        return account
    parts = account.parts and {**account.parts, "engine": engine}
    return dataclasses.replace(account, parts=parts, peak=account.peak + engine)


def _verdict(account: programs.Account) -> str:
    """States peak and limit in GB (10**9) and GiB, since compilers and vendors count differently."""
    word = "fits" if account.fits else "does not fit"
    both = lambda x: f"{x / GB:.1f} GB ({x / programs.GIB:.1f} GiB)"
    return f"{word}, {both(account.peak)} of {both(account.limit)}."


def _host(size: int, topology: Topology) -> str:
    there = 2 * size / topology.host_link
    return (
        f"Of the host's memory {size / GB:.1f} GB for each device. To go from there and back takes "
        f"{there:.1f} s of an update at {topology.host_link / GB:.0f} GB/s each way; that is not in the "
        "estimate below."
    )


def _memory(account: programs.Account) -> list[str]:
    names = [*account.parts, "together", "peak"]
    sizes = (*account.parts.values(), sum(account.parts.values()), account.peak)
    cells = [f"{x / GB:.2f}" for x in sizes]
    return [f"| {' | '.join(names)} |", "|" + "---:|" * len(names), f"| {' | '.join(cells)} |"]


def _work(account: programs.Account, topology: Topology) -> list[str]:
    lines = [
        "| in | times per update | operations, 10^12 | bytes, GB, at most "
        "| collectives (bytes of whole arrays, GB) |",
        "|---|---:|---:|---:|---|",
    ]
    for name, times in account.times.items():
        work = account.loops.get(name)
        if work is None:
            continue
        moved = ", ".join(f"{n} {op} ({size / GB:.3f})" for op, (n, size) in sorted(work.collectives.items()))
        lines.append(
            f"| {name} | {times:,} | {work.operations / 1e12:.3f} | {work.bytes / GB:.2f} "
            f"| {moved or 'none'} |"
        )
    s = programs.seconds(account, topology)
    sent = [
        sum(account.times[name] * size(work) for name, work in account.loops.items())
        for size in (lambda work: work.within, lambda work: work.between)
    ]
    ways = f" (a device sends {sent[0] / GB:.0f} GB within its host, {sent[1] / GB:.0f} to others)"
    over = ways if topology.hosts > 1 and topology.hosts_link else ""
    lines += [
        "",
        f"Estimate, no measurement, at published peaks: products {s['products']:.1f} s, "
        f"memory {s['memory']:.1f} s, links {s['links']:.1f} s{over}; {s['overlapped']:.1f} s where the "
        "three overlap. No program reaches these peaks.",
    ]
    return lines
