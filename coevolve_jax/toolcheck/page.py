"""The check of tools as text for a terminal and as one HTML page, without scripts, in the report's style."""

from __future__ import annotations

import base64
import hashlib
import importlib.resources
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import jinja2
from markupsafe import Markup

from coevolve_jax.llm.prompting import line
from coevolve_jax.toolcheck.facts import READ, SHOWN, Facts
from coevolve_jax.toolcheck.findings import Finding, said


def verdict(found: Sequence[Finding]) -> str:
    """Returns the result in a sentence."""
    stops = sum(finding.stops for finding in found)
    if stops:
        return f"No: {stops} {_plural('finding', stops)} must be mended first."
    if found:
        return f"Yes. {len(found)} {_plural('finding', len(found))} may be worth mending."
    return "Yes."


def lengths(facts: Facts) -> str:
    """Says how many different tasks of each length came out."""
    by_length = Counter(len(task.calls) for task in facts.tasks)
    parts = ", ".join(f"{count} of {calls} calls" for calls, count in sorted(by_length.items()))
    return f"{len(facts.tasks)} different tasks of {facts.proposed} proposals" + (
        f": {parts}." if parts else "."
    )


def text(name: str, facts: Facts, found: Sequence[Finding]) -> str:
    """Returns the check for a terminal, without characters of the tools' that it would obey."""
    names = {tool: line(tool) for tool in facts.tools}
    width = max(map(len, names.values()))
    rows = [
        f"  {names[tool]:{width}}  {f.calls:5d} calls  {f.succeeded:5d} worked  {f.changed:5d} changed the "
        f"state  {len(f.answers):4d} different answers"
        for tool, f in facts.tools.items()
    ]
    listed = "\n".join(f"  {'STOP' if f.stops else 'note'}  {line(str(f))}" for f in found) or "  none"
    worlds = ", ".join(f"{split} {n}" for split, n in facts.worlds.items() if isinstance(n, int))
    many = f" (of the first {READ} of `scenarios`)" if facts.named else ""
    return (
        f"{name}: is it fit to train on? {verdict(found)}\n\n"
        f"Findings\n{listed}\n\nTools\n" + "\n".join(rows) + f"\n\n"
        f"Worlds that begin differently{many}: {worlds or 'none'}. {facts.speed:.0f} worlds a second.\n"
        f"{lengths(facts)}\n"
        f"A prompt has {facts.tokens} tokens ({facts.tokenizer}).\n"
    )


def write(path: Path, name: str, facts: Facts, found: Sequence[Finding], provenance: str) -> None:
    """Writes the page. Its values are escaped, and its content security policy lets no script run."""
    own = importlib.resources.files("coevolve_jax.toolcheck")
    shared = importlib.resources.files("coevolve_jax.analysis") / "viewer" / "style.css"
    style = shared.read_text(encoding="utf-8") + (own / "page.css").read_text(encoding="utf-8")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    worlds = [n for n in facts.worlds.values() if isinstance(n, int)]
    cards = [
        (
            "Tools",
            len(facts.tools),
            f"{sum(f.succeeded > 0 for f in facts.tools.values())} of them worked, "
            f"{_share(facts)} of their calls",
        ),
        ("Worlds", max(worlds, default=0), f"that begin differently in a split; {facts.speed:.0f} a second"),
        ("Tasks", len(facts.tasks), f"different ones of {facts.proposed} proposals"),
        ("Prompt", f"{facts.tokens:,}", f"tokens, by {facts.tokenizer}"),
    ]
    page = environment.from_string((own / "page.html.j2").read_text(encoding="utf-8")).render(
        name=name,
        verdict=f"{name}: {verdict(found)}",
        cards=cards,
        provenance=provenance,
        found=found,
        tools=facts.tools,
        tasks=facts.tasks[:SHOWN],
        lengths=lengths(facts),
        prompt=facts.prompt,
        said=said,
        style=Markup(style),
        style_hash=base64.b64encode(hashlib.sha256(f"\n{style}\n".encode()).digest()).decode(),
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8", errors="replace")


def _share(facts: Facts) -> str:
    calls = sum(f.calls for f in facts.tools.values())
    return f"{sum(f.succeeded for f in facts.tools.values()) / max(calls, 1):.0%}"


def _plural(word: str, count: int) -> str:
    return word if count == 1 else f"{word}s"
