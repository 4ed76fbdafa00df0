"""The page's data on a campaign, as JSON values: a function of the files of its folder and of its runs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from coevolve_jax.analysis.campaign_runs import (
    evaluated,
    rejected,
    seconds,
    seconds_of_steps,
    transcripts,
)
from coevolve_jax.diagnosis.trends import MEANINGS, value_at
from coevolve_jax.harness import progress
from coevolve_jax.harness.campaign import PARTS, START, Campaign, Tampered, was_read
from coevolve_jax.harness.records import RULES, Expectation, Skill, Verdict
from coevolve_jax.harness.smoke import FIRST
from coevolve_jax.records.costs import ROLLOUTS, total

DUE = {  # part -> what is due
    "proposal": "is being proposed",
    "backtest": "is tried on its parent's rollouts",
    "smoke": "is due for its first steps",
    "evidence": "is due for training",
    "verdict": "is due for its verdict",
    "learned": "has its verdict",
}
TRAINS = "is being trained"
CHECKS = {  # check or forecast of a backtest -> meaning
    "order": "pairs in a group whose failure is worth as much as the success",
    "order_tiers": "pairs of failures in a group in which less progress is worth more",
    "sign_success": "successes of mixed groups with an advantage below 0",
    "sign_failure": "failures of mixed groups with an advantage above 0",
    "nothing": "largest change of an advantage, which matters where the samples are the same",
    "live_groups": "groups that are learned from, over the parent's",
    "live_tokens": "tokens that are learned from, over the parent's",
    "paid_share": "share of the advantages that groups without a success have",
    "paid_length": "correlation of length and advantage in these groups",
    "cut": "successes that the new limits would have ended",
    "group_size": "expected rollouts in mixed groups, over the parent's",
    "draws": "groups with a spread in replayed draws, over the parent's",
    "finite": "whether the gradient is finite",
    "cos": "cosine of the parent's and the child's gradient",
    "kl_share": "share of the KL term in the gradient",
    "margin": "cosine of the update with raising successes over failures",
    "live": "share of groups that are learned from",
    "tokens": "policy tokens that are learned from, per step",
    "revived": "groups learned from that the parent would leave out, per step",
}
GAINS = {  # gain of final.json -> meaning
    "SD": "the campaign's own seeds, selection set: what selection saw",
    "FD": "fresh seeds, selection set",
    "ST": "the campaign's own seeds, test tasks",
    "FT": "fresh seeds, test tasks: the claim",
}


def campaign_view(campaign: Campaign) -> tuple[dict, list[dict]]:
    """Returns the page's data and the transcripts, whose places the data names.

    Raises Tampered where a part of a version is no JSON, and ValueError where a run's file is damaged.
    """
    plan, due, selected = campaign.plan(), campaign.next(), campaign.selected()
    training = progress.training(campaign)
    parts = {v: {part: campaign.read(v, part) or {} for part in PARTS} for v in campaign.versions()}
    versions, told, read = [], [], {}
    changed: dict[str, dict[str, Any]] = {}  # version -> changes, its ancestors' among them
    for version, own in parts.items():
        parent = own["proposal"].get("parent")
        parent = parent if parent in changed else None  # an earlier version
        changes, before = own["proposal"].get("changes") or {}, changed.get(str(parent), {})
        changed[version] = {**before, **changes}
        begun = {str(seed): run for seed, run in campaign.runs(version).items()}
        runs = begun if own["evidence"].get("row") else {}
        read[version] = evaluated(next(iter(runs.values()), None))
        texts = {
            "transcripts": transcripts(read[version], read.get(parent, {})),
            "rejected": rejected(own["evidence"].get("audit") or {}, runs),
        }
        places = {}
        for name, rows in texts.items():
            places[name] = [*range(len(told), len(told) + len(rows))]
            told += rows
        versions.append(
            {
                "id": version,
                "parent": parent,
                "due": (TRAINS if training else DUE[due[1]]) if due and due[0] == version else None,
                "changes": [[k, before.get(k, value_at(plan["config"], k)), v] for k, v in changes.items()],
                **_version(own, parts[parent]["evidence"].get("row", {}) if parent else {}),
                "seconds": seconds(runs) if runs else _seconds(own["smoke"], own["evidence"], begun),
                **places,
            }
        )
    last = lambda key: next((x for own in reversed(parts.values()) if (x := own["learned"].get(key))), [])
    freeze, final = _freeze(campaign), _final(campaign)
    view = {
        "kind": "campaign",
        "name": campaign.folder.absolute().name,
        "headline": headline(plan, versions, due, selected, freeze, final, training),
        "training": training and _training(training),
        "selected": selected,
        "path": _path(versions, selected),
        "versions": versions,
        "diagnostics": last("diagnostics"),
        "skills": [{**s, "trust": Skill.from_json(s).trust} for s in last("skills")],
        "freeze": freeze,
        "final": final,
        "transcripts": [[row["task_id"], row["outcome"]["success"], row["note"]] for row in told],
        "trajectories": {},
    }
    return view, told


def _training(t: progress.Training) -> dict:
    """The runs under way, by seed, and what is said of them."""
    done = {str(seed): steps for seed, steps in t.done.items()}
    return {"version": t.version, "done": done, "steps": t.steps, "text": progress.sentence(t)}


def headline(
    plan: Mapping[str, Any],
    versions: Sequence[Mapping],
    due: tuple[str, str] | None,
    selected: str,
    freeze: Mapping[str, str],
    final: Mapping[str, Any] | None,
    training: progress.Training | None = None,
) -> dict:
    """Returns a sentence, facts, and cards (title, value, note)."""
    settings, told = plan["config"]["harness"], plan.get("told") or {}
    kinds = Counter(v["kind"] for v in versions if v["id"] != START and v["kind"] != "under way")
    scores = {v["id"]: f"{v['success']:.1%}" for v in versions if v["success"] is not None}
    tried = kinds.total()
    are = "version of the training harness was" if tried == 1 else "versions of the training harness were"
    lead = f"{tried} {are} tried and {kinds['promoted']} promoted; "
    if selected == START:
        lead += f"the start, {START}, stays selected."
    else:
        lead += f"{selected} is selected, with {scores[selected]} success on the selection set "
        lead += f"({scores[START]} at the start)."
    lead += " That score was selected, so it is too high and is not the claim."
    if training:
        lead = f"The campaign is not finished. {progress.sentence(training)} Before, {lead}"
    elif due:
        lead = f"The campaign is not finished: {due[0]} {DUE[due[1]]}. So far, {lead}"
    facts = [
        f"proposer {settings['proposer']}",
        f"seeds {', '.join(map(str, settings['seeds']))}",
        f"noise of a run {100 * settings['noise']:.1f} points",
        *_off(versions),
        *(f"{name}: {told[name]}" for name in ("date", "machine", "commit", "command") if told.get(name)),
    ]
    counts = [f"{n} {kind}" for kind, n in kinds.items()]
    cards = [
        ("Versions", f"{tried} tried", ", ".join([*counts, f"{settings['versions']} to be trained at most"])),
        ("Selected", selected, f"{scores.get(selected, '—')} on the selection set: selected, not claimed"),
        ("Claim", *_claim(final)),
        ("Files", freeze["state"], freeze["sentence"]),
    ]
    return {"lead": lead, "facts": " · ".join(facts), "cards": cards}


def _off(versions: Sequence[Mapping]) -> list[str]:
    """Says which rules no verdict has: the proposer's module or a setting has left them out."""
    told = [{rule["name"] for rule in v["rules"]} for v in versions]
    judged = [names for names in told if "score" in names]
    off = [rule for rule in RULES if not any(rule in names for names in judged)]
    return [f"rules that are off: {', '.join(off)}"] if judged and off else []


def _claim(final: Mapping[str, Any] | None) -> tuple[str, str]:
    """The gain on fresh seeds and test tasks, and what it is."""
    if final is None:
        return "—", "known after --final, which reads the test once on fresh seeds"
    row = final["gains"][-1]
    if row["value"] is None:
        return "—", "the test has been opened; its reading goes on"
    low, high = row["low"], row["high"]
    span = "no interval" if low is None else f"95% interval {100 * low:+.1f} to {100 * high:+.1f}"
    return (
        f"{100 * row['value']:+.1f} points",
        f"over the start; {span}; {row['seeds']} fresh seeds, test tasks",
    )


def _version(own: Mapping[str, Mapping], before: Mapping[str, float | None]) -> dict:
    """A version's proposal, backtest, row, rollouts and verdict. before: its parent's row."""
    proposal, tested, first, evidence = (own[p] for p in ("proposal", "backtest", "smoke", "evidence"))
    row, aim, came = evidence.get("row", {}), proposal.get("expects"), evidence.get("came", {})
    judged = Verdict.from_json(own["verdict"]) if own["verdict"] else None
    decided = judged and judged.decided
    if aim:
        was, now = (values.get(aim["diagnostic"]) for values in (before, row))
        held = Expectation(**aim).holds(was, now) if row else None
        aim = {**aim, "before": was, "after": now, "held": held, "meaning": _meaning(aim["diagnostic"])}
    return {
        **{key: proposal.get(key, "") for key in ("lever", "because", "proposer", "skill")},
        "evidence": [[name, x, _meaning(name)] for name, x in proposal.get("evidence", {}).items()],
        "expects": aim,
        "checks": [[name, *c, CHECKS.get(name, "")] for name, c in tested.get("checks", {}).items()],
        "forecast": [[k, x, came.get(k), CHECKS.get(k, "")] for k, x in tested.get("forecast", {}).items()],
        "notes": tested.get("notes", []),
        "not_covered": tested.get("not_covered", []),
        "row": _row(before, row, aim["diagnostic"] if aim else None) if row else [],
        "rollouts": _rollouts(first, evidence),
        "smoke": {key: first[key] for key in ("live", "parent", "failed") if key in first},
        "watched": [[id, found] for id, found in evidence.get("diagnostics", {}).items()],
        "kind": judged.kind if judged else "under way",
        "rules": own["verdict"].get("rules", []),
        "decided": decided and decided.name,
        "sentence": decided and decided.sentence,
        "refused_higher": bool(judged and judged.higher_and_refused),
        **{key: getattr(judged, key, None) for key in ("success", "difference", "se", "by_seed")},
    }


def _rollouts(first: Mapping[str, Any], evidence: Mapping[str, Any]) -> dict[str, int]:
    """Training rollouts by seed: the ledgers of finished runs, else what was counted when a run ended early.

    A version that is trained in full goes on from its first steps, so these stand in the ledger.
    """
    finished = {seed: total(costs, ROLLOUTS) for seed, costs in evidence.get("costs", {}).items()}
    return finished or evidence.get("rollouts") or first.get("rollouts") or {}


def _seconds(
    first: Mapping[str, Any], evidence: Mapping[str, Any], runs: Mapping[str, Path]
) -> dict[str, float]:
    """Seconds of the steps of runs whose rollouts were counted when they ended early."""
    counted = {seed: runs[seed] for seed in _rollouts(first, evidence) if seed in runs}
    return seconds_of_steps(counted, None if evidence.get("rollouts") else FIRST)


def _row(
    before: Mapping[str, float | None], after: Mapping[str, float | None], target: str | None
) -> list[dict]:
    """The values of parent and child: over all steps, over the first quarter, and over the last.

    target: the value that the hypothesis names. "target" in a row is its place among the three, or None.
    """
    found: dict[str, dict] = {}
    for name in dict.fromkeys([*MEANINGS, *before, *after]):
        values = before.get(name), after.get(name)
        setting = _meaning(name).startswith("config.")
        if values == (None, None) or (setting and values[0] == values[1]):
            continue
        base, place = name, 0
        for at, end in enumerate(("_first", "_last"), 1):
            if name.endswith(end) and name.removesuffix(end) in MEANINGS:
                base, place = name.removesuffix(end), at
        empty = {"name": base, "meaning": _meaning(base), "values": [None] * 3, "target": None}
        row = found.setdefault(base, empty)
        row["values"][place] = values
        if name == target:
            row["target"] = place
    return list(found.values())


def _meaning(name: str) -> str:
    return MEANINGS.get(name, "a diagnostic of the registry")


def _path(versions: Sequence[Mapping], selected: str) -> list[str]:
    """The selected version and its ancestors."""
    parents = {v["id"]: v["parent"] for v in versions}
    found = [selected]
    while parent := parents.get(found[-1]):
        found.append(parent)
    return found


def _freeze(campaign: Campaign) -> dict[str, str]:
    """Whether files and code are as they were written."""
    if not (campaign.folder / "events.jsonl").exists():
        if campaign.versions():
            return {"state": "changed", "sentence": "events.jsonl is gone: nothing shows what was written."}
        return {"state": "not frozen yet", "sentence": "frozen before the first version is trained"}
    try:
        campaign.check()
    except Tampered as error:
        return {"state": "changed", "sentence": str(error)}
    told = f"{len(campaign.events())} events: code, starts and all that versions wrote are as they were"
    return {"state": "intact", "sentence": told}


def _final(campaign: Campaign) -> dict | None:
    """The reading of the test; None where the test was not opened. Gains are None until it is finished.

    While it is read once more, final.json is that of an earlier opening and claims nothing.
    """
    folder = campaign.folder / "final"
    opened = [json.loads(path.read_text()) for path in sorted(folder.glob("opened*.json"))]
    if not opened:
        return None
    path = folder / "final.json"
    result = json.loads(path.read_text()) if path.exists() and _read(campaign) else {}
    gains, none = result.get("gain", {}), dict.fromkeys(("value", "low", "high", "seeds"))
    return {
        "opened": opened,
        "gains": [{"label": k, "meaning": told, **gains.get(k, none)} for k, told in GAINS.items()],
        "parts": [[name, result.get(name)] for name in ("luck_of_seeds", "luck_of_tasks", "optimism")],
        "transfer": _labelled(result.get("transfer", {})),
        "over": [
            {"name": name, "given": result["given"][name], "transfer": _labelled(found["transfer"])}
            for name, found in result.get("over", {}).items()
        ],
        "openings": result.get("openings"),
        "lost": result.get("lost", {}),
        "engines": result.get("engines", ""),
    }


def _labelled(rows: Mapping[str, Mapping]) -> list[dict]:
    return [{"label": name, **row} for name, row in rows.items()]


def _read(campaign: Campaign) -> bool:
    """Whether the events say that the last opening of the test was read."""
    try:
        return was_read(campaign.events())
    except Tampered:  # `_freeze` tells why
        return False
