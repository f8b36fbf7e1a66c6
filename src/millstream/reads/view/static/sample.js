// A classified sample: shares of taxa, probabilities, and the tree of the report. Counted in the background: shown as far
// as it is known.
import { query, bytes, colour, compact, count, histogram, make, meter, short, showError, showTiles, startPage, widthOf } from "./common.js";

const PAGE = 15, NAMED = 6;
const at = (id) => document.getElementById(id);
let overview = null, first = 0, bars = null, tree = null;
const folded = new Set(); // places of the tree whose children are hidden

addEventListener("keydown", (event) => {
  if (event.key !== "/" || /^(INPUT|SELECT|TEXTAREA)$/.test(document.activeElement?.tagName)) return;
  event.preventDefault();
  at("search").focus();
});
let drawn = innerWidth;
addEventListener("resize", () => {
  if (innerWidth === drawn) return;
  drawn = innerWidth;
  drawConfidence();
});

async function refresh() {
  try {
    overview = await query("overview");
    showOverview();
    await Promise.all([showShares(), showTaxa(), showConfidence()]);
    if (!overview.is_done) setTimeout(refresh, 500);
  } catch (error) { showError(at("about"), error); }
}

function showOverview() {
  const { name, reads, unclassified, is_done } = overview;
  const beside = [overview.report, overview.abundance].filter(Boolean);
  at("about").textContent = `${name}, ${bytes(overview.bytes)}${beside.length ? `, with ${beside.join(" and ")}` : ""}`
    + (is_done ? "" : `; ${percent(overview.share)} counted so far`);
  showTiles(at("tiles"), [
    [count(reads), is_done ? "rows (reads or read pairs)" : "rows counted so far"],
    [percent(part(reads - unclassified)), `classified: ${count(reads - unclassified)}`],
    [percent(part(unclassified)), `unclassified: ${count(unclassified)}`],
    [count(overview.taxa), "taxa with reads"],
  ]);
  const chosen = at("rank").value;
  at("rank").replaceChildren(make("option", { value: "" }, "all"), ...overview.ranks.map(([rank, reads]) => make("option", { value: rank }, `${rank} (${compact(reads)})`)));
  at("rank").value = overview.ranks.some(([rank]) => rank === chosen) ? chosen : "";
}

// One bar for the whole sample: the most frequent taxa, all others, unclassified.
async function showShares() {
  const { rows } = await query("taxa", { count: NAMED });
  const classified = overview.reads - overview.unclassified, rest = classified - rows.reduce((sum, row) => sum + row.reads, 0);
  const parts = rows.map((row, place) => [row.taxon, row.reads, colour(place)]);
  if (rest > 0) parts.push(["other taxa", rest, "var(--soft)"]);
  if (overview.unclassified) parts.push(["unclassified", overview.unclassified, "var(--grid)"]);
  const names = parts.map(([name, reads]) => `${name} ${percent(part(reads))}`);
  at("shares").setAttribute("aria-label", `Shares of the sample: ${names.join(", ")}`);
  at("shares").replaceChildren(...parts.map(([, reads, mark], place) => {
    const piece = make("i", { title: names[place] });
    piece.style.setProperty("--share", part(reads) ?? 0);
    piece.style.setProperty("--mark", mark);
    return piece;
  }));
  at("shares-legend").replaceChildren(...parts.map(([, , mark], place) => {
    const entry = make("span", {}, names[place]);
    entry.style.setProperty("--mark", mark);
    return entry;
  }));
}

let turn = 0;
async function showTaxa() {
  const now = ++turn, search = at("search").value.trim();
  try {
    const found = await query("taxa", { rank: at("rank").value, search, first, count: PAGE });
    if (now !== turn) return;
    at("taxa-text").textContent = `${count(found.found)} taxa${search ? " fit" : ""}; share of all ${count(overview.reads)} rows`
      + (overview.abundance ? ", and abundance of classes (95 % interval)" : "");
    at("taxa").replaceChildren(...found.rows.map((row) => {
      const id = row.tax_id && row.tax_id !== "0" ? `, tax id ${row.tax_id}` : "";
      const abundance = row.abundance === undefined ? null : make("small", {}, `${percent(row.abundance)} [${percent(row.low)}, ${percent(row.high)}]`);
      return make("li", {}, make("span", {}, `${row.taxon} `, make("span", { class: "rank" }, `${row.rank}${id}`)),
        meter(row.reads / Math.max(found.most_reads, 1)), make("span", { class: "value" }, `${count(row.reads)} · ${percent(part(row.reads))}`, abundance));
    }));
    at("pager").hidden = found.found <= PAGE;
    at("more-common").disabled = first === 0;
    at("less-common").disabled = first + PAGE >= found.found;
    at("place").textContent = found.rows.length ? `${count(first + 1)} to ${count(first + found.rows.length)} of ${count(found.found)}` : "";
  } catch (error) { if (now === turn) at("taxa-text").textContent = error.message; }
}

async function showConfidence() {
  bars = await query("confidence");
  drawConfidence();
}

function drawConfidence() {
  if (!bars) return;
  const total = bars.count.reduce((sum, reads) => sum + reads, 0);
  const sure = bars.count.reduce((sum, reads, place) => sum + (bars.from[place] >= 0.9 ? reads : 0), 0);
  at("confidence-text").textContent = total ? `${percent(sure / total)} of the classified reads have at least 0.9.` : "No read is classified so far.";
  at("confidence").replaceChildren(...(total ? [histogram({
    bars: bars.from.map((from, place) => ({ from, to: bars.to[place], count: bars.count[place] })), width: widthOf(at("confidence")), height: 180, xLabel: "probability",
    label: `Classified reads by probability: ${at("confidence-text").textContent}` })] : []));
}

async function showTree() {
  tree = await query("tree");
  if (!tree) {
    at("tree-text").textContent = `There is no report beside this file. millstream classify writes one: --report ${overview.name.replace(/(\.tsv)?(\.gz)?$/, "")}.kreport`;
    return;
  }
  at("tree-text").textContent = tree.rows.length < tree.of ? `The ${count(tree.rows.length)} taxa with the most reads, of ${count(tree.of)}; reads of a taxon and of those below it.` : "Reads of a taxon and of those below it.";
  drawTree();
}

function drawTree(focus = null) {
  const shown = [];
  let hidden = Infinity; // below this depth
  tree.rows.forEach((row, place) => {
    if (row.depth > hidden) return;
    hidden = folded.has(place) ? row.depth : Infinity;
    const has = (tree.rows[place + 1]?.depth ?? -1) > row.depth;
    const toggle = has ? make("button", { type: "button", "data-place": place, "aria-label": `${folded.has(place) ? "Show" : "Hide"} taxa below ${row.name}`, "aria-expanded": String(!folded.has(place)),
      onclick: () => { if (!folded.delete(place)) folded.add(place); drawTree(place); } }, folded.has(place) ? "▸" : "▾") : make("span", { class: "leaf" });
    const name = make("span", { class: "name" }, toggle, `${row.name} `, make("span", { class: "rank" }, row.code));
    name.style.setProperty("--depth", row.depth);
    shown.push(make("li", {}, name,
      meter(row.reads / Math.max(tree.rows[0].reads, 1)), make("span", { class: "value", title: `${count(row.own)} of the taxon itself` }, count(row.reads))));
  });
  at("tree").replaceChildren(...shown);
  if (focus !== null) at("tree").querySelector(`[data-place="${focus}"]`)?.focus();
}

const part = (reads) => overview.reads ? reads / overview.reads : null;

function percent(share) {
  if (share === null || share === undefined) return "–";
  return `${share === 0 ? 0 : 100 * share < 1 ? short(100 * share, 2) : (100 * share).toPrecision(3)} %`;
}

const fromTop = () => { first = 0; showTaxa(); };
at("rank").addEventListener("change", fromTop);
at("search").addEventListener("input", fromTop);
at("more-common").addEventListener("click", () => { first = Math.max(0, first - PAGE); showTaxa(); });
at("less-common").addEventListener("click", () => { first += PAGE; showTaxa(); });

await startPage("sample");
await refresh();
try { await showTree(); } catch (error) { at("tree-text").textContent = error.message; }
