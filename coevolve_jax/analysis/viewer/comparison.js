// A comparison of arms over seeds: planned differences, curves with bands, budgets, notes, and its cells.

const ARM_COLOURS = ["--boundary", "--forgetting", "--rare", "--random", "--initial", "--evaluation"];
const spanText = (low, high, format) => (low === null || low === undefined ? "—" : `${format(low)} to ${format(high)}`);

const table = (heads, rows) =>
  h("div", { class: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, heads.map((x) => h("th", {}, x)))), h("tbody", {}, rows.map((row) => h("tr", {}, row.map((x) => h("td", {}, x)))))));

// Means as points with intervals on one axis, a row for each arm.
const forest = (rows, format, low, high, colours) =>
  h("div", { class: "forest" }, rows.map((row, k) => {
    const at = (x) => `${(100 * (x - low)) / (high - low || 1)}%`;
    const [span, dot, zero] = [h("i", { class: "span" }), h("i", { class: "dot" }), h("i", { class: "zero" })];
    if (Number.isFinite(row.low)) [span.style.left, span.style.width] = [at(row.low), `${(100 * (row.high - row.low)) / (high - low || 1)}%`];
    dot.style.left = at(row.value);
    zero.style.left = at(0);
    for (const mark of [span, dot]) mark.style.background = `var(${colours[k % colours.length]})`;
    return [h("span", {}, row.label), h("span", { class: "axis" }, low < 0 && high > 0 ? zero : null, span, dot), h("span", { class: "number" }, format(row.value))];
  }));

const armTable = (view) => {
  const budgets = [...new Set(view.arms.flatMap((a) => Object.keys(a.budgets ?? {})))].sort();
  return table(
    ["arm", "seeds", "mean", "95% interval", "interquartile mean", ...budgets],
    view.arms.map((a) => [a.arm, plain(a.n), percent(a.mean, 1), spanText(a.low, a.high, (x) => percent(x, 1)), percent(a.iqm, 1), ...budgets.map((b) => plain(a.budgets?.[b]))]),
  );
};

const plannedTable = (view) =>
  table(
    ["difference", "points", "95% interval (t)", "95% interval (bootstrap)", "p", "p (Holm)", "seeds", "P(improvement)"],
    view.planned.map((d) => [
      `${d.a} − ${d.b}`, points(d.difference), spanText(d.low, d.high, points), spanText(d.boot_low, d.boot_high, points),
      Number.isFinite(d.p) ? d.p.toFixed(3) : "—", Number.isFinite(d.p_holm) ? d.p_holm.toFixed(3) : "—", plain(d.n), percent(d.p_improvement),
    ]),
  );

const cellTable = (view) => {
  const seeds = [...new Set(view.cells.map((c) => c.seed))].sort((a, b) => a - b);
  const cell = new Map(view.cells.map((c) => [JSON.stringify([c.arm, c.seed]), c]));
  return table(
    ["arm", ...seeds.map((s) => `seed ${s}`)],
    [...new Set(view.cells.map((c) => c.arm))].map((arm) => [
      arm,
      ...seeds.map((seed) => {
        const found = cell.get(JSON.stringify([arm, seed]));
        const path = ["cells", arm, `seed_${seed}`, "report.html"].map(encodeURIComponent).join("/");
        return found ? (found.finished ? h("a", { href: path }, percent(found.success, 1)) : "under way") : "—";
      }),
    ]),
  );
};

const curveChart = (host, arms, hidden) =>
  estimateChart(
    host,
    Object.entries(arms).map(([arm, c], k) => ({
      label: arm, colour: ARM_COLOURS[k % ARM_COLOURS.length], at: c.step, estimates: c.step.map((_, i) => ({ value: c.mean[i], low: c.low?.[i] ?? null, high: c.high?.[i] ?? null })),
    })),
    { ...FRACTION, sync: "steps", height: 260 },
  );

const comparisonOverview = (host, view) => {
  const means = view.arms.filter((a) => Number.isFinite(a.mean)).map((a) => ({ label: a.arm, value: a.mean, low: a.low, high: a.high }));
  const differences = view.planned.filter((d) => Number.isFinite(d.difference)).map((d) => ({ label: `${d.a} − ${d.b}`, value: d.difference, low: d.low, high: d.high }));
  const ends = (rows) => rows.flatMap((r) => [r.low ?? r.value, r.high ?? r.value]);
  const reach = 1.1 * Math.max(0.01, ...ends(differences).map(Math.abs));
  const curves = Object.entries(view.curves).map(([set, arms]) => ({
    title: `Success on ${set}`,
    reading: "Mean over seeds; bands are 95% intervals over seeds.",
    has: () => Object.keys(arms).length,
    missing: "No evaluation was recorded.",
    draw: (place) => curveChart(place, arms),
  }));
  const section = (title, ...content) => h("section", { class: "group" }, h("h2", {}, title), content);
  host.replaceChildren(
    ...[
      view.notes.length && h("section", { class: "group" }, h("h2", {}, "Read this first"), h("ul", { class: "alerts" }, view.notes.map((n) => h("li", {}, n)))),
      view.planned.length && section("Planned differences", h("p", { class: "note" }, `Paired over seeds, in points of ${view.metric}; p values are also shown after Holm's correction.`), forest(differences, points, -reach, reach, ["--ink"]), plannedTable(view)),
      section("Arms", means.length ? forest(means, (x) => percent(x, 1), Math.min(0, ...ends(means)), Math.max(1, ...ends(means)), ARM_COLOURS) : null, armTable(view)),
      curves.length && panelSection("Curves", curves, view),
      view.cells.length && section("Runs", h("p", { class: "note" }, "Held-out success at the end; each leads to the report of its run."), cellTable(view)),
    ].filter(Boolean),
  );
  host.querySelectorAll("figure").forEach((card) => card.draw?.());
};
