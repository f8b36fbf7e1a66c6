// One trace: the answer and its alternatives per token, attention, hidden states, detector scores.
import { query, showError, count, legend, lineChart, make, meter, short } from "./common.js";
import { drawArcs } from "./arcs.js";

const HEATS = {
  logprobs: { title: "log-probability", share: (value) => -value / 6, ends: ["certain", "e⁻⁶ or less"] },
  entropy: { title: "entropy", share: (value) => value / 4, ends: ["0", "4 nats or more"] },
  rank: { title: "rank", share: (value) => Math.log1p(value) / Math.log(1000), ends: ["first choice", "1000th"] },
};
const kept = { heat: "logprobs", layer: null, head: "mean", k: 4, prompts: false, first: true, nulls: false, marks: "" }; // kept between traces
let current = 0;

export function closeTrace() {
  current++;
  hideHint();
}

export async function showTrace(place, number, { step }) {
  const mine = ++current, isCurrent = () => mine === current;
  hideHint();
  layerListeners.length = 0; // of the previous trace
  try {
    const trace = await query("trace", { number });
    if (!isCurrent()) return;
    const chosen = { token: lastToken(trace.tokens), listeners: [] };
    const panels = [tokensPanel(trace, chosen), attentionPanel(trace, chosen, isCurrent)];
    const columns = make("div", { class: "columns" }, evolutionPanel(trace, isCurrent), layersPanel(trace, chosen, isCurrent), scoresPanel(trace), recordPanel(trace));
    place.replaceChildren(head(trace, step), ...answerBlock(trace), ...panels.filter(Boolean), columns);
  } catch (error) {
    if (isCurrent()) place.replaceChildren(make("p", {}, make("a", { href: "#" }, "All traces")), errorBox(error));
  }
}

function errorBox(error) {
  const box = make("div");
  showError(box, error);
  return box;
}

function head(trace, step) {
  return make("div", { class: "bar" },
    make("a", { href: "#" }, "All traces"),
    make("button", { type: "button", onclick: () => step(trace.number, -1) }, "← Previous"),
    make("button", { type: "button", onclick: () => step(trace.number, 1) }, "Next →"),
    make("span", { class: "soft" }, `record ${count(trace.number)} of ${count(trace.records)}`, trace.id === null ? "" : `, ${trace.id}`, trace.part ? `, ${trace.part} split` : ""),
    make("span", { class: "soft keys" }, "← → previous and next, Esc back"));
}

function answerBlock(trace) {
  const { pieces: marked, legend: key } = trace.marks ? markedAnswer(trace.marks) : {};
  const parts = [make("h2", { class: "question" }, make("bdi", {}, trace.question ?? `record ${trace.number}`))];
  const line = make("p", { class: "given-answer" });
  if (trace.scalars.status === "error") line.append(make("span", { class: "error" }, trace.scalars.error ?? "failed"));
  else line.append(make("bdi", {}, ...(trace.marks ? marked : [trace.answer ?? ""])), " ");
  if (trace.verdict) line.append(" ", make("span", { class: `verdict ${trace.verdict}` }, trace.verdict));
  line.append(" ", human(trace) ?? "");
  if (trace.references.length) line.append(make("span", { class: "soft" }, ` references: ${trace.references.slice(0, 12).join(" · ")}`));
  return [...parts, line, ...(key ? [key] : [])];
}

// The pieces of an answer: annotated spans underlined, coloured by the scores of a detector of tokens.
function markedAnswer({ pieces, is_annotated, scales }) {
  const names = Object.keys(scales), made = pieces.map(({ text, span }) => make("span", { class: span === null ? "piece" : "piece wrong" }, text));
  const scale = make("span", { class: "soft" });
  const select = make("select", { id: "marks", onchange: (event) => { kept.marks = event.target.value; paint(); } }, ...names.map((name) => make("option", { value: name, selected: name === kept.marks }, name)));
  function paint() {
    const name = names.includes(kept.marks) ? kept.marks : names[0], [low, high] = scales[name] ?? [0, 1];
    pieces.forEach(({ span, scores }, place) => {
      const score = scores[name], share = score === undefined ? 0 : (score - low) / (high - low || 1);
      made[place].style.setProperty("--heat", Math.round(75 * Math.min(1, Math.max(0, share))));
      const facts = [span === null ? "" : `annotated as wrong${span ? `: ${span}` : ""}`, score === undefined ? "" : `${name} ${short(score)}`];
      made[place].title = facts.filter(Boolean).join(", ");
    });
    if (name) scale.replaceChildren(short(low), " ", make("span", { class: "scale", "aria-hidden": "true" }), " ", short(high), " (higher: more likely wrong)");
  }
  paint();
  const annotated = is_annotated ? make("span", { class: "soft" }, make("span", { class: "piece wrong" }, "underlined"), ": annotated as wrong") : null;
  return { pieces: made, legend: make("div", { class: "bar", id: "marks-key" }, names.length ? make("label", {}, "answer coloured by ", select) : null, scale, annotated) };
}

// The verdict of a person, beside that of the labels.
export function human(record) {
  return record.human ? make("span", { class: `verdict human ${record.human}`, title: "the verdict of a person" }, `${record.human} (person)`) : null;
}

function lastToken(tokens) {
  const length = tokens.answer_len ?? (tokens.ids.length - tokens.start);
  return Math.max(0, Math.min(tokens.ids.length, tokens.start + length) - 1);
}

const visible = (text) => text.replaceAll("\n", "⏎\n").replaceAll("\t", "→");
const printed = (text) => JSON.stringify(text);

function tokensPanel(trace, chosen) {
  const tokens = trace.tokens, known = Object.keys(HEATS).filter((name) => tokens[name]);
  if (!tokens.ids.length) return null;
  const heat = known.includes(kept.heat) ? kept.heat : known[0];
  const box = make("div", { class: "tokens", role: "group", "aria-label": "Tokens" }), buttons = [];
  const end = tokens.start + (tokens.answer_len ?? tokens.ids.length);
  tokens.texts.forEach((text, place) => {
    const kind = place < tokens.start ? "prompt" : place < end ? "answer" : "answer after";
    const button = make("button", { type: "button", class: kind, "data-place": place, "aria-pressed": "false" }, tokens.problem ? `${text} ` : visible(text));
    for (const [event, act] of [["mouseenter", hint], ["focus", hint], ["mouseleave", hideHint], ["blur", hideHint]]) button.addEventListener(event, () => act(button, tokens, place));
    button.addEventListener("click", () => choose(place));
    buttons.push(button);
  });
  box.append(...buttons);
  const scale = make("span", { class: "soft" });
  const select = make("select", { id: "heat", onchange: (event) => { kept.heat = event.target.value; paint(); } },
    ...known.map((name) => make("option", { value: name, selected: name === heat }, HEATS[name].title)));
  function paint() {
    const { share, ends } = HEATS[kept.heat] ?? HEATS[heat], values = tokens[kept.heat] ?? tokens[heat];
    buttons.forEach((button, place) => {
      const value = values?.[place - tokens.start];
      button.style.setProperty("--heat", value === undefined || value === null ? 0 : Math.round(75 * Math.min(1, Math.max(0, share(value)))));
    });
    scale.replaceChildren(ends[0], " ", make("span", { class: "scale", "aria-hidden": "true" }), " ", ends[1]);
  }
  function choose(place) {
    chosen.token = place;
    buttons.forEach((button, at) => button.setAttribute("aria-pressed", at === place));
    for (const listen of chosen.listeners) listen(place);
  }
  if (known.length) paint();
  buttons[chosen.token]?.setAttribute("aria-pressed", "true");
  const bar = make("div", { class: "bar" }, make("h2", {}, "Tokens"), known.length ? make("label", {}, "coloured by ", select) : null, scale,
    tokens.problem ? make("span", { class: "soft" }, `ids: ${tokens.problem}`) : null);
  return make("section", { class: "panel" }, bar, box);
}

function hint(button, tokens, place) {
  const box = document.getElementById("hint"), step = place - tokens.start;
  const facts = [`token ${place}, id ${tokens.ids[place]}`];
  const logprob = tokens.logprobs?.[step] ?? null, entropy = tokens.entropy?.[step] ?? null, rank = tokens.rank?.[step] ?? null;
  if (logprob !== null) facts.push(`probability ${percent(Math.exp(logprob))}`);
  if (entropy !== null) facts.push(`entropy ${short(entropy)}`);
  if (rank !== null) facts.push(rank === 0 ? "first choice" : `choice ${count(rank + 1)}`);
  box.replaceChildren(make("strong", { class: "mono" }, printed(tokens.texts[place])), make("div", { class: "soft" }, facts.join(", ")));
  const others = step >= 0 ? tokens.alternatives[step] : null;
  if (others) box.append(make("table", {}, make("tbody", {}, ...others.map((other) =>
    make("tr", { class: other.id === tokens.ids[place] ? "chosen" : null }, make("td", { class: "mono" }, printed(other.text)), make("td", {}, percent(other.probability)), make("td", {}, meter(other.probability)))))));
  box.hidden = false;
  button.setAttribute("aria-describedby", "hint");
  const at = button.getBoundingClientRect();
  box.style.left = `${Math.max(4, Math.min(at.left + scrollX, scrollX + document.documentElement.clientWidth - box.offsetWidth - 8))}px`;
  const below = at.bottom + 6 + box.offsetHeight < innerHeight;
  box.style.top = `${scrollY + (below ? at.bottom + 6 : Math.max(4, at.top - box.offsetHeight - 6))}px`;
}

function hideHint() {
  document.getElementById("hint").hidden = true;
}

const percent = (share) => share === null ? "–" : share >= 0.1 ? `${(100 * share).toFixed(0)} %` : `${(100 * share).toPrecision(2)} %`;

function attentionPanel(trace, chosen, isCurrent) {
  if (!trace.num_layers) return null;
  kept.layer = Math.min(kept.layer ?? Math.floor(trace.num_layers / 2), trace.num_layers - 1);
  const box = make("div", { class: "arcs" }), note = make("p", { class: "note" });
  const slider = make("input", { type: "range", id: "layer", min: 0, max: trace.num_layers - 1, value: kept.layer, "aria-label": "Layer" });
  const output = make("output", { for: "layer" });
  const heads = make("select", { id: "head" }, make("option", { value: "mean" }, "mean of all"));
  const edges = make("input", { type: "number", id: "k", min: 1, max: 8, value: kept.k });
  const prompts = make("input", { type: "checkbox", id: "prompts", checked: kept.prompts });
  const first = make("input", { type: "checkbox", id: "first", checked: kept.first });
  let found = null, latest = 0;
  const draw = () => { if (found) note.textContent = drawArcs(box, trace.tokens, found, { prompts: kept.prompts, first: kept.first, chosen: chosen.token, choose: (place) => document.querySelector(`.tokens [data-place="${place}"]`)?.click() }); };
  async function load() {
    const mine = ++latest;
    output.textContent = `layer ${kept.layer + 1} of ${trace.num_layers}`;
    for (const listen of layerListeners) listen(kept.layer + 1);
    try {
      const answer = await query("attention", { number: trace.number, layer: kept.layer, head: kept.head, k: kept.k });
      if (mine !== latest || !isCurrent()) return;
      found = answer;
      if (!found) { box.textContent = "This record has no attention."; return; }
      edges.max = found.most;
      if (heads.options.length === 1) for (let head = 0; head < found.num_heads; head++) heads.append(make("option", { value: head, selected: String(head) === kept.head }, `head ${head + 1}`));
      heads.closest("label").hidden = found.num_heads === 0;
      draw();
    } catch (error) {
      if (mine === latest && isCurrent()) {
        if (kept.head !== "mean") { kept.head = "mean"; load(); return; } // the previous record had other heads
        showError(box, error);
      }
    }
  }
  slider.addEventListener("input", () => { kept.layer = Number(slider.value); load(); });
  heads.addEventListener("change", () => { kept.head = heads.value; load(); });
  edges.addEventListener("change", () => { kept.k = Math.max(1, Math.min(Number(edges.max), Number.parseInt(edges.value, 10) || 4)); edges.value = kept.k; load(); });
  prompts.addEventListener("change", () => { kept.prompts = prompts.checked; draw(); });
  first.addEventListener("change", () => { kept.first = first.checked; draw(); });
  chosen.listeners.push(draw);
  setTimeout(load);
  return make("section", { class: "panel" },
    make("div", { class: "bar" }, make("h2", {}, "Attention"), slider, output, make("label", {}, "head ", heads), make("label", {}, "strongest ", edges),
      make("label", {}, prompts, "show prompt tokens"), make("label", {}, first, "show attention to the first token")), box, note);
}

const layerListeners = [];

function layersPanel(trace, chosen, isCurrent) {
  const box = make("div"), select = make("select", { id: "position" }), label = make("label", {}, "at ", select);
  const panel = make("section", { class: "panel" }, make("div", { class: "bar" }, make("h2", {}, "Hidden states"), label), box);
  query("layers", { number: trace.number }).then((found) => {
    if (!isCurrent()) return;
    if (!found) { label.hidden = true; box.append(make("p", { class: "soft" }, "This record has no hidden states (extract with tier=probe or full).")); return; }
    const names = found.positions?.map((name) => name.replaceAll("_", " ")) ?? trace.tokens.texts.map((text, place) => `${place} ${printed(text)}`);
    const width = found.norm[0].length;
    select.append(...Array.from({ length: width }, (_, place) => make("option", { value: place }, names[place] ?? place)));
    select.value = found.positions ? Math.max(0, found.positions.indexOf("last_answer")) : Math.min(chosen.token, width - 1);
    let mark = kept.layer === null ? null : kept.layer + 1;
    const draw = () => {
      const place = Number(select.value), x = found.norm.map((_, layer) => layer);
      const what = found.field === "nodes" ? " (of a 64-dimensional projection)" : "";
      const norm = { name: `norm${what}`, x, y: found.norm.map((row) => row[place]) };
      const cosine = { name: "cosine similarity to the previous layer", x, y: found.cosine.map((row) => row[place]), colour: "var(--line2)" };
      box.replaceChildren(legend([norm]), lineChart({ lines: [norm], label: norm.name, height: 140, yMin: 0, mark, points: true, whole: true }),
        legend([cosine]), lineChart({ lines: [cosine], label: cosine.name, xLabel: "layer (0: embedding)", height: 150, mark, points: true, whole: true }));
    };
    select.addEventListener("change", draw);
    if (!found.positions) chosen.listeners.push((place) => { select.value = Math.min(place, width - 1); draw(); });
    layerListeners.push((layer) => { mark = layer; draw(); });
    draw();
  }).catch((error) => showError(box, error));
  return panel;
}

function evolutionPanel(trace, isCurrent) {
  const box = make("div", {}, make("p", { class: "soft" }, "…"));
  const nulls = make("input", { type: "checkbox", id: "nulls", checked: kept.nulls }), label = make("label", { hidden: true }, nulls, "show ablated nets");
  const panel = make("section", { class: "panel", id: "evolution" }, make("div", { class: "bar" }, make("h2", {}, "Detector scores after each layer"), label), box);
  const load = () => query("evolution", { number: trace.number }).then((found) => {
    if (!isCurrent()) return;
    if (!found.ready) { box.replaceChildren(make("p", { class: "soft" }, "loading the detectors …")); setTimeout(load, 500); return; }
    const names = Object.keys(found.scores);
    if (!names.length) { box.replaceChildren(make("p", { class: "soft" }, "No detector of the run scores these traces layer by layer. Next: millstream train data=STORE model=lstm,gnn,gvae")); return; }
    const plain = (name) => !name.includes("_");
    label.hidden = names.every(plain);
    let mark = kept.layer === null ? null : kept.layer + 1;
    const draw = () => {
      const lines = names.filter((name) => kept.nulls || plain(name) || names.every((one) => !plain(one)))
        .map((name) => ({ name: `${name} ${found.scores[name].scores.at(-1).toFixed(3)}`, x: found.scores[name].layers, y: found.scores[name].scores, dash: plain(name) ? null : "4 3" }));
      box.replaceChildren(legend(lines), lineChart({ lines, label: "Probability of a wrong answer after each layer", xLabel: "layer (0: embedding)", yMin: 0, yMax: 1, height: 210, mark, points: true, whole: true }));
    };
    nulls.addEventListener("change", () => { kept.nulls = nulls.checked; draw(); });
    layerListeners.push((layer) => { mark = layer; draw(); });
    draw();
  }).catch((error) => { if (isCurrent()) showError(box, error); });
  setTimeout(() => { if (isCurrent()) load(); }, 150); // the nets are slow: skip traces that are only passed through
  return panel;
}

function table(pairs) {
  return make("table", {}, make("tbody", {}, ...pairs.map(([name, value]) => make("tr", {}, make("th", {}, name), make("td", {}, make("bdi", {}, value))))));
}

function scoresPanel(trace) {
  const scores = Object.entries(trace.scores).filter(([, score]) => score !== null).sort(([, a], [, b]) => b - a);
  const labels = Object.entries(trace.labels).filter(([name, value]) => name !== "question_id" && value !== null && typeof value !== "object");
  const shown = (value) => typeof value === "number" ? short(value) : String(value);
  return make("section", { class: "panel" }, make("h2", {}, "Scores"),
    labels.length ? table(labels.map(([name, value]) => [name, shown(value)])) : make("p", { class: "soft" }, "Not labelled. Next: millstream label STORE"),
    scores.length ? make("details", { open: true }, make("summary", {}, `${scores.length} ${scores.length === 1 ? "detector" : "detectors"}; higher: more likely wrong`), table(scores.map(([name, score]) => [name, shown(score)])))
      : make("p", { class: "soft" }, "Not scored: detectors score only the validation and test splits of a run."));
}

function recordPanel(trace) {
  const shown = (value) => value === null ? "–" : typeof value === "object" ? JSON.stringify(value) : typeof value === "number" && !Number.isInteger(value) ? short(value, 6) : String(value);
  const scalars = Object.entries(trace.scalars).map(([name, value]) => [name, shown(value)]);
  const shapes = Object.entries(trace.shapes).map(([name, shape]) => [name, shape ? `[${shape.join(", ")}]` : "–"]);
  return make("section", { class: "panel" }, make("h2", {}, "Record"),
    make("details", {}, make("summary", {}, `${scalars.length} scalar fields`), table(scalars)),
    make("details", {}, make("summary", {}, `${shapes.length} tensors`), table(shapes)));
}
