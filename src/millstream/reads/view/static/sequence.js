// The sequence of a read in lines, with its tokens coloured and its base qualities below. Arrow keys move between tokens.
import { count, make, svg } from "./common.js";

const BASES = { A: "A", C: "C", G: "G", T: "T", U: "T" };
const BEST = 42; // Phred; higher values are drawn as this

export class Sequence {
  constructor(box, readout) {
    this.box = box;
    this.readout = readout;
    this.record = null;
    this.pieces = []; // [{ node, from, to, token }], in order
    this.now = -1;
    box.addEventListener("mouseover", (event) => this.pick(event.target.dataset?.token));
    box.addEventListener("mouseleave", () => this.pick(undefined));
    box.addEventListener("click", (event) => this.pick(event.target.dataset?.token));
    box.addEventListener("keydown", (event) => this.walk(event));
  }

  show(record) {
    this.record = record;
    this.draw();
  }

  draw() {
    if (!this.record) return;
    const { bases, start, end, tokens } = this.record;
    const each = this.perLine();
    const cuts = tokens ? piecesOf(tokens, start, end) : null;
    this.pieces = [];
    this.now = -1;
    this.box.style.setProperty("--margin", `${String(count(end)).length}ch`);
    const rows = [];
    for (let from = start; from < end; from += each) {
      const to = Math.min(end, from + each);
      const text = make("span", { class: "text" });
      if (cuts) this.addTokens(text, cuts, from, to); else addBases(text, bases.slice(from - start, to - start));
      const row = make("div", { class: "row" }, make("span", { class: "at" }, count(from)), text);
      if (this.record.quality) row.append(grades(this.record.quality.slice(from - start, to - start)));
      rows.push(row);
    }
    this.box.replaceChildren(...rows);
    this.showReadout();
  }

  // As many tens of bases as fit.
  perLine() {
    const probe = make("span", { class: "text" }, "A".repeat(10));
    this.box.replaceChildren(probe);
    const sign = probe.getBoundingClientRect().width / 10 || 8;
    const room = this.box.clientWidth - sign * (String(count(this.record.end)).length + 4);
    return Math.max(10, Math.min(150, 10 * Math.floor(room / sign / 10)));
  }

  addTokens(text, cuts, from, to) {
    const { bases, start } = this.record;
    for (const { low, high, token } of cuts) {
      if (high <= from || low >= to) continue;
      const a = Math.max(low, from), b = Math.min(high, to), piece = bases.slice(a - start, b - start);
      if (token === null) { text.append(piece); continue; }
      const node = make("span", { class: `t${token % 2}`, "data-token": token }, piece);
      this.pieces.push({ node, from: a, to: b });
      text.append(node);
    }
  }

  walk(event) {
    const { tokens } = this.record ?? {};
    const steps = { ArrowRight: 1, ArrowLeft: -1, Home: -Infinity, End: Infinity };
    if (!tokens?.ids.length || !(event.key in steps)) return;
    event.preventDefault();
    this.pick(this.now < 0 ? 0 : Math.max(0, Math.min(tokens.ids.length - 1, this.now + steps[event.key])));
    this.pieces.find(({ node }) => Number(node.dataset.token) === this.now)?.node.scrollIntoView({ block: "nearest", inline: "nearest" });
  }

  pick(token) {
    const next = token === undefined ? -1 : Number(token), { tokens } = this.record ?? {};
    if (next === this.now) return;
    this.now = next;
    const low = next < 0 ? 0 : tokens.starts[next], high = next < 0 ? 0 : tokens.ends[next];
    for (const { node, from, to } of this.pieces) node.classList.toggle("now", from < high && to > low);
    this.showReadout();
  }

  showReadout() {
    const { tokens, tokens_error: problem } = this.record;
    this.readout.classList.toggle("error", Boolean(problem));
    this.readout.textContent = problem ?? (!tokens ? "" : this.now < 0 ? summary(tokens, this.record) : tokenText(tokens, this.now));
  }
}

function tokenText(tokens, place) {
  return `${tokens.texts[place]}: id ${count(tokens.ids[place])}, bases ${count(tokens.starts[place])} to ${count(tokens.ends[place])}`;
}

function summary(tokens, record) {
  const whole = record.start === 0 && record.end === record.length && !tokens.cut;
  const around = [...tokens.before, ...tokens.after];
  return [
    `${tokens.name}: ${count(tokens.ids.length)} tokens ${whole ? "in the record" : "here"}, of a vocabulary of ${count(tokens.vocab_size)}${around.length ? `, and ${around.join(", ")} around them` : ""}.`,
    tokens.cut ? "The record is long: these are the tokens of a read starting here." : "",
    tokens.ids.length && tokens.starts.length > 1 && tokens.ends[0] > tokens.starts[1] ? "They overlap: each starts where its colour starts." : "",
    "Hover over one, or use the arrow keys.",
  ].filter(Boolean).join(" ");
}

// The window in pieces: each token from its start to the next one's, and what is between tokens.
function piecesOf(tokens, start, end) {
  const found = [];
  let at = start;
  tokens.starts.forEach((low, token) => {
    const next = tokens.starts[token + 1] ?? Infinity;
    const from = Math.max(low, start), to = Math.min(tokens.ends[token], next, end);
    if (from > at) found.push({ low: at, high: from, token: null });
    if (to > from) { found.push({ low: from, high: to, token }); at = to; }
  });
  if (at < end) found.push({ low: at, high: end, token: null });
  return found;
}

function addBases(text, bases) {
  for (const run of bases.match(/(.)\1*/gs) ?? []) text.append(make("span", { class: BASES[run[0].toUpperCase()] ?? "other" }, run));
}

function grades(quality) {
  const height = (sign) => BEST - Math.min(BEST, Math.max(0, sign.charCodeAt(0) - 33));
  let path = `M0 ${BEST}`;
  [...quality].forEach((sign, place) => { path += `L${place} ${height(sign)}L${place + 1} ${height(sign)}`; });
  const chart = svg("svg", { viewBox: `0 0 ${quality.length} ${BEST}`, preserveAspectRatio: "none", "aria-hidden": "true" }, svg("path", { d: `${path}L${quality.length} ${BEST}Z` }));
  chart.style.setProperty("width", `${quality.length}ch`);
  return chart;
}
