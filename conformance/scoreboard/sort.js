// The page is whole without this: a click on the head of a column sorts the table by it, a second one the other way round.
(() => {
  "use strict";
  const value = (row, at) => {
    const cell = row.cells[at];
    const number = parseFloat(cell.dataset.sort ?? cell.textContent);
    return Number.isNaN(number) ? cell.textContent.trim().toLowerCase() : number;
  };
  const before = (a, b) => (typeof a === typeof b ? (a < b ? -1 : a > b ? 1 : 0) : typeof a === "number" ? -1 : 1);
  for (const head of document.querySelectorAll("table.sortable thead th")) {
    const button = document.createElement("button");
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const way = head.getAttribute("aria-sort") === "descending" ? 1 : -1;
      for (const other of head.parentElement.cells) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", way === 1 ? "ascending" : "descending");
      const body = head.closest("table").tBodies[0];
      const at = head.cellIndex;
      const rows = [...body.rows].sort((a, b) => way * before(value(a, at), value(b, at)));
      body.append(...rows);
    });
  }
})();
