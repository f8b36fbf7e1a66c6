const button = document.getElementById("theme");
followTheme(button);
button.hidden = false;

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
