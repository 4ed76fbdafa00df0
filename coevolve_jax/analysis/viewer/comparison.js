// A comparison of arms over seeds: notes, planned differences, arms, curves with bands, budgets, and its runs.

const ARM_COLOURS = ["--boundary", "--forgetting", "--rare", "--random", "--initial", "--evaluation"];
// null: there is none, for all are alike; undefined: too few seeds.
const spanText = (low, high, format) =>
  low === undefined ? "—" : low === null ? "no interval" : `${format(low)} to ${format(high)}`;
// What arms and differences say once more with what they leave out counted as failures: [key, name].
const AT_WORST = [
  ["if_lost_failed", "lost trials as failures"],
  ["if_diverged_failed", "diverged seeds as 0"],
];
const withWorst = (rows, line) =>
  rows.flatMap((row) => [line(row), ...AT_WORST.flatMap(([key, name]) => (row[key] ? [line(row[key], name)] : []))]);
const lostText = (row) =>
  row.lost === undefined ? "—" : row.lost ? `${plain(row.lost)} (${percent(row.lost_share, 1)})` : "0";

// Means as points with intervals on one axis, a row for each arm.
const forest = (rows, format, low, high, colours) =>
  h(
    "div",
    { class: "forest" },
    rows.map((row, k) => {
      const at = (x) => `${(100 * (x - low)) / (high - low || 1)}%`;
      const [span, dot, zero] = [h("i", { class: "span" }), h("i", { class: "dot" }), h("i", { class: "zero" })];
      if (Number.isFinite(row.low))
        [span.style.left, span.style.width] = [at(row.low), `${(100 * (row.high - row.low)) / (high - low || 1)}%`];
      dot.style.left = at(row.value);
      zero.style.left = at(0);
      const each = Object.values(row.values ?? {})
        .filter(Number.isFinite)
        .map((x) => {
          const mark = h("i", { class: "each" });
          mark.style.left = at(x);
          return mark;
        });
      for (const mark of [span, dot, ...each]) mark.style.background = `var(${colours[k % colours.length]})`;
      return [
        h("span", {}, row.label),
        h("span", { class: "axis" }, low < 0 && high > 0 ? zero : null, span, each, dot),
        h("span", { class: "number" }, format(row.value)),
      ];
    }),
  );

const armTable = (arms) =>
  table(
    ["arm", "seeds", "lost trials", "diverged seeds", "mean", "95% interval", "interquartile mean", "by seed"],
    withWorst(arms, (a, name) => [
      name ?? a.arm,
      plain(a.n),
      name ? "" : lostText(a),
      name ? "" : (a.diverged ?? []).join(" ") || "none",
      percent(a.mean, 1),
      spanText(a.low, a.high, (x) => percent(x, 1)),
      percent(a.iqm, 1),
      Object.entries(a.values ?? {})
        .map(([seed, x]) => `${seed}: ${percent(x, 1)}`)
        .join("  "),
    ]),
  );

const pText = (p) => (p === undefined ? "—" : p === null ? "not testable" : p < 0.001 ? "< 0.001" : p.toFixed(3));
const plannedTable = (planned) =>
  table(
    [
      "difference",
      "points",
      "95% interval (t)",
      "95% interval (bootstrap)",
      "p",
      "p (Holm)",
      "seeds",
      "P(improvement)",
      "lost trials",
    ],
    withWorst(planned, (d, name) => [
      name ?? `${d.a} − ${d.b}${d.planned_later ? ` (planned on ${d.planned_later})` : ""}`,
      points(d.difference),
      spanText(d.low, d.high, points),
      spanText(d.boot_low, d.boot_high, points),
      pText(d.p),
      pText(d.p_holm),
      plain(d.n),
      percent(d.p_improvement),
      name ? "" : lostText(d),
    ]),
  );

const budgetTable = (arms) => {
  const names = [...new Set(arms.flatMap((a) => Object.keys(a.budgets ?? {})))];
  return names.length
    ? table(
        ["mean per run", ...arms.map((a) => a.arm)],
        names.map((name) => [name.replaceAll("_", " "), ...arms.map((a) => plain(a.budgets?.[name]))]),
      )
    : null;
};

const cellTable = (view) => {
  const seeds = [...new Set(view.cells.map((c) => c.seed))].sort((a, b) => a - b);
  const cell = new Map(view.cells.map((c) => [JSON.stringify([c.arm, c.seed]), c]));
  return table(
    ["arm", ...seeds.map((s) => `seed ${s}`)],
    [...new Set(view.cells.map((c) => c.arm))].map((arm) => [
      arm,
      ...seeds.map((seed) => {
        const found = cell.get(JSON.stringify([arm, seed]));
        const path = [...view.folder, "cells", arm, `seed_${seed}`, "report.html"].map(encodeURIComponent).join("/");
        if (!found) return "—";
        if (Number.isFinite(found.diverged)) return `diverged at step ${found.diverged}`;
        if (!found.done) return "under way";
        const success = percent(found.success, 1);
        return found.report ? h("a", { href: path }, success) : success;
      }),
    ]),
  );
};

const curveChart = (host, arms) => {
  const lines = Object.entries(arms).flatMap(([arm, c], k) => {
    const colour = ARM_COLOURS[k % ARM_COLOURS.length];
    const turn = Math.floor(k / ARM_COLOURS.length); // of the colours: each has another dash
    const estimates = c.step.map((_, i) => ({
      value: c.mean[i],
      low: c.low?.[i] ?? null,
      high: c.high?.[i] ?? null,
    }));
    const worst = (c.if_lost_failed ?? []).map((value) => ({ value, low: null, high: null }));
    const known = worst.some((e) => e.value !== null);
    return [
      { label: arm, colour, at: c.step, estimates, dash: DASHES[turn % DASHES.length] },
      ...(known ? [{ label: `${arm}, lost trials as failures`, colour, at: c.step, estimates: worst, dash: [1, 3 + 2 * turn] }] : []),
    ];
  });
  return estimateChart(host, lines, { ...FRACTION, sync: "steps", height: 260 });
};

// One metric: the planned differences and the arms.
const metricSection = ({ metric, arms, planned }, k) => {
  const means = arms.filter((a) => Number.isFinite(a.mean)).map((a) => ({ label: a.arm, value: a.mean, ...a }));
  const differences = planned
    .filter((d) => Number.isFinite(d.difference))
    .map((d) => ({ label: `${d.a} − ${d.b}`, value: d.difference, low: d.low, high: d.high, values: d.by_seed }));
  const ends = (rows) => rows.flatMap((r) => [r.low ?? r.value, r.high ?? r.value, ...Object.values(r.values ?? {})]);
  const reach = 1.1 * Math.max(0.01, ...ends(differences).map(Math.abs));
  return h(
    "section",
    { class: "group" },
    h("h2", {}, k ? `Also: ${metric}` : metric.charAt(0).toUpperCase() + metric.slice(1)),
    planned.length
      ? [
          h(
            "p",
            { class: "note" },
            "Planned differences, paired by seed, in points. Dot: mean; line: 95% t interval over seeds; ticks: seeds.",
          ),
          forest(differences, points, -reach, reach, ["--ink"]),
          plannedTable(planned),
        ]
      : null,
    h("p", { class: "note spaced" }, "Arms. Dot: mean; line: 95% t interval over seeds; ticks: seeds."),
    forest(means, (x) => percent(x, 1), Math.min(0, ...ends(means)), Math.max(1, ...ends(means)), ARM_COLOURS),
    armTable(arms),
  );
};

const comparisonOverview = (host, view) => {
  const curves = Object.entries(view.curves).map(([name, arms]) => ({
    title: `Success: ${name}`,
    reading: "Mean over seeds; bands are 95% intervals over seeds.",
    has: () => Object.keys(arms).length,
    missing: "No evaluation was recorded.",
    draw: (place) => curveChart(place, arms),
  }));
  const section = (title, ...content) => h("section", { class: "group" }, h("h2", {}, title), content);
  const budget = view.tables.length ? budgetTable(view.tables[0].arms) : null;
  host.replaceChildren(
    ...[
      view.notes.length &&
        section(
          "Read this first",
          h(
            "ul",
            { class: "alerts" },
            view.notes.map((n) => h("li", {}, n)),
          ),
        ),
      ...view.tables.map(metricSection),
      curves.length && panelSection("Curves", curves, view),
      budget &&
        section(
          "Budgets",
          h("p", { class: "note" }, "What the runs of each arm have cost, and what they made of it."),
          budget,
        ),
      view.cells.length &&
        section(
          "Runs",
          h("p", { class: "note" }, "Held-out success at the end; each leads to the report of its run, where there is one."),
          cellTable(view),
        ),
    ].filter(Boolean),
  );
  host.querySelectorAll("figure").forEach((card) => card.draw?.());
};
