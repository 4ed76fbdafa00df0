"""The page's data on a campaign, as JSON values: a function of the files of its folder and of its runs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from coevolve_jax.analysis.run_view import call_text
from coevolve_jax.diagnosis.trends import MEANINGS
from coevolve_jax.harness.campaign import PARTS, START, Campaign, Tampered
from coevolve_jax.harness.records import Expectation, Skill, Verdict
from coevolve_jax.records import rollouts
from coevolve_jax.types import Group, Trajectory

DUE = {  # part -> what is due
    "proposal": "is being proposed",
    "backtest": "is tried on its parent's rollouts",
    "evidence": "is due for training",
    "verdict": "is due for its verdict",
    "learned": "has its verdict",
}
CHECKS = {  # check or forecast of a backtest -> meaning
    "order": "pairs in a group whose failure is worth as much as the success",
    "order_tiers": "pairs of failures in a group in which less progress is worth more",
    "sign_success": "successes of mixed groups with an advantage below 0",
    "sign_failure": "failures of mixed groups with an advantage above 0",
    "nothing": "largest change of an advantage",
    "live_groups": "groups that are learned from, over the parent's",
    "live_tokens": "tokens that are learned from, over the parent's",
    "paid_share": "share of the advantages that groups without a success have",
    "paid_length": "correlation of length and advantage in these groups",
    "cut": "successes that lower limits would have ended",
    "group_size": "expected rollouts in mixed groups, over the parent's",
    "draws": "groups with a spread in replayed draws, over the parent's",
    "drift": "forecast divergence from the start, in nats",
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
    """Returns the page's data, and the transcripts, which the data names by their place.

    Raises Tampered where a part of a version is no JSON.
    """
    ids = campaign.versions()
    parts = {v: {part: campaign.read(v, part) or {} for part in PARTS} for v in ids}
    due, selected, versions = campaign.next(), campaign.selected(), []
    transcripts: list[dict] = []
    evaluated: dict[str, dict[str, Group]] = {}
    settings: dict[str, Mapping[str, Any]] = {}  # version -> its changes and its ancestors'
    for version, told in parts.items():
        parent = told["proposal"].get("parent")
        parent = parent if parent in settings else None  # an earlier version
        changes, base = told["proposal"].get("changes") or {}, settings.get(str(parent), {})
        settings[version] = {**base, **changes}
        config = campaign.plan()["config"]
        found = {
            "id": version,
            "parent": parent,
            "due": DUE[due[1]] if due and due[0] == version else None,
            "changes": [[key, base.get(key, _at(config, key)), now] for key, now in changes.items()],
            **_told(told, parts[parent]["evidence"].get("row", {}) if parent else {}),
        }
        runs = _workdirs(campaign.folder, told["evidence"])
        evaluated[version] = _evaluated(next(iter(runs.values()), None))
        read = _transcripts(evaluated[version], evaluated.get(str(parent), {}))
        rejected = _rejected(told["evidence"].get("audit") or {}, runs)
        for kind, rows in (("transcripts", read), ("rejected", rejected)):
            found[kind] = [
                {
                    "row": len(transcripts) + n,
                    "title": row["task_id"],
                    "solved": row["outcome"]["success"],
                    "note": row["note"],
                }
                for n, row in enumerate(rows)
            ]
            transcripts += rows
        versions.append({**found, "seconds": _seconds(runs)})
    path, at = [], selected
    while at:
        path.append(at)
        at = next((v["parent"] for v in versions if v["id"] == at), None)
    last = lambda key: next((x for v in reversed(ids) if (x := parts[v]["learned"].get(key))), [])
    freeze, final = _freeze(campaign), _final(campaign.folder / "final")
    view = {
        "kind": "campaign",
        "name": campaign.folder.absolute().name,
        "headline": headline(campaign.plan(), versions, due, selected, freeze, final),
        "selected": selected,
        "path": path,
        "versions": versions,
        "diagnostics": last("diagnostics"),
        "skills": [{**s, "trust": Skill.from_json(s).trust} for s in last("skills")],
        "freeze": freeze,
        "final": final,
        "trajectories": {},
    }
    return view, transcripts


def headline(
    plan: Mapping[str, Any],
    versions: Sequence[Mapping],
    due: tuple[str, str] | None,
    selected: str,
    freeze: Mapping[str, Any],
    final: Mapping[str, Any] | None,
) -> dict:
    """Returns a sentence, facts, and cards (title, value, note)."""
    settings, told = plan["config"]["harness"], plan.get("told") or {}
    kinds = Counter(v["kind"] for v in versions if v["id"] != START)
    tried, promoted = kinds.total(), kinds["promoted"]
    scores = {v["id"]: v["success"] for v in versions if v["success"] is not None}
    are = "version of the training harness was" if tried == 1 else "versions of the training harness were"
    lead = f"{tried} {are} tried and {promoted} promoted; "
    lead += f"the start, {START}, stays selected" if selected == START else f"{selected} is selected"
    if selected in scores and selected != START:
        lead += (
            f", with {scores[selected]:.1%} success on the selection set ({scores[START]:.1%} at the start)"
        )
    lead += ". Its score was selected, so it is too high and is not the claim."
    if due:
        lead = f"The campaign is not finished: {due[0]} {DUE[due[1]]}. So far, {lead}"
    score = "—" if selected not in scores else f"{scores[selected]:.1%}"
    gain = final and final["gains"][-1]["value"]
    claim = ("—", "known after --final, which reads the test once on fresh seeds")
    if final and gain is None:
        claim = ("—", "the test has been opened; its reading is not finished")
    elif final:
        row = final["gains"][-1]
        span = (
            f"95% interval {100 * row['low']:+.1f} to {100 * row['high']:+.1f}, "
            if row["low"] is not None
            else ""
        )
        claim = (f"{100 * gain:+.1f} points", f"{span}{row['seeds']} fresh seeds, test tasks, over the start")
    facts = [
        f"proposer {settings['proposer']}",
        f"seeds {', '.join(map(str, settings['seeds']))}",
        f"noise of a run {100 * settings['noise']:.1f} points",
        *(f"{name}: {told[name]}" for name in ("date", "machine", "commit", "command") if told.get(name)),
    ]
    cards = [
        ("Versions", f"{tried} tried", _counted(kinds, settings["versions"])),
        ("Selected", selected, f"{score} on the selection set: selected, not claimed"),
        ("Claim", *claim),
        ("Files", freeze["state"], freeze["sentence"]),
    ]
    return {"lead": lead, "facts": " · ".join(facts), "cards": cards}


def _counted(kinds: Mapping[str, int], most: int) -> str:
    return ", ".join([*(f"{n} {kind}" for kind, n in kinds.items()), f"{most} to be trained"])


def _told(parts: Mapping[str, Mapping], before: Mapping[str, float | None]) -> dict:
    """Returns a version's proposal, backtest, row, cost and verdict. before: its parent's row."""
    proposal, tested, evidence = (parts[part] for part in ("proposal", "backtest", "evidence"))
    row, aim = evidence.get("row", {}), proposal.get("expects")
    judged = Verdict.from_json(parts["verdict"]) if parts["verdict"] else None
    decided = judged and judged.decided
    if aim:
        was, now = before.get(aim["diagnostic"]), row.get(aim["diagnostic"])
        held = Expectation(**aim).holds(was, now) if row else None
        aim = {**aim, "before": was, "after": now, "held": held, "meaning": _meaning(aim["diagnostic"])}
    checks = {
        name: c if isinstance(c, Mapping) else dict(zip(("value", "bound", "ok"), c))
        for name, c in (tested.get("checks") or {}).items()
    }
    came = evidence.get("came") or {}
    return {
        **{key: proposal.get(key, "") for key in ("lever", "move", "because", "proposer", "skill")},
        "evidence": [[n, x, _meaning(n)] for n, x in (proposal.get("evidence") or {}).items()],
        "expects": aim,
        "checks": [{"name": name, "meaning": CHECKS.get(name, ""), **c} for name, c in checks.items()],
        "forecast": [
            [name, x, came.get(name), CHECKS.get(name, "")]
            for name, x in (tested.get("forecast") or {}).items()
        ],
        "notes": [*(tested.get("notes") or ())],
        "not_covered": [*(tested.get("not_covered") or ())],
        "row": _row(before, row, (aim or {}).get("diagnostic")),
        "rollouts": {
            seed: sum(n for key, n in costs.items() if key.startswith("rollouts/"))
            for seed, costs in (evidence.get("costs") or {}).items()
        },
        "kind": judged.kind if judged else "under way",
        "rules": parts["verdict"].get("rules", []),
        "decided": decided and decided.name,
        "sentence": decided and decided.sentence,
        "refused_higher": bool(judged and judged.higher_and_refused),
        **{key: getattr(judged, key, None) for key in ("success", "difference", "se", "by_seed")},
    }


def _row(
    before: Mapping[str, float | None], after: Mapping[str, float | None], target: str | None
) -> list[dict]:
    """The values of parent and child: over all steps, the first quarter, and the last.

    target: the value that the hypothesis names; "target" is its place among the three, or None.
    """
    found = {}
    for name in dict.fromkeys([*MEANINGS, *before, *after]):
        base, ending = name, 0
        for place, end in enumerate(("_first", "_last"), 1):
            if name.endswith(end) and name.removesuffix(end) in MEANINGS:
                base, ending = name.removesuffix(end), place
        values = before.get(name), after.get(name)
        setting = MEANINGS.get(name, "").startswith("config.")
        if values == (None, None) or (setting and values[0] == values[1]):
            continue
        row = found.setdefault(base, {"name": base, "meaning": _meaning(base), "target": None})
        row.setdefault("values", [None] * 3)[ending] = values
        if name == target:
            row["target"] = ending
    return list(found.values())


def _meaning(name: str) -> str:
    return MEANINGS.get(name, "a diagnostic of the registry")


def _freeze(campaign: Campaign) -> dict[str, str]:
    if not (campaign.folder / "events.jsonl").exists():
        return {"state": "not frozen yet", "sentence": "frozen before the first version is trained"}
    try:
        campaign.check()
    except Tampered as error:
        return {"state": "changed", "sentence": str(error)}
    except ValueError as error:
        return {"state": "changed", "sentence": f"events.jsonl is not JSON ({error})."}
    return {
        "state": "intact",
        "sentence": f"{len(campaign.events())} events; code, starts and verdicts are as they were written",
    }


def _final(folder: Path) -> dict | None:
    """Returns the reading of the test; None where the test was not opened. A gain may be None: not read yet."""
    opened = [json.loads(path.read_text()) for path in sorted(folder.glob("opened*.json"))]
    if not opened:
        return None
    path = folder / "final.json"
    result = json.loads(path.read_text()) if path.exists() else {}
    gains = result.get("gain", {})
    empty = dict.fromkeys(("value", "low", "high", "seeds"))
    return {
        "opened": opened,
        "gains": [
            {"label": name, "meaning": says, **(gains.get(name) or empty)} for name, says in GAINS.items()
        ],
        "parts": [[name, result.get(name)] for name in ("luck_of_seeds", "luck_of_tasks", "optimism")],
        "transfer": [{"label": name, **row} for name, row in result.get("transfer", {}).items()],
    }


def _at(config: Mapping[str, Any], key: str) -> Any:
    for part in key.split("."):
        config = config.get(part, {})
    return None if config == {} else config


# ---- What is read from the runs of a version ---------------------------------------------------------


def _workdirs(folder: Path, evidence: Mapping) -> dict[str, Path]:
    """seed -> workdir. The links to the starts say where the store is."""
    starts = [link.resolve() for link in (folder / "starts").glob("seed_*") if link.exists()]
    store = starts[0].parents[2] if starts else folder / "store"
    return {seed: store / name for seed, name in (evidence.get("runs") or {}).items()}


def _seconds(runs: Mapping[str, Path]) -> dict[str, float]:
    """seed -> seconds of its run, where its summary has them."""
    summaries = {seed: run / "summary.json" for seed, run in runs.items()}
    told = {seed: json.loads(path.read_text()) for seed, path in summaries.items() if path.exists()}
    return {seed: sum(found["seconds"].values()) for seed, found in told.items() if "seconds" in found}


def _evaluated(run: Path | None) -> dict[str, Group]:
    """task id -> its rollouts in the evaluation that selects; {} where they are not on disk."""
    steps = rollouts.steps(run, rollouts.EVALUATIONS) if run else []
    if not run or not steps:
        return {}
    sets = rollouts.read_evaluation(run, steps[-1])
    return {group.task.id: group for group in sets.get("balanced", sets.get("iid", []))}


def _transcripts(own: Mapping[str, Group], parents: Mapping[str, Group]) -> list[dict]:
    """Two successes and two failures, of tasks in which the parent did otherwise where there are such."""
    share = lambda g: sum(t.outcome.success for t in g.valid) / max(len(g.valid), 1)
    theirs = {id: share(parents[id]) if id in parents else 0.5 for id in own}
    found = []
    for success in (True, False):
        rows = {id: next((t for t in g.valid if t.outcome.success == success), None) for id, g in own.items()}
        for id in sorted(rows, key=lambda id: theirs[id], reverse=not success):
            if (trajectory := rows[id]) and len(found) < (2 if success else 4):
                note = (
                    f"its parent solved {theirs[id]:.0%} of its rollouts of this task"
                    if id in parents
                    else ""
                )
                found.append(_transcript(own[id], trajectory, note))
    return found


def _rejected(audit: Mapping, runs: Mapping[str, Path]) -> list[dict]:
    """Up to two successes that the audit rejected: {"rejected": [{"seed", "task", "rollout", "why"}]}."""
    found = []
    for told in audit.get("rejected", [])[:2]:
        group = _evaluated(runs.get(str(told["seed"]))).get(told["task"])
        each = group.trajectories if group else ()
        found += [
            _transcript(group, t, told.get("why", "")) for t in each if t.rollout_index == told["rollout"]
        ]
    return found


def _transcript(group: Group, trajectory: Trajectory, note: str) -> dict:
    """A row for the viewer's reader."""
    turns = group.task.turns
    return {
        **trajectory.to_json(),
        "note": note,
        "queries": [turn.query for turn in turns],
        "turns": [{"calls": [call_text(call.to_json()) for call in turn.calls]} for turn in turns],
    }
