"use strict";

// Dark or light as the system prefers, until the button is pressed; remembered if the browser allows it.
const root = document.documentElement;
const button = document.getElementById("theme");
const dark = matchMedia("(prefers-color-scheme: dark)");
function setTheme(theme) {
  if (theme) root.dataset.theme = theme;
  const isDark = root.dataset.theme ? root.dataset.theme === "dark" : dark.matches;
  button.textContent = isDark ? "Light" : "Dark";
  return isDark;
}
function remembered() {
  try { return localStorage.getItem("millstream-theme"); } catch { return null; }
}
function remember(theme) {
  try { localStorage.setItem("millstream-theme", theme); } catch { /* a page from a file may have no storage */ }
}
setTheme(["dark", "light"].includes(remembered()) ? remembered() : "");
button.hidden = false;
button.addEventListener("click", () => {
  const theme = setTheme("") ? "light" : "dark";
  setTheme(theme);
  remember(theme);
});
dark.addEventListener("change", () => setTheme(""));

// The first click sorts numbers in descending order and texts in ascending order; empty cells stay at the end.
function sortBy(table, heading) {
  const isNumber = heading.classList.contains("number");
  const before = heading.getAttribute("aria-sort");
  const descending = before ? before === "ascending" : isNumber;
  const value = (row) => row.cells[heading.cellIndex].dataset.order;
  const compare = (a, b) => isNumber ? Number(a) - Number(b) : a.localeCompare(b);
  const rows = [...table.tBodies[0].rows];
  const known = rows.filter((row) => value(row) !== "");
  known.sort((a, b) => (descending ? -1 : 1) * compare(value(a), value(b)));
  table.tBodies[0].append(...known, ...rows.filter((row) => value(row) === ""));
  for (const other of heading.parentElement.cells) other.removeAttribute("aria-sort");
  heading.setAttribute("aria-sort", descending ? "descending" : "ascending");
}
for (const table of document.querySelectorAll("table.sortable")) {
  table.tHead.addEventListener("click", (event) => {
    const heading = event.target.closest("button")?.closest("th");
    if (heading) sortBy(table, heading);
  });
}
