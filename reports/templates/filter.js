// The page is whole without this: it filters the matrix, and opens it before it is printed.
(() => {
  "use strict";
  const text = document.getElementById("model-filter");
  const folded = () => [...document.querySelectorAll("details.family")];
  if (text) {
    const only = document.getElementById("only-others");
    const count = document.getElementById("model-count");
    const families = [...document.querySelectorAll("details.family")];
    const rows = families.map((family) => [...family.querySelectorAll("tr[data-model]")]);
    const wasOpen = families.map((family) => family.open);
    const apply = () => {
      const words = text.value.toLowerCase().split(/\s+/).filter(Boolean);
      const active = words.length > 0 || only.checked;
      let shown = 0;
      families.forEach((family, i) => {
        let here = 0;
        for (const row of rows[i]) {
          const name = row.dataset.model.toLowerCase();
          const other = row.querySelector(".fail, .unexpected, .no-result, .expected") !== null;
          row.hidden = !(words.every((word) => name.includes(word)) && (!only.checked || other));
          here += row.hidden ? 0 : 1;
        }
        family.hidden = here === 0;
        family.open = active ? here > 0 : wasOpen[i];
        shown += here;
      });
      count.textContent = active ? `${shown} shown` : "";
    };
    text.addEventListener("input", apply);
    only.addEventListener("change", apply);
    document.querySelector(".filter").hidden = false;
  }
  let closed = [];
  addEventListener("beforeprint", () => {
    closed = folded().filter((one) => !one.open);
    for (const one of closed) one.open = true;
  });
  addEventListener("afterprint", () => {
    for (const one of closed) one.open = false;
  });
})();
