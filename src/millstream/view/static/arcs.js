// Attention of a layer as arcs over the tokens: from each token to the earlier ones it looks at most.
import { short, svg } from "./common.js";

const LETTER = 7.25, GAP = 8, MOST_LETTERS = 14, HEIGHT = 190;

export function drawArcs(box, tokens, found, { prompts, first, chosen, choose }) {
  const labels = tokens.texts.map((text) => {
    const shown = text.replaceAll("\n", "⏎").replaceAll("\t", "→").trim() || "·";
    return shown.length > MOST_LETTERS ? `${shown.slice(0, MOST_LETTERS - 1)}…` : shown;
  });
  const middles = [];
  let right = GAP;
  for (const label of labels) {
    const width = Math.max(12, label.length * LETTER);
    middles.push(right + width / 2);
    right += width + GAP;
  }
  const picture = svg("svg", { width: right, height: HEIGHT + 24, viewBox: `0 0 ${right} ${HEIGHT + 24}`, role: "img", "aria-label": "Attention between tokens" });
  let most = 1e-9; // not Math.max(...): a long trace has more edges than a function takes arguments
  found.weight.forEach((row, token) => row.forEach((weight, edge) => { if (isShown(token, found.source[token][edge])) most = Math.max(most, weight); }));
  function isShown(token, source) {
    return source >= 0 && (prompts || token >= tokens.start) && (first || source > 0) && token < labels.length;
  }
  let count = 0;
  found.source.forEach((sources, token) => sources.forEach((source, edge) => {
    if (!isShown(token, source)) return;
    const weight = found.weight[token][edge], from = middles[source], to = middles[token], rise = Math.min(HEIGHT - 12, 14 + (to - from) * 0.42);
    const path = svg("path", { d: `M${from} ${HEIGHT}C${from} ${HEIGHT - rise * 1.3} ${to} ${HEIGHT - rise * 1.3} ${to} ${HEIGHT}`, "data-token": token, "data-source": source },
      svg("title", {}, `${labels[token]} looks at ${labels[source]}: ${short(weight)}`));
    path.style.setProperty("--weight", Math.min(1, weight / most));
    picture.append(path);
    count++;
  }));
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
  return `${count} arcs, strongest ${short(most)}; hover over a token: orange is what it looks at, green what looks at it`;
}
