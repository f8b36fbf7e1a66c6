// The records of a store; the hash of the address is the number of the open record.
import { query, bytes, showError, count, make, meter, startPage } from "./common.js";
import { closeTrace, human, showTrace } from "./trace.js";

const byId = (id) => document.getElementById(id);
const filter = { q: "", verdict: "", part: "", detector: "", sort: "number", page: 0 };
let shown = { rows: [], pages: 1 }, latest = 0, about = null;

await startPage("traces");
try {
  await fill();
} catch (error) {
  showError(byId("problem"), error);
  throw error;
}
for (const id of ["verdict", "part", "detector", "sort"]) byId(id).addEventListener("change", () => change(id, byId(id).value));
byId("q").addEventListener("input", () => change("q", byId("q").value.trim()));
byId("filters").addEventListener("submit", (event) => { event.preventDefault(); firstLink()?.focus(); });
byId("previous").addEventListener("click", () => turn(filter.page - 1));
byId("next").addEventListener("click", () => turn(filter.page + 1));
byId("page").addEventListener("change", () => turn((Number.parseInt(byId("page").value, 10) || 1) - 1));
byId("records").addEventListener("click", (event) => {
  const row = event.target.closest("tbody tr");
  if (row && !event.target.closest("a") && getSelection().isCollapsed) location.hash = row.dataset.number;
});
addEventListener("hashchange", route);
addEventListener("keydown", press);
await list();
route();

// Facts about the store, and filter options. Labels and scores of large stores arrive a moment later.
async function fill() {
  about = await query("about");
  const model = about.config.model ? `, ${about.config.model}` : "";
  const facts = `${about.path}: ${count(about.records)} traces in ${count(about.shards)} shard${about.shards === 1 ? "" : "s"}, ${bytes(about.bytes)}${model}`
    + (about.run ? `; scores of ${about.run}` : "");
  byId("facts").replaceChildren(facts, ...about.problems.map((problem) => make("span", { class: "error" }, problem)));
  if (!about.ready) { setTimeout(() => fill().then(list).catch((error) => showError(byId("problem"), error)), 300); return; }
  options("verdict", Object.entries(about.verdicts).map(([name, number]) => [name, `${name} (${count(number)})`]));
  options("part", about.parts.map((name) => [name, name]));
  byId("detector").replaceChildren(...about.detectors.map((name) => make("option", { value: name }, name)));
  filter.detector = about.detectors[0] ?? "";
  const without = !about.detectors.length;
  for (const id of ["part", "detector"]) byId(id).closest("label").hidden = without;
  for (const option of byId("sort").options) option.disabled = without && option.value !== "number";
  document.querySelector("#records th.score").hidden = without;
}

function options(id, pairs) {
  const any = make("option", { value: "" }, "any");
  byId(id).replaceChildren(any, ...pairs.map(([value, text]) => make("option", { value }, text)));
}

function change(name, value) {
  filter[name] = value;
  filter.page = 0;
  list();
}

function turn(page) {
  filter.page = Math.max(0, Math.min(page, shown.pages - 1));
  return list();
}

async function list() {
  const mine = ++latest;
  try {
    const found = await query("list", filter);
    if (mine !== latest) return; // superseded by a newer query
    if (!found.ready && !found.rows.length && about.records) {
      byId("total").textContent = "reading all texts (first search only) …";
      setTimeout(() => { if (mine === latest) list(); }, 300);
      return;
    }
    byId("problem").replaceChildren();
    shown = found;
    filter.page = found.page;
    draw();
  } catch (error) {
    if (mine === latest) showError(byId("problem"), error);
  }
}

function draw() {
  byId("records").tBodies[0].replaceChildren(...shown.rows.map(row));
  byId("total").textContent = shown.total === about.records ? `${count(shown.total)} traces` : `${count(shown.total)} of ${count(about.records)} traces`;
  byId("page").value = filter.page + 1;
  byId("page").max = shown.pages;
  byId("pages").textContent = `of ${count(shown.pages)}`;
  byId("previous").disabled = filter.page === 0;
  byId("next").disabled = filter.page >= shown.pages - 1;
}

function row(record) {
  const clip = (text) => make("td", {}, make("bdi", { class: "clip" }, text ?? ""));
  const question = record.question ?? record.id ?? `record ${record.number}`;
  const answer = record.status === "error" ? "(failed)" : record.answer;
  const score = make("td", { class: "score", hidden: !about.detectors.length });
  if (record.score !== null && record.score !== undefined) {
    score.append(record.score.toFixed(3));
    if (record.score >= 0 && record.score <= 1) score.append(meter(record.score));
  } else {
    score.append(make("span", { class: "soft", title: "Detectors score only the validation and test splits of a run." }, "not scored"));
  }
  return make("tr", { "data-number": record.number },
    make("td", { class: "number" }, count(record.number)),
    make("td", {}, make("a", { href: `#${record.number}`, class: "clip" }, make("bdi", {}, question))),
    clip(answer), clip(record.references.slice(0, 6).join(" · ")),
    make("td", {}, record.verdict ? make("span", { class: `verdict ${record.verdict}` }, record.verdict) : "", human(record)), score);
}

function route() {
  const number = /^#\d+$/.test(location.hash) ? Number(location.hash.slice(1)) : null;
  const list = byId("list"), trace = byId("trace");
  list.hidden = number !== null;
  trace.hidden = number === null;
  if (number !== null) { shown.open = number; showTrace(trace, number, { step }); scrollTo(0, 0); return; }
  closeTrace();
  document.querySelector(`#records a[href="#${shown.open ?? ""}"]`)?.focus();
}

// The next or previous record of the list, across page boundaries.
async function step(number, by) {
  let at = shown.rows.findIndex((row) => row.number === number);
  if (at < 0) { // opened by address
    if (number + by >= 0 && number + by < about.records) location.hash = number + by;
    return;
  }
  at += by;
  if (at < 0 || at >= shown.rows.length) {
    const page = filter.page + by;
    if (page < 0 || page >= shown.pages) return;
    await turn(page);
    at = by > 0 ? 0 : shown.rows.length - 1;
  }
  location.hash = shown.rows[at].number;
}

const firstLink = () => document.querySelector("#records tbody a");

function press(event) {
  const typing = event.target.closest("input, select, textarea");
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "/" && !typing) {
    event.preventDefault();
    shown.open = null; // focus goes to the search, not to the trace that was open
    if (!byId("trace").hidden) location.hash = "";
    setTimeout(() => byId("q").select());
  } else if (event.key === "Escape" && !byId("trace").hidden) {
    location.hash = "";
  } else if (!byId("trace").hidden && !typing && ["ArrowLeft", "ArrowRight"].includes(event.key)) {
    step(Number(location.hash.slice(1)), event.key === "ArrowRight" ? 1 : -1);
  } else if (["ArrowDown", "ArrowUp"].includes(event.key) && !byId("list").hidden && !event.target.closest("select, input[type=number]")) {
    const links = [...document.querySelectorAll("#records tbody a")], at = links.indexOf(document.activeElement);
    if (at < 0 && event.target.id !== "q" && event.target !== document.body) return; // the body: nothing has the focus
    event.preventDefault();
    (links[Math.max(0, at + (event.key === "ArrowDown" ? 1 : -1))] ?? links.at(-1))?.focus();
  }
}
