// Attention of a layer as arcs over the tokens: from each token to the earlier ones it attends to most.
import { count, short, svg } from "./common.js";

const CHARACTER = 7.25, GAP = 8, MOST_CHARACTERS = 14, HEIGHT = 190, MOST_ARCS = 4000;

export function drawArcs(box, tokens, found, { prompts, first, chosen, choose }) {
  const known = tokens.texts.length >= found.source.length - 1; // the last token may have no text; unknown tokens are numbered
  const labels = (known ? tokens.texts : found.source.map((_, place) => String(place))).map((text) => {
    const shown = text.replaceAll("\n", "⏎").replaceAll("\t", "→").trim() || "·";
    return shown.length > MOST_CHARACTERS ? `${shown.slice(0, MOST_CHARACTERS - 1)}…` : shown;
  });
  const middles = [];
  let right = GAP;
  for (const label of labels) {
    const width = Math.max(12, label.length * CHARACTER);
    middles.push(right + width / 2);
    right += width + GAP;
  }
  const picture = svg("svg", { width: right, height: HEIGHT + 24, viewBox: `0 0 ${right} ${HEIGHT + 24}`, role: "img", "aria-label": "Attention between tokens" });
  const isShown = (token, source) => source >= 0 && (prompts || token >= tokens.start) && (first || source > 0) && token < labels.length && source < labels.length;
  const edges = [];
  found.source.forEach((sources, token) => sources.forEach((source, edge) => {
    if (isShown(token, source)) edges.push({ token, source, weight: found.weight[token][edge] });
  }));
  const drawn = edges.sort((one, other) => one.weight - other.weight).slice(-MOST_ARCS); // the strongest on top
  const most = Math.max(1e-9, drawn.at(-1)?.weight ?? 0);
  for (const { token, source, weight } of drawn) {
    const from = middles[source], to = middles[token], rise = Math.min(HEIGHT - 12, 14 + (to - from) * 0.42);
    const path = svg("path", { d: `M${from} ${HEIGHT}C${from} ${HEIGHT - rise * 1.3} ${to} ${HEIGHT - rise * 1.3} ${to} ${HEIGHT}`, "data-token": token, "data-source": source },
      svg("title", {}, `${labels[token]} attends to ${labels[source]}: ${short(weight)}`));
    path.style.setProperty("--weight", weight / most);
    picture.append(path);
  }
  labels.forEach((label, place) => {
    const text = svg("text", { x: middles[place], y: HEIGHT + 16, "text-anchor": "middle", class: place >= tokens.start ? "answer" : null, "data-place": place }, label);
    text.addEventListener("mouseenter", () => light(place));
    text.addEventListener("mouseleave", () => light(null));
    text.addEventListener("click", () => choose(place));
    picture.append(text);
  });
  function light(place) {
    box.classList.toggle("one", place !== null);
    for (const path of picture.querySelectorAll("path")) {
      path.classList.toggle("to", Number(path.dataset.token) === place);
      path.classList.toggle("from", Number(path.dataset.source) === place);
    }
  }
  picture.querySelector(`text[data-place="${chosen}"]`)?.classList.add("chosen");
  const before = box.scrollLeft, isNew = !box.firstChild;
  box.replaceChildren(picture);
  box.scrollLeft = isNew ? right : before; // the answer is at the end
  const number = edges.length > drawn.length ? `the ${count(drawn.length)} strongest of ${count(edges.length)} arcs` : `${count(drawn.length)} arcs`;
  return `${number}, strongest ${short(most)}; hover over a token: orange is what it attends to, green what attends to it`;
}
