// A trajectory token by token: what was fed, what was sampled, and how probable each sampled token was.

const SURPRISE = 5; // nats at which a token has its full colour

const tokenView = (row) => {
  if (!row.segments) return [h("pre", { class: "fed" }, row.text ?? "This trajectory was logged without its tokens.")];
  const facts = [];
  const readout = h("div", { class: "readout", "aria-live": "polite" });
  let position = 0;
  const blocks = row.segments.map((segment) => {
    const at = position;
    position += segment.tokens;
    if (!segment.logprobs)
      return clipped(segment.pieces.join(""), 1200, (text) =>
        h("pre", { class: "fed", "data-label": `fed · ${segment.tokens} tokens, masked` }, text),
      );
    const spans = segment.pieces.map((piece, i) => {
      const logprob = segment.logprobs[i];
      facts.push({ piece, logprob, at: at + i, version: segment.version });
      const span = h("span", { class: "token", "data-token": facts.length - 1 }, piece);
      span.style.setProperty("--surprise", `${Math.round(Math.min(1, -logprob / SURPRISE) * 70)}%`);
      return span;
    });
    return h(
      "pre",
      { class: "sampled", "data-label": `sampled · ${segment.tokens} tokens, policy version ${segment.version}` },
      spans,
    );
  });
  const lowest = facts.reduce((a, b) => (b.logprob < (a?.logprob ?? Infinity) ? b : a), null);
  const mean = facts.reduce((sum, f) => sum + f.logprob, 0) / (facts.length || 1);
  const learned = Number.isFinite(row.advantage) ? ", which the learner learns from" : "";
  const body = h("div", { class: "tokens", tabindex: "0" }, blocks);
  const say = (index) => {
    const fact = facts[index];
    body.querySelector(".token.read")?.classList.remove("read");
    if (!fact) return;
    body.querySelector(`[data-token="${index}"]`).classList.add("read");
    readout.textContent = `token ${fact.at}: ${JSON.stringify(fact.piece)} · probability ${percent(Math.exp(fact.logprob), 2)} · log-probability ${fact.logprob.toFixed(4)} nats · version ${fact.version}`;
    body.dataset.read = index;
  };
  const meant = (event) => event.target.dataset?.token !== undefined && say(Number(event.target.dataset.token));
  body.addEventListener("pointerover", meant);
  body.addEventListener("click", meant);
  body.addEventListener("keydown", (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!by) return;
    event.preventDefault();
    say(Math.max(0, Math.min(facts.length - 1, Number(body.dataset.read ?? -1) + by)));
  });
  readout.textContent = lowest ? "Point at a token, or use ← and →." : "";
  const scale = h("span", { class: "scale" }, "probable", h("i", {}), `improbable (e⁻${SURPRISE} and less)`);
  return [
    h(
      "p",
      { class: "note" },
      `${position} tokens: ${facts.length} sampled${learned}, and ${position - facts.length} fed, which are masked. `,
      lowest &&
        `Mean log-probability ${mean.toFixed(3)} nats; least probable token ${JSON.stringify(lowest.piece)} (${percent(Math.exp(lowest.logprob), 2)}). `,
      scale,
    ),
    readout,
    body,
  ];
};
