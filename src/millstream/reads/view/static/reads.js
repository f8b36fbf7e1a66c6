// Reads: statistics of all of them, and any single one with its tokens. Queries only what is shown.
import { query, bytes, compact, showError, count, histogram, legend, lineChart, make, meter, short, showTiles, startPage, widthOf } from "./common.js";
import { Sequence } from "./sequence.js";

const WINDOW = 1200, PAGE = 15, CLASSES = 12;
const OTHER = "other";
const at = (id) => document.getElementById(id);

let overview = null, record = null, listFirst = 0, classFirst = 0, columns = [];
const drawings = []; // redrawn when the page gets wider or narrower
const sequence = new Sequence(at("sequence"), at("readout"));

addEventListener("hashchange", openHash);
let drawn = innerWidth;
addEventListener("resize", () => {
  if (innerWidth === drawn) return;
  drawn = innerWidth;
  for (const draw of drawings) draw();
  sequence.draw();
});
addEventListener("keydown", (event) => {
  if (event.key !== "/" || /^(INPUT|SELECT|TEXTAREA)$/.test(document.activeElement?.tagName)) return;
  event.preventDefault();
  at("wanted").focus();
});

function showOverview() {
  const { files, num_files } = overview;
  const names = files.slice(0, 3).map((file) => file.name).join(", ");
  at("files").textContent = `${num_files === 1 ? "" : `${count(num_files)} files: `}${names}${num_files > 3 ? ", …" : ""}, ${overview.formats.join(", ")}`;
  at("files").title = files.map((file) => `${file.folder}/${file.name}: ${count(file.reads)} reads, ${bytes(file.bytes)}`).join("\n");
  const each = overview.index_bytes / Math.max(overview.reads, 1);
  const tiles = [
    [count(overview.reads), "reads"], [compact(overview.bases), "bases"], [bytes(overview.bytes), num_files === 1 ? "in the file" : `in ${count(num_files)} files`],
    [bytes(overview.index_bytes), `index, ${short(each, 3)} bytes per read`], [count(overview.columns.length), overview.columns.length ? `columns: ${overview.columns.map((column) => column.name).join(", ")}` : "columns from headers"],
  ];
  showTiles(at("tiles"), tiles);
  const options = [["", "none"], ["base", "base"], ["kmer(6)", "kmer(6)"], ["kmer(6, stride=6)", "kmer(6, stride=6)"], ["kmer(12, stride=12)", "kmer(12, stride=12)"]];
  if (overview.tokenizer) options.push(["given", overview.tokenizer]);
  options.push([OTHER, "another…"]);
  at("tokenizer").replaceChildren(...options.map(([value, text]) => make("option", { value }, text)));
  at("tokenizer").value = overview.tokenizer ? "given" : "";
}

// Lengths and classes are counted in the background: shown as they arrive, until all are counted.
async function showLengths() {
  try {
    const found = await query("lengths");
    const whole = found.counted === found.total;
    at("lengths-text").textContent = !found.bars ? "" : `${count(found.shortest)} to ${count(found.longest)}, median ${count(found.median)}, mean ${found.mean < 1000 ? short(found.mean, 4) : count(Math.round(found.mean))}, N50 ${count(found.n50)}`
      + (whole ? "" : `; ${compact(found.counted)} of ${compact(found.total)} reads counted so far`);
    if (found.bars) drawAs(0, () => at("lengths").replaceChildren(histogram({ bars: barsOf(found.bars), grows: found.is_log, label: `Lengths of ${count(found.counted)} reads: ${at("lengths-text").textContent}`, xLabel: "bases", width: widthOf(at("lengths")), height: 190 })));
    if (!whole) setTimeout(showLengths, 400);
  } catch (error) { showError(at("lengths"), error); }
}

async function showComposition() {
  try {
    const found = await query("composition");
    if (!found.is_done) setTimeout(showComposition, 400);
    if (!found.reads) { at("composition-text").textContent = found.is_done ? "" : "…"; return; }
    const all = found.reads === found.of;
    const parts = found.is_cut ? `, at most ${count(found.window)} bases of each` : "";
    const from = all ? `From all ${count(found.of)} reads${parts}.` : `From a sample: ${count(found.reads)} of ${count(found.of)} reads, from ${count(found.places)} positions${parts}${found.is_done ? "." : ", so far."}`;
    at("composition-text").textContent = from;
    const marks = { A: "var(--line2)", C: "var(--line0)", G: "var(--line4)", T: "var(--line1)", U: "var(--line1)" };
    const shown = found.shares.slice(0, 8), most = shown[0]?.[1] ?? 1;
    if (found.gc) shown.sort(([a], [b]) => "ACGTUN".indexOf(a) - "ACGTUN".indexOf(b));
    at("composition").replaceChildren(make("ul", { class: "shares", "aria-label": "Share of each base" }, ...shown.map(([base, share]) =>
      make("li", {}, make("b", { class: "mono" }, base), meter(share / most, marks[base] ?? "var(--grey)"), make("span", { class: "value" }, percent(share))))));
    at("gc-panel").hidden = !found.gc;
    at("quality-panel").hidden = !found.quality;
    drawings[0]?.(); // its neighbours made it narrower
    if (found.gc) {
      at("gc-text").textContent = `${percent(found.gc_mean)} of all bases; ${all ? "all reads" : "the same sample"}.`;
      drawAs(1, () => at("gc").replaceChildren(histogram({ bars: barsOf(found.gc).map((bar) => ({ ...bar, from: 100 * bar.from, to: 100 * bar.to })), label: `GC content of ${count(found.reads)} reads, ${percent(found.gc_mean)} overall`, xLabel: "GC content, %", width: widthOf(at("gc")), height: 190 })));
    }
    if (found.quality) {
      at("quality-text").textContent = `Phred; ${all ? "all reads" : "the same sample"}.`;
      const lines = [{ name: "median", x: found.quality.position, y: found.quality.median }, { name: "10th percentile", x: found.quality.position, y: found.quality.low, colour: "var(--line1)" }];
      drawAs(2, () => at("quality").replaceChildren(lineChart({ lines, label: "Base quality by position in the read", xLabel: "position", yMin: 0, width: widthOf(at("quality")), height: 170 }), legend(lines)));
    }
  } catch (error) { showError(at("composition"), error); }
}

// --- one record ---

function openHash() {
  const wanted = new URLSearchParams(location.hash.slice(1));
  if (wanted.has("tokenizer")) chooseTokenizer(wanted.get("tokenizer"));
  if (wanted.has("reverse")) at("reverse").checked = wanted.get("reverse") === "1";
  const number = Number(wanted.get("number") ?? 0), start = Number(wanted.get("start") ?? 0);
  openRecord(Number.isSafeInteger(number) && number >= 0 ? number : 0, Number.isSafeInteger(start) && start >= 0 ? start : 0);
}

function chooseTokenizer(name) {
  const select = at("tokenizer"), known = [...select.options].some((option) => option.value === name);
  select.value = known ? name : OTHER;
  at("typed").hidden = select.value !== OTHER;
  if (!known) at("typed").value = name;
}

const tokenizer = () => at("tokenizer").value === OTHER ? at("typed").value.trim() : at("tokenizer").value;

let latest = 0;
async function openRecord(number, start = 0) {
  const turn = ++latest;
  try {
    const found = await query("record", { number, start, count: WINDOW, tokenizer: tokenizer(), reverse: at("reverse").checked ? 1 : 0 });
    if (turn !== latest) return; // superseded by a newer query
    record = found;
    at("look-text").textContent = "";
    showRecord();
  } catch (error) {
    if (turn === latest) at("look-text").textContent = error.message;
  }
}

function showRecord() {
  at("shown").hidden = false;
  at("record-title").textContent = `Record ${count(record.number)}`;
  at("name").textContent = record.name;
  const facts = [["number", `${count(record.number)} of ${count(record.of)}`], ["length", `${count(record.length)} bases`], ...(overview.num_files > 1 ? [["file", record.file], ["in the file", count(record.row)]] : []), ...Object.entries(record.columns)];
  at("facts").replaceChildren(...facts.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value ?? "–"))));
  at("earlier").disabled = record.number === 0;
  at("later").disabled = record.number + 1 >= record.of;
  at("window").hidden = record.length <= WINDOW;
  at("left").disabled = record.start === 0;
  at("right").disabled = record.end >= record.length;
  at("from").max = at("slide").max = Math.max(0, record.length - 1);
  at("slide").step = Math.max(1, Math.floor(record.length / 1000));
  at("from").value = at("slide").value = record.start;
  sequence.show(record);
  at("sequence-text").textContent = [
    record.length ? `Bases ${count(record.start)} to ${count(record.end)} of ${count(record.length)}, counted from 0${at("reverse").checked ? " on the reverse complement" : ""}.` : "No bases.",
    record.quality ? "Below each line: base qualities." : "",
  ].join(" ");
  for (const row of at("rows").children) row.toggleAttribute("aria-current", Number(row.dataset.number) === record.number);
  const place = new URLSearchParams({ number: record.number, ...(record.start ? { start: record.start } : {}), ...(tokenizer() ? { tokenizer: tokenizer() } : {}), ...(at("reverse").checked ? { reverse: 1 } : {}) });
  history.replaceState(null, "", `#${place}`);
}

const again = () => { if (record) openRecord(record.number, record.start); };
at("reverse").addEventListener("change", () => { if (record) openRecord(record.number, 0); });
at("tokenizer").addEventListener("change", () => {
  at("typed").hidden = at("tokenizer").value !== OTHER;
  if (at("tokenizer").value === OTHER && !at("typed").value) at("typed").focus(); else again();
});
at("typed").addEventListener("change", again);
at("earlier").addEventListener("click", () => openRecord(record.number - 1));
at("later").addEventListener("click", () => openRecord(record.number + 1));
at("left").addEventListener("click", () => openRecord(record.number, Math.max(0, record.start - WINDOW)));
at("right").addEventListener("click", () => openRecord(record.number, record.end));
at("from").addEventListener("change", () => { if (at("from").validity.valid) openRecord(record.number, Number(at("from").value)); });
at("slide").addEventListener("input", () => openRecord(record.number, Number(at("slide").value)));
at("look").addEventListener("submit", (event) => {
  event.preventDefault();
  const wanted = at("wanted").value.trim();
  if (/^\d+$/.test(wanted) && Number(wanted) < overview.reads) openRecord(Number(wanted));
  else if (wanted) lookUp(wanted);
});

async function lookUp(name) {
  const turn = ++latest;
  at("look-text").textContent = "Searching …";
  try {
    const found = await query("find", { name });
    if (turn !== latest) return;
    if (found.is_making) {
      at("look-text").textContent = `Building an index of names (once; reads all ${bytes(overview.bytes)}). The record will be shown then.`;
      setTimeout(() => { if (turn === latest) lookUp(name); }, 1000);
    } else if (!found.numbers.length) {
      at("look-text").textContent = /^\d+$/.test(name) ? `No record has the number or name ${name}; numbers go from 0 to ${count(overview.reads - 1)}.` : `No record is named ${name}. The name is the complete first word of the header.`;
    } else {
      await openRecord(found.numbers[0]);
      if (found.found > 1) at("look-text").textContent = `${count(found.found)} records have this name; this is the first.`;
    }
  } catch (error) { if (turn === latest) at("look-text").textContent = error.message; }
}

// --- classes ---

function chooseColumn() {
  columns = overview.columns.filter((column) => column.is_indexed).map((column) => column.name);
  at("column").hidden = at("search").hidden = !columns.length;
  if (!columns.length) {
    at("classes-text").textContent = "The index has no columns. Columns come from named groups of a header pattern: millstream index READS --header-regex '^(?P<class_id>\\d+)'";
    return;
  }
  at("column").replaceChildren(...columns.map((name) => make("option", { value: name }, name)));
  at("column").value = columns.find((name) => /class|label|species|tax/i.test(name)) ?? columns[0];
  showClasses();
}

let classTurn = 0;
async function showClasses() {
  const turn = ++classTurn, column = at("column").value;
  try {
    const found = await query("classes", { column, search: at("search").value.trim(), first: classFirst, count: CLASSES });
    if (turn !== classTurn) return;
    const whole = found.counted === found.total;
    const without = found.without ? `, ${count(found.without)} reads without one` : "";
    at("classes-text").textContent = `${count(found.distinct)} values of ${column}${without}`
      + (at("search").value.trim() ? `; ${count(found.found)} fit, of ${count(found.found_reads)} reads` : "")
      + (whole ? "" : `; ${compact(found.counted)} of ${compact(found.total)} reads counted so far`);
    const total = Math.max(found.counted, 1);
    at("class-rows").replaceChildren(make("ul", { class: "shares", "aria-label": `Reads of each ${column}` }, ...found.rows.map(([value, reads], place) =>
      make("li", {}, make("span", { title: found.names[place] }, found.names[place] ? `${value} ${found.names[place]}` : value), meter(reads / Math.max(found.most_reads, 1)), make("span", { class: "value" }, `${count(reads)} · ${percent(reads / total)}`)))));
    at("class-pager").hidden = found.found <= CLASSES;
    at("class-left").disabled = classFirst === 0;
    at("class-right").disabled = classFirst + CLASSES >= found.found;
    at("class-place").textContent = found.rows.length ? `${count(classFirst + 1)} to ${count(classFirst + found.rows.length)} of ${count(found.found)}` : "";
    if (!whole) setTimeout(() => { if (turn === classTurn) showClasses(); }, 500);
  } catch (error) { if (turn === classTurn) showError(at("class-rows"), error); }
}

const fromTop = () => { classFirst = 0; showClasses(); };
at("column").addEventListener("change", () => { at("search").value = ""; fromTop(); });
at("search").addEventListener("input", fromTop);
at("class-left").addEventListener("click", () => { classFirst = Math.max(0, classFirst - CLASSES); showClasses(); });
at("class-right").addEventListener("click", () => { classFirst += CLASSES; showClasses(); });

// --- the list ---

let listTurn = 0;
async function showList(first) {
  const turn = ++listTurn;
  listFirst = Math.max(0, Math.min(first, overview.reads - 1));
  try {
    const found = await query("list", { first: listFirst, count: PAGE });
    if (turn !== listTurn) return;
    at("rows").replaceChildren(...found.rows.map((row) => make("tr", { "data-number": row.number, "aria-current": record?.number === row.number },
      make("td", { class: "number" }, make("button", { type: "button", "aria-label": `Show record ${row.number}`, onclick: () => { openRecord(row.number); at("record").scrollIntoView({ block: "nearest" }); } }, count(row.number))),
      make("td", { class: "name-cell", title: row.name }, row.name), make("td", { class: "number" }, count(row.length)), make("td", { class: "mono" }, row.bases + (row.length > row.bases.length ? "…" : "")))));
    at("first").value = listFirst;
    at("list-left").disabled = listFirst === 0;
    at("list-right").disabled = listFirst + PAGE >= overview.reads;
    at("list-text").textContent = `to ${count(listFirst + found.rows.length - 1)} of ${count(overview.reads)}`;
  } catch (error) { if (turn === listTurn) at("list-text").textContent = error.message; }
}

at("list-left").addEventListener("click", () => showList(listFirst - PAGE));
at("list-right").addEventListener("click", () => showList(listFirst + PAGE));
at("first").addEventListener("change", () => showList(Math.trunc(Number(at("first").value)) || 0));
at("go").addEventListener("submit", (event) => event.preventDefault());

// --- helpers ---

function drawAs(place, draw) {
  drawings[place] = draw;
  draw();
}

function barsOf({ from, to, count: counts }) {
  return from.map((low, place) => ({ from: low, to: to[place], count: counts[place] }));
}

function percent(share) {
  return share === null || share === undefined ? "–" : `${(100 * share).toPrecision(100 * share < 1 ? 2 : 3)} %`;
}

// Last, when everything above is defined.
await startPage("reads");
try {
  overview = await query("overview");
  showOverview();
} catch (error) {
  showError(at("files"), error);
  throw error;
}
showLengths();
showComposition();
if (overview.reads) { showList(0); openHash(); } else at("look-text").textContent = "There are no reads.";
chooseColumn();
