// A campaign: what scored higher and was refused, its versions, the registry, skills, budget and test.

const [GOOD, BAD, NONE, ODD, NOW] = ["--rare", "--forgetting", "--initial", "--random", "--boundary"];
const HUES = { start: NONE, promoted: GOOD, rejected: "--other", invalid: BAD, refused: ODD, failed: "--evaluation" };
Object.assign(HUES, { "under way": NOW, gating: GOOD, registered: NOW, tracked: NONE, retired: "--other" });
const TREE_STEP = 16; // pixels to the right for each generation
const PARTS = { luck_of_seeds: "SD − FD", luck_of_tasks: "FD − FT", optimism: "SD − FT" };
const PROTOCOLS = {
  P1: "as the campaign evaluates",
  P2: "greedy",
  P3: "temperature 0.7",
  P4: "the third of the tasks with the most calls",
  P5: "observations of 80 characters",
};

const hued = (word) => {
  const node = h("span", { class: "badge" }, word);
  node.style.setProperty("--hue", `var(${HUES[word] ?? NONE})`);
  return node;
};
const svg = (tag, attributes, ...children) => {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
};

// A value beside the bound that decided: a line for the bound, a dot for the value, rings for values to compare with.
//   others: [name, value]. lines: [name, value], of which the last is the bound.
const BOUND_LINE = { width: 420, height: 46, edge: 70 };
const boundLine = (value, lines, ok, { format = plain, others = [] } = {}) => {
  const known = [["", value], ...lines, ...others].filter(([, x]) => typeof x === "number");
  const [low, high] = [Math.min(...known.map(([, x]) => x)), Math.max(...known.map(([, x]) => x))];
  const at = (x) => BOUND_LINE.edge + ((x - low) / (high - low || 1)) * (BOUND_LINE.width - 2 * BOUND_LINE.edge);
  const text = (x, y, words) => svg("text", { x, y, "text-anchor": "middle" }, words);
  const told = known.map(([name, x]) => `${name || "value"} ${format(x)}`).join(", ");
  const dot = svg("circle", { cx: at(value), cy: 24, r: 5, class: ok ? "held" : "missed" });
  return svg(
    "svg",
    { class: "bound-line", viewBox: `0 0 ${BOUND_LINE.width} ${BOUND_LINE.height}`, role: "img", "aria-label": told },
    svg("title", {}, told),
    svg("path", { class: "axis", d: `M${BOUND_LINE.edge / 2} 24H${BOUND_LINE.width - BOUND_LINE.edge / 2}` }),
    ...lines.flatMap(([name, x]) => [
      svg("path", { class: "bound", d: `M${at(x)} 14V34` }),
      text(at(x), 10, `${name} ${format(x)}`),
    ]),
    ...others.map(([, x]) => svg("circle", { cx: at(x), cy: 24, r: 3.5, class: "other" })),
    dot,
    text(at(value), 45, format(value)),
  );
};

const setting = (x) => (x === null ? "none" : typeof x === "object" ? JSON.stringify(x) : String(x));
const shown = (x) => (typeof x === "number" ? plain(x) : setting(x));
const changesOf = (v) => v.changes.map(([key, was, now]) => `${key}: ${setting(was)} → ${setting(now)}`);
const diffOf = (v) => changesOf(v).join("; ") || v.because;
const versionLink = (id) => link({ version: id }, id);
const listed = (ids) => (ids.length ? ids.map((id, k) => [k ? " " : "", versionLink(id)]) : "—");
const wide = (...content) => h("span", { class: "meaning" }, content);
const tick = (ok) => h("span", { class: ok ? "held" : "ended" }, ok ? "✓ " : "✗ ");
const sum = (values) => (values.length ? values.reduce((a, b) => a + b, 0) : null);
const part = (title, ...content) => h("section", { class: "group" }, h("h2", {}, title), content);
const note = (...text) => h("p", { class: "note" }, text);
const soft = (text) => h("span", { class: "soft" }, text);
const missing = (text) => h("p", { class: "missing" }, text);

// ---- The tree -------------------------------------------------------------------------------------------

// [{v, depth}], children below their parent.
const inTree = (versions, parent = null, depth = 0) =>
  versions.filter((v) => v.parent === parent).flatMap((v) => [{ v, depth }, ...inTree(versions, v.id, depth + 1)]);

const treeOf = (view, rows) => {
  const size = matchMedia("(max-width: 820px)").matches ? 54 : 36; // of a row, in pixels
  const at = new Map(rows.map(({ v, depth }, k) => [v.id, [depth * TREE_STEP + 10, (k + 0.5) * size]]));
  const promoted = (v) => view.path.includes(v.id);
  const edges = rows
    .filter(({ v }) => v.parent)
    .sort((a, b) => promoted(a.v) - promoted(b.v)) // the thick ones on top
    .map(({ v }) => {
      const [[x, y], [px, py]] = [at.get(v.id), at.get(v.parent)];
      return svg("path", { class: promoted(v) ? "promoted" : "", d: `M${px} ${py}V${y}H${x}` });
    });
  const dots = rows.map(({ v }) => {
    const [cx, cy] = at.get(v.id);
    const dot = svg("circle", { cx, cy, r: v.id === view.selected ? 7 : 5 });
    dot.style.fill = `var(${HUES[v.kind] ?? NONE})`;
    return dot;
  });
  const width = Math.max(...rows.map((r) => r.depth), 0) * TREE_STEP + 20;
  const height = rows.length * size;
  const lines = rows.map(({ v, depth }) => {
    const over = v.difference !== null && points(v.difference);
    const line = h(
      "a",
      { class: "version", href: address({ version: v.id }), "data-version": v.id },
      h("b", {}, v.id),
      hued(v.kind),
      h("span", { class: "diff" }, diffOf(v)),
      v.success !== null && h("span", { class: "right" }, percent(v.success, 1), over && ` (${over})`),
    );
    line.style.paddingLeft = `${depth * TREE_STEP + 26}px`;
    line.style.height = `${size}px`;
    return line;
  });
  return h("div", { class: "tree" }, svg("svg", { width, height, "aria-hidden": "true" }, ...edges, ...dots), lines);
};

// ---- One version ----------------------------------------------------------------------------------------

const transcript = (view, store) => (place) => {
  const [task, solved, told] = view.transcripts[place];
  const outcome = solved ? "success" : "failure";
  const head = [h("span", { class: `outcome ${outcome}` }, outcome), ` ${task} `, soft(told)];
  const node = h("details", { class: "question" }, h("summary", {}, head));
  const read = async () => {
    const row = await store.full(place);
    const why = row.outcome.reason ? `; ${row.outcome.reason}` : "";
    return [note(`stop: ${row.stop}${why}`), ...conversation(row, row)];
  };
  const open = async () => node.append(h("div", { class: "asked" }, await read().catch((error) => error.message)));
  node.addEventListener("toggle", open, { once: true });
  return node;
};

const hypothesis = (v) => {
  const e = v.expects;
  const by = `Proposed by ${v.proposer}${v.skill ? `, which follows the skill ${v.skill}` : ""}.`;
  return [
    h("p", {}, v.because),
    v.lever && note(by, v.evidence.length ? " The parent's values that speak for it:" : ""),
    h(
      "ul",
      {},
      v.evidence.map(([name, value, meaning]) => h("li", {}, h("b", {}, name), ` ${shown(value)} `, soft(meaning))),
    ),
    v.lever && !e && note("It has no hypothesis that could fail."),
    e &&
      h(
        "p",
        { class: "expects" },
        e.held !== null && tick(e.held),
        `Expected: ${e.diagnostic} goes ${e.direction}${e.least ? ` by ${plain(e.least)} at least` : ""}. Measured: `,
        e.held === null ? "nothing yet. " : h("b", {}, `${plain(e.before)} → ${plain(e.after)} `),
        soft(e.meaning),
      ),
  ];
};

const backtest = (v) => [
  v.checks.length > 0 &&
    table(
      ["backtest, before training", "value", "bound", "", ""],
      v.checks.map(([name, value, bound, ok, meaning]) => [name, plain(value), plain(bound), tick(ok), wide(meaning)]),
    ),
  v.forecast.length > 0 &&
    table(
      ["first steps", "forecast", "measured", ""],
      v.forecast.map(([name, forecast, came, meaning]) => [name, plain(forecast), plain(came), wide(meaning)]),
    ),
  v.notes.map((text) => note(text)),
  v.not_covered.length > 0 && note(`No check sees the effect of ${v.not_covered.join(", ")}.`),
];

const rowTable = (v) =>
  table(
    [`in training${v.parent ? `, ${v.parent} → ${v.id}` : ""}`, "all steps", "first quarter", "last quarter", ""],
    v.row.map((r) => [
      r.name,
      ...r.values.map((pair, k) => {
        if (!pair) return "";
        const text = v.parent ? `${plain(pair[0])} → ${plain(pair[1])}` : plain(pair[1]);
        return r.target === k ? h("mark", { title: "the hypothesis names it" }, text) : text;
      }),
      wide(r.meaning),
    ]),
  );

const bounded = (v, r) => {
  if (typeof r.value !== "number" || typeof r.bound !== "number") return null;
  if (r.name !== "score") return boundLine(r.value, [["bound", r.bound]], r.ok);
  return boundLine(r.value, [["bound", r.bound]], r.ok, { format: points, others: Object.entries(v.by_seed ?? {}) });
};
const ruleOf = (v) => (r) =>
  h(
    "li",
    { class: r.name === v.decided ? "deciding" : "" },
    tick(r.ok),
    h("b", {}, r.name),
    ` ${r.sentence}`,
    (r.name === v.decided || r.name === "score") && bounded(v, r),
  );

const watched = (v) =>
  v.watched.length > 0 && [
    h("h4", {}, "Registered diagnostics: parent (ring), this version (dot), and their thresholds"),
    v.watched.map(([id, d]) => {
      const worse = (x, bound) => bound !== null && (d.direction === "up_is_bad" ? x > bound : x < bound);
      const lines = [["warn", d.warn], ["alert", d.alert]].filter(([, x]) => x !== null);
      const others = d.before === null ? [] : [["parent", d.before]];
      const told = d.gating ? " may refuse a promotion" : " refuses nothing yet";
      return h(
        "div",
        { class: "watched" },
        h("b", {}, id),
        soft(told),
        d.unknown?.[1] > 0 && soft(`; no value in ${(100 * d.unknown[1]).toFixed(1)}% of the rollouts`),
        d.after === null ? note("no value") : boundLine(d.after, lines, !worse(d.after, d.alert), { others }),
      );
    }),
  ];

const underWay = (v, { training: t }) =>
  t?.version === v.id && [
    note(t.text),
    Object.entries(t.done).map(([seed, done]) =>
      h("div", { class: "way" }, `seed ${seed} `, h("progress", { max: t.steps, value: done }), ` ${done} of ${t.steps} steps`),
    ),
  ];

const smoke = ({ smoke: s }) =>
  "failed" in s
    ? note(`Its first steps failed: ${s.failed}`)
    : "live" in s && note(`In its first steps ${percent(s.live)} of the groups are learned from; in the parent's ${percent(s.parent)}.`);
const bySeed = (v) =>
  Object.entries(v.by_seed)
    .map(([seed, d]) => `seed ${seed} ${points(d)}`)
    .join(", ");

const versionCard = (v, view, store) =>
  h(
    "article",
    { class: "card", id: "version" },
    h("h3", {}, `${v.id} `, hued(v.kind), v.parent && [" from ", versionLink(v.parent)], v.due && ` ${v.due}`),
    v.sentence && h("p", {}, tick(false), v.sentence),
    changesOf(v).map((text) => h("code", { class: "call" }, text)),
    hypothesis(v),
    backtest(v),
    smoke(v),
    underWay(v, view),
    v.row.length > 0 && rowTable(v),
    v.rules.length > 0 && h("h4", {}, "The rules of its verdict"),
    h("ul", { class: "rules" }, v.rules.map(ruleOf(v))),
    watched(v),
    v.difference !== null &&
      note(`Child − parent on the selection set: ${bySeed(v)} points; standard error ${(100 * v.se).toFixed(1)}.`),
    v.transcripts.length > 0 && h("h4", {}, "Rollouts of the selection set"),
    v.transcripts.map(transcript(view, store)),
  );

// ---- The sections ---------------------------------------------------------------------------------------

const refusedHigher = (v, view, store) =>
  h(
    "li",
    {},
    versionLink(v.id),
    ` scored ${points(v.difference)} points over its parent (${diffOf(v)}) and is ${v.kind}: `,
    h("b", {}, v.sentence),
    v.rejected.length > 0 && note("Successes that the independent verifier rejected:"),
    v.rejected.map(transcript(view, store)),
  );
const refusedBox = (view, store) => {
  const found = view.versions.filter((v) => v.refused_higher);
  const none = "No version so far. A higher score alone promotes none: what its hypothesis names must have moved too.";
  const list = found.map((v) => refusedHigher(v, view, store));
  return part("Scored higher and was refused", found.length ? h("ul", { class: "alerts" }, list) : note(none));
};

const RANKS = ["gating", "registered", "tracked", "retired", "refused"];
const registry = (view) => {
  const [tracked, rest] = [[], []];
  for (const d of view.diagnostics) (d.status === "tracked" ? tracked : rest).push(d);
  const rows = rest.toSorted((a, b) => RANKS.indexOf(a.status) - RANKS.indexOf(b.status));
  const more = h("summary", { class: "note" }, `${tracked.length} values of steps that are tracked and not tested yet`);
  const versionsOf = (test) =>
    Object.entries(test?.by_version ?? {}).map(([id, [auc]]) => h("div", {}, `${id} ${plain(auc)}`));
  return part(
    "Registry of diagnostics",
    note("AUC: how often a failed rollout has the higher value than a solved one of the same task; 0.5 says nothing."),
    note("tau: how a value over the first half of a run foretells the gain of the second, over versions; 0 says nothing."),
    note("The j-th test of a campaign, of AUC or of tau, has the level 0.05 / (j (j + 1))."),
    rows.length
      ? table(
          ["diagnostic", "status", "AUC or tau", "by version", "p", "level", "of", "warn, alert", "born", ""],
          rows.map(({ test, ...d }) => [
            wide(h("b", {}, d.id), ` of a ${d.unit} `, h("code", {}, d.formula)),
            hued(d.status),
            test && "tau" in test ? `tau ${plain(test.tau)}` : plain(test?.auc),
            versionsOf(test),
            pText(test?.p),
            plain(test?.level),
            test && "tau" in test ? `${test.versions} versions` : `${plain(test?.groups)} groups`,
            d.warn === null ? "—" : `${plain(d.warn)}, ${plain(d.alert)}`,
            d.born || d.proposer,
            wide(test?.refused, test?.nominal && " An earlier test used some of these runs, so p is nominal."),
          ]),
        )
      : missing("No diagnostic was tested yet."),
    tracked.length > 0 &&
      h(
        "details",
        { class: "spaced" },
        more,
        table(
          ["value of a step", ""],
          tracked.map((d) => [d.id, wide(h("code", {}, d.formula))]),
        ),
      ),
  );
};

const skillTable = (rows) =>
  table(
    ["skill", "", "move", "held", "failed", "trust", "from"],
    rows.map((s) => [
      s.id,
      wide("when ", h("code", {}, s.trigger)),
      `${s.lever} ${s.move}`,
      listed(s.held),
      listed(s.failed),
      percent(s.trust),
      s.origin,
    ]),
  );
const skillsOf = (view) => {
  const used = (s) => s.held.length + s.failed.length > 0;
  const [followed, others] = [view.skills.filter(used), view.skills.filter((s) => !used(s))];
  const more = h("summary", { class: "note" }, `${others.length} that no version has followed`);
  return part(
    "Skills",
    note("Rules of diagnosis, with the versions that followed them. Trust: (1 + held) / (2 + held + failed)."),
    followed.length ? skillTable(followed) : missing("None was followed yet."),
    others.length > 0 && h("details", { class: "spaced" }, more, skillTable(others)),
  );
};

const budget = (view) => {
  const spent = view.versions.map((v) => [versionLink(v.id), Object.values(v.rollouts), Object.values(v.seconds)]);
  const all = ["all", spent.flatMap((r) => r[1]), spent.flatMap((r) => r[2])];
  return part(
    "Budget",
    note("Rollouts and time of the runs of all seeds. A run that another campaign made is charged all the same."),
    note("Of runs that ended early the time is that of their steps, without evaluations."),
    table(
      ["version", "runs", "rollouts", "time"],
      [...spent, all].map(([name, rollouts, seconds]) => [
        name,
        plain(rollouts.length),
        plain(sum(rollouts)),
        seconds.length ? clock(sum(seconds)) : "—",
      ]),
    ),
  );
};

const frozen = ({ freeze }) =>
  part(
    "What may not change",
    h("p", { class: freeze.state === "changed" ? "ended" : "" }, h("b", {}, freeze.state), `: ${freeze.sentence}`),
    note("Source files, starts and what versions wrote are held against their SHA-256 before each version."),
  );

const gainTable = (head, rows, tested = false) =>
  table(
    [head, "points", "95% interval (t)", "seeds", ...(tested ? ["p (Holm)"] : []), ""],
    rows.map((e) => [
      e.label,
      points(e.value),
      e.low === null ? (e.seeds === 1 ? "one seed: none" : "all seeds alike: none") : `${points(e.low)} to ${points(e.high)}`,
      plain(e.seeds),
      ...(tested ? [typeof e.p_holm === "number" ? e.p_holm.toPrecision(2) : "—"] : []),
      wide(e.meaning),
    ]),
  );
const ways = (rows) => rows.map((e) => ({ ...e, meaning: PROTOCOLS[e.label] }));

const theTest = ({ final }) => {
  if (!final) return null;
  const read = final.gains.filter((e) => e.value !== null);
  const reach = 1.1 * Math.max(0.01, ...read.flatMap((e) => [e.value, e.low, e.high]).map(Math.abs));
  const again = `The test was opened ${final.opened.length} times: from the second time on it is no fresh test.`;
  const says = "Selected harness − start. S, F: the campaign's seeds, fresh ones. D, T: selection set, test tasks.";
  return part(
    "The test, read after the end",
    final.opened.length > 1 && h("p", { class: "ended" }, again),
    !read.length && missing("The test was opened; its reading goes on."),
    read.length > 0 && [
      note(`${says} Only FT is claimed.`),
      note(`Openings of this test by the campaigns of the store: ${plain(final.openings ?? 1)}.`),
      Object.values(final.lost ?? {}).some(Boolean) &&
        note(
          "Trials lost: ",
          Object.entries(final.lost)
            .map(([name, lost]) => `${plain(lost)} of ${spaced(name)}`)
            .join(", "),
          ".",
        ),
      Boolean(final.engines) && note(final.engines),
      forest(read, points, -reach, reach, ["--ink"]),
      gainTable("gain", read),
      table(
        ["what selection has added", "points", ""],
        final.parts.map(([name, value]) => [spaced(name), points(value), wide(PARTS[name])]),
      ),
      gainTable(
        "FT, read in other ways",
        ways(final.transfer),
        true,
      ),
      (final.over ?? []).map((e) => [
        note(`Selected harness − ${spaced(e.name)}, which is ${e.given}. Fresh seeds, test tasks.`),
        gainTable(`over ${spaced(e.name)}`, ways(e.transfer), true),
      ]),
    ],
  );
};

const campaignOverview = (host, view, store) => {
  const rows = inTree(view.versions);
  const ids = rows.map(({ v }) => v.id);
  const [tree, chosen] = [treeOf(view, rows), h("div", {})];
  const idOf = (place) => (ids.includes(place.version) ? place.version : view.selected);
  let current = null;
  host.replaceChildren(
    ...[
      refusedBox(view, store),
      part(
        "Versions",
        note(
          "Each is its parent's config with one lever moved; a search moves many. Thick: the promoted path. ",
          "Right: success on the selection set, and points over the parent.",
        ),
        tree,
        chosen,
      ),
      registry(view),
      skillsOf(view),
      budget(view),
      frozen(view),
      theTest(view),
    ].filter(Boolean),
  );
  return {
    show: (place) => {
      const id = idOf(place);
      if (current === id) return;
      current = id;
      for (const line of tree.querySelectorAll(".version"))
        line.setAttribute("aria-current", String(line.dataset.version === id));
      chosen.replaceChildren(...view.versions.filter((v) => v.id === id).map((v) => versionCard(v, view, store)));
    },
    step: (by) => travel({ version: ids[Math.min(ids.length - 1, Math.max(0, ids.indexOf(idOf(here())) + by))] }),
    redraw: () => {},
  };
};
