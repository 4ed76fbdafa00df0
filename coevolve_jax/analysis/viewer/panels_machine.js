// Optimisation, health and time.

const gauge = (name, title, reading, more) => ({
  title,
  reading,
  has: (run) => measured(run, name),
  missing: "Not measured.",
  width: "third",
  draw: (host, run) => metricChart(host, run, [["", name, "--boundary"]], { height: 150, ...more }),
});

const OPTIMISATION = [
  gauge("loss", "Loss", "Policy loss plus KL penalty: near zero, since a group's advantages add up to zero."),
  gauge("kl", "KL to the reference", "In nats per token. A slow rise is learning, a jump is trouble."),
  gauge("grad_norm", "Gradient norm", "Before clipping; spikes mark batches that pull hard."),
  gauge("entropy", "Entropy", "In nats per token: towards zero the policy stops exploring."),
  gauge("mismatch_mean", "Mismatch", "Learner against sampler log-probability, in nats: should be rounding error."),
  gauge("mixed_groups", "Mixed groups", "Share of groups with both outcomes: GRPO learns from these.", FRACTION),
];

// One gauge for each number that the run keeps of its own health.
const healthPanels = (run) =>
  Object.keys(run.metrics)
    .filter((n) => n.startsWith("health/"))
    .map((n) => gauge(n, n.slice(7).replaceAll("_", " "), "Health of the run, by step."));

const TIME = [
  {
    title: "Time by phase",
    reading: "Wall-clock time: long bars are where the run spends it.",
    has: (run) => run.seconds.length,
    missing: "No step is finished yet.",
    draw: (host, run) => {
      const total = run.seconds.reduce((sum, [, s]) => sum + s, 0) || 1;
      barTable(
        host,
        run.seconds.map(([phase, s]) => [phase, s, `${clock(s)} · ${percent(s / total, 1)}`]),
      );
    },
  },
  {
    title: "Time per step",
    reading: "Seconds of a step; evolution makes some longer than others.",
    has: (run) => measured(run, "seconds/step"),
    missing: "No step is finished yet.",
    draw: (host, run) => {
      const names = ["rollout", "update", "evolution"];
      const { x, values } = binned(
        run,
        names.map((n) => metric(run, `seconds/${n}`)),
      );
      const series = names.map((label, k) => ({
        label,
        values: values[k],
        colour: ["--boundary", "--forgetting", "--rare"][k],
      }));
      const sums = stacked(series, { bars: {} });
      chart(host, {
        x,
        series: sums,
        format: (v) => `${plain(v)} s`,
        range: [0, 1.08 * Math.max(...sums[0].values)],
        xrange: [x[0] - 0.7, x.at(-1) + 0.7],
        sync: "steps",
      });
    },
  },
];

const alertList = (run) =>
  run.alerts.length
    ? h(
        "section",
        { class: "group" },
        h("h2", {}, "Alerts"),
        h(
          "ul",
          { class: "alerts" },
          run.alerts.slice(-50).map((a) => h("li", {}, h("b", {}, `step ${a.step} `), a.text)),
        ),
      )
    : null;

const runOverview = (host, run) => {
  const health = healthPanels(run);
  host.replaceChildren(
    ...[
      alertList(run),
      panelSection("Learning", LEARNING, run),
      panelSection("Co-evolution", EVOLUTION, run),
      panelSection("Optimisation", OPTIMISATION, run),
      health.length ? panelSection("Health", health, run) : null,
      panelSection("Time", TIME, run),
    ].filter(Boolean),
  );
  host.querySelectorAll("figure").forEach((card) => card.draw?.());
};
