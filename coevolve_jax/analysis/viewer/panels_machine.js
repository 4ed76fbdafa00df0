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

// Titles of what health.py measures, and how to read it; what is not here has its name for a title.
const HEALTH = {
  zero_variance_groups: ["Groups without spread", "Share of groups whose rewards are all alike: they teach nothing."],
  active_groups: ["Groups learned from", "Share of groups that reach the update."],
  group_std: ["Spread within groups", "Mean standard deviation of the rewards of a group."],
  logprob: ["Certainty", "Mean log-probability in nats of sampled tokens: near 0 exploration has collapsed."],
  steps: ["Calls per rollout", "Few: the policy gives up. Many: it goes round in circles."],
  truncated: ["Truncated rollouts", "Share that a limit ended."],
  malformed: ["Malformed calls", "Share of steps that could not be read as a call."],
  invalid: ["Invalid rollouts", "Share that our own infrastructure failed."],
  length_reward: ["Length against reward", "Correlation of a rollout's tokens with its reward."],
  rollouts: ["Rollouts by outcome", "Valid rollouts in a step."],
  tool_failures: ["Calls that failed", "Share of calls that came back as errors."],
  tool_entropy: ["Variety of tools", "Entropy of the tools called, in bits."],
  repeated: ["Repeated calls", "Share of pairs of calls in a row that the rollout had made before."],
  longest_run: ["Longest run of one tool", "Most calls of one tool in a row."],
};

// One panel for each number that the run keeps of its own health; of both outcomes in one where it is kept by outcome.
const healthPanels = (run) => {
  const kept = Object.keys(run.metrics).filter((n) => n.startsWith("health/") && !n.includes("/stops/"));
  const found = new Set(kept.map((n) => n.split("/").at(-1)));
  const names = [...Object.keys(HEALTH).filter((n) => found.delete(n)), ...found];
  return names.map((name) => {
    const lines = kept.includes(`health/${name}`) ? [["", `health/${name}`, "--boundary"]] : [];
    for (const [outcome, colour] of [
      ["success", "--rare"],
      ["failure", "--forgetting"],
    ])
      if (kept.includes(`health/${outcome}/${name}`))
        lines.push([`in a ${outcome}`, `health/${outcome}/${name}`, colour]);
    return {
      title: HEALTH[name]?.[0] ?? name.replaceAll("_", " "),
      reading: HEALTH[name]?.[1] ?? "",
      has: () => measured(run, ...lines.map(([, key]) => key)),
      missing: "Not measured.",
      width: "third",
      draw: (host) => metricChart(host, run, lines, { height: 130 }),
    };
  });
};

const PHASES = { rollout: "--boundary", update: "--forgetting", push: "--random", evolution: "--rare" };
const phases = (run) => Object.keys(PHASES).filter((n) => measured(run, `seconds/${n}`));

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
    has: (run) => phases(run).length > 0,
    missing: "No step is finished yet.",
    draw: (host, run) => {
      const names = phases(run);
      const { x, values } = binned(
        run,
        names.map((n) => metric(run, `seconds/${n}`)),
      );
      const series = names.map((label, k) => ({
        label,
        values: values[k],
        colour: PHASES[label],
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

// Titles of how fast and how busy the machine is, and how to read it; what is not here has its name for a title.
const SPEED = {
  "throughput/rollout_tokens": ["Tokens sampled per second", "Over the whole of a step's rollouts, tools included."],
  "throughput/update_tokens": ["Tokens learned per second", "Prompts included, over the whole of the update."],
  "throughput/mfu": ["Model operations", "Share of the devices' published peak during the update (MFU).", FRACTION],
  "utilization/engine": ["Engine", "Requests in flight over the most that there may be.", FRACTION],
  "utilization/workers": ["Environment workers", "Share of the time in which they were busy.", FRACTION],
  "utilization/cached": ["Prompts from the cache", "Share of the tokens sent that the engine had.", FRACTION],
  "serving/prefill_tokens": ["Tokens prefilled", "Sent to the engine and not in its cache, in a step."],
  "serving/decode_tokens": ["Tokens decoded", "Sampled in a step."],
  "serving/queue_seconds": ["Seconds in the server's queue", "Of a message, on average."],
  "serving/messages": ["Messages", "Asked for in a step."],
  "serving/slow_retries": ["Slow messages", "Sampled anew after engine.timeout, which favours short messages."],
  "serving/paused_seconds": ["Seconds without generation", "For which a server stood still to take new weights."],
};
const speedPanels = (run) => {
  const kept = Object.keys(run.metrics).filter((n) => /^(throughput|utilization|serving)\//.test(n));
  return [...new Set([...Object.keys(SPEED), ...kept])]
    .filter((n) => measured(run, n))
    .map((n) => {
      const [title, reading, more] = SPEED[n] ?? [n.split("/")[1].replaceAll("_", " "), ""];
      return gauge(n, title, reading, more);
    });
};

// What passed a threshold for so long that the terminal told it too; the rest is in the table of all.
const alertList = (run) => {
  const lasting = run.alerts.filter((a) => a.lasting);
  const line = (a) =>
    h(
      "li",
      {},
      h("b", {}, a.name.replaceAll("_", " ")),
      `, ${a.longest} steps in a row, the last at step ${a.last}: ${a.meaning}`,
    );
  return lasting.length
    ? h("section", { class: "group" }, h("h2", {}, "Alerts"), h("ul", { class: "alerts" }, lasting.map(line)))
    : null;
};
const alertTable = (run) =>
  run.alerts.length
    ? table(
        ["passed threshold", "steps", "in a row", "last step", "what it usually means"],
        run.alerts.map((a) => [a.name, plain(a.steps), plain(a.longest), plain(a.last), a.meaning]),
      )
    : h("p", { class: "note" }, "No threshold was passed.");

const healthSection = (panels, run) => {
  const section = panelSection("Health", panels, run);
  section.append(alertTable(run));
  return section;
};

const runOverview = (host, run) => {
  const health = healthPanels(run);
  host.replaceChildren(
    ...[
      alertList(run),
      panelSection("Learning", LEARNING, run),
      panelSection("Co-evolution", EVOLUTION, run),
      run.costs.rows.length ? costSection(run) : null,
      panelSection("Optimisation", OPTIMISATION, run),
      health.length ? healthSection(health, run) : null,
      panelSection("Time", [...TIME, ...speedPanels(run)], run),
    ].filter(Boolean),
  );
  host.querySelectorAll("figure").forEach((card) => card.draw?.());
};
