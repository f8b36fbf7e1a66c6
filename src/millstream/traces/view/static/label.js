// Answers one after another, and the verdict of a person on each, by single keys.
import { query, showError, count, make, startPage } from "./common.js";

const byId = (id) => document.getElementById(id);
const KEYS = { r: () => judge("right"), w: () => judge("wrong"), u: () => judge("unsure"), z: undo, Backspace: undo, ArrowLeft: () => move(-1), ArrowRight: () => move(1) };
const done = []; // what can be undone: record, its place and the verdict before
let shown = null, work = Promise.resolve();

await startPage("label");
const about = await query("about").catch((error) => { showError(byId("problem"), error); throw error; });
byId("facts").replaceChildren(`${about.path}: ${count(about.records)} answers. Verdicts are appended to verdicts.jsonl; millstream label uses them.`);
byId("verdict").append(...Object.entries(about.verdicts).map(([name, number]) => make("option", { value: name }, `${name} (${count(number)})`)));
for (const id of ["order", "verdict"]) byId(id).addEventListener("change", () => { byId(id).blur(); done.length = 0; first(); });
byId("filters").addEventListener("submit", (event) => event.preventDefault());
for (const button of document.querySelectorAll("#choices [data-verdict]")) button.addEventListener("click", () => inTurn(() => judge(button.dataset.verdict)));
for (const [id, act] of [["undo", undo], ["previous", () => move(-1)], ["next", () => move(1)]]) byId(id).addEventListener("click", () => inTurn(act));
addEventListener("keydown", (event) => {
  const act = KEYS[event.key.length === 1 ? event.key.toLowerCase() : event.key];
  if (!act || event.ctrlKey || event.metaKey || event.altKey || event.repeat || event.target.closest("select")) return;
  event.preventDefault();
  inTurn(act);
});
first();

// Keys may be faster than the server: each acts on the answer that the one before it leads to.
function inTurn(act) {
  work = work.then(act).then(() => byId("problem").replaceChildren(), (error) => showError(byId("problem"), error));
}

function first() {
  inTurn(() => show({}));
}

async function show(where) {
  shown = await query("answer", { order: byId("order").value, verdict: byId("verdict").value, ...where });
  byId("progress").textContent = `${count(shown.done)} of ${count(shown.total)} judged`;
  byId("answer").hidden = shown.total === 0;
  byId("finished").hidden = shown.done < shown.total;
  if (shown.total === 0) return;
  byId("place").textContent = `${count(shown.place + 1)} of ${count(shown.total)}, record ${count(shown.number)}, ${shown.id}`;
  byId("question").textContent = shown.question ?? "(no question)";
  byId("context").hidden = !shown.context;
  byId("context").querySelector("p").textContent = shown.context;
  byId("references").replaceChildren(...shown.references.map((text) => make("li", {}, make("bdi", {}, text))));
  byId("text").textContent = shown.answer ?? "(no answer)";
  byId("text").parentNode.scrollTop = 0;
  for (const button of document.querySelectorAll("#choices [data-verdict]")) button.setAttribute("aria-pressed", button.dataset.verdict === shown.human);
  byId("undo").disabled = !done.length;
}

async function judge(verdict) {
  if (!shown?.total) return;
  const { number, id, hash, place, human } = shown;
  await query("set", { number, id, hash, verdict }, "POST");
  done.push({ number, id, hash, place, before: human });
  await show({ after: place });
}

async function undo() {
  const last = done.at(-1);
  if (!last) return;
  await query("set", { number: last.number, id: last.id, hash: last.hash, verdict: last.before }, "POST");
  done.pop();
  await show({ place: last.place });
}

async function move(by) {
  if (shown?.total) await show({ place: Math.max(0, Math.min(shown.place + by, shown.total - 1)) });
}
