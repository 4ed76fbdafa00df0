// What the explorer spends, where it is a model: tokens and money by role and evolution, and its budget.

const ROLE_HUES = ["--random", "--boundary", "--rare", "--forgetting", "--evaluation", "--other", "--initial"];

const evolutionsOf = (run) => run.costs.rows.filter((row) => row.step !== null);
const spentIn = (row, role) => {
  const own = row.roles[role];
  return own ? own.tokens_in + own.tokens_out : 0;
};
const sumOf = (rows, name) => rows.reduce((total, row) => total + row[name], 0);
const running = (run, name) => {
  let sum = sumOf(run.costs.rows, name) - sumOf(evolutionsOf(run), name); // for the tasks that the run begins with
  return evolutionsOf(run).map((row) => (sum += row[name]));
};
const stepSpan = (run) => [(run.metrics.step[0] ?? 0) - 0.7, (run.metrics.step.at(-1) ?? 0) + 0.7];
const budgetEnd = (run) =>
  Number.isInteger(run.costs.ended) ? { x: run.costs.ended, label: "synthesis ended" } : undefined;

// How much has been spent of what may be, as a chart over evolutions.
const spending = (name, title, reading) => ({
  title,
  reading,
  width: "third",
  has: (run) => evolutionsOf(run).some((row) => row[name]),
  missing: name === "money" ? "No prices are set." : "No evolution has asked yet.",
  draw: (host, run) => {
    const x = evolutionsOf(run).map((row) => row.step);
    const values = running(run, name);
    const budget = run.costs.budget[name];
    const series = [{ label: "spent", values, colour: "--boundary", points: true }];
    if (budget) series.push({ label: "budget", values: x.map(() => budget), colour: "--bad", dash: [4, 3] });
    chart(host, {
      x,
      series,
      range: [0, 1.08 * Math.max(...values, budget ?? 0)],
      xrange: stepSpan(run),
      sync: "steps",
    });
  },
});

const COSTS = [
  {
    title: "Tokens of each evolution",
    reading: "Of questions and answers, by role: what one evolution costs.",
    has: (run) => evolutionsOf(run).some((row) => row.tokens),
    missing: "No evolution has asked yet.",
    width: "third",
    draw: (host, run) => {
      const rows = evolutionsOf(run);
      const series = run.costs.roles.map((label, k) => ({
        label,
        values: rows.map((row) => spentIn(row, label)),
        colour: ROLE_HUES[k % ROLE_HUES.length],
      }));
      const sums = stacked(series, { bars: {} });
      chart(host, {
        x: rows.map((row) => row.step),
        series: sums,
        range: [0, 1.08 * Math.max(...sums[0].values, 1)],
        xrange: stepSpan(run),
        mark: budgetEnd(run),
        sync: "steps",
      });
    },
  },
  spending("tokens", "Tokens so far", "All tokens since the run began, its first tasks included."),
  spending("money", "Money so far", "By the prices of the config; answers that never came cost nothing."),
];

const costTable = (run) => {
  const { roles, rows } = run.costs;
  const short = rows.some((row) => row.unasked);
  const cell = (own) => (own ? `${plain(own.tokens_in)} / ${plain(own.tokens_out)}` : "—");
  const sums = (rows, role) => {
    const own = rows.map((row) => row.roles[role]).filter(Boolean);
    return own.length && { tokens_in: sumOf(own, "tokens_in"), tokens_out: sumOf(own, "tokens_out") };
  };
  const money = (role) => plain(sumOf(rows.map((row) => row.roles[role]).filter(Boolean), "money"));
  return table(
    ["tokens in / out", ...roles, "all tokens", "money", short && "not asked: budget"].filter(Boolean),
    [
      ...rows.map((row) => [
        row.step === null ? "first tasks" : `step ${row.step}`,
        ...roles.map((role) => cell(row.roles[role])),
        plain(row.tokens),
        plain(row.money),
        short && plain(row.unasked),
      ]),
      [
        "all",
        ...roles.map((role) => cell(sums(rows, role))),
        plain(sumOf(rows, "tokens")),
        plain(sumOf(rows, "money")),
        short && plain(sumOf(rows, "unasked")),
      ].map((x) => x && h("b", {}, x)),
      ["money", ...roles.map(money), "", plain(sumOf(rows, "money")), short && ""],
    ].map((row) => row.filter((x) => x !== false)),
  );
};

// How the budget stands, in a sentence.
const budgetNote = (run) => {
  const { rows, budget, ended } = run.costs;
  const parts = ["tokens", "money"]
    .filter((name) => budget[name])
    .map((name) => `${plain(sumOf(rows, name))} of ${plain(budget[name])} ${name}`);
  const spent = parts.length ? `Of the explorer's budget ${parts.join(" and ")} are spent` : "The explorer has no budget";
  const end =
    ended === undefined
      ? ""
      : `; synthesis ended ${ended === null ? "before the first step" : `at step ${ended}`}, training went on`;
  return h("p", { class: ended === undefined ? "note" : "note ended" }, `${spent}${end}.`);
};

const costSection = (run) => {
  const section = panelSection("What the explorer costs", COSTS, run);
  section.append(budgetNote(run), costTable(run));
  return section;
};
