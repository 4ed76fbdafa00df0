"""A table of a campaign's versions, for the terminal."""

from __future__ import annotations

from coevolve_jax.harness.campaign import START
from coevolve_jax.harness.loop import Evolution
from coevolve_jax.llm.prompting import line


def table(evolution: Evolution) -> str:
    """A line for each version with a verdict, and the one that is selected."""
    lines = [("version", "parent", "lever", "verdict", "success on selection")]
    for version in evolution.campaign.versions():
        found = evolution.versions.verdict(version)
        if found is None:
            continue
        told = evolution.versions.proposal(version) if version != START else None
        success = "" if found.success is None else f"{found.success:.1%}"
        move = line(f"{told.lever} {told.move}") if told else ""
        lines.append((version, told.parent if told else "", move[:44], found.kind, success))
    selected = evolution.campaign.selected()
    rows = [f"{a:<8} {b:<7} {c:<45} {d:<9} {e:>8}".rstrip() for a, b, c, d, e in lines]
    return "\n".join(
        [*rows, f"Selected: {selected}. Its score was selected, so it is too high: --final reads the test."]
    )
