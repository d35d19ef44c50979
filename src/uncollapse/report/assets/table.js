"use strict";
// Makes the table of numbers sortable, saves it as CSV, and copies lines of code. Works without the figures.
(() => {
  const byId = (id) => document.getElementById(id);

  // ---- table
  const table = byId("numbers-table");
  const valueOf = (cell) => cell.dataset.v ?? cell.textContent;
  function compare(a, b) {
    const [x, y] = [Number(a), Number(b)];
    if (Number.isNaN(x) && Number.isNaN(y)) return a.localeCompare(b, "en", { numeric: true });
    return Number.isNaN(x) ? 1 : Number.isNaN(y) ? -1 : x - y;
  }
  function sortBy(column) {
    const heads = [...table.tHead.rows[0].cells];
    const down = heads[column].getAttribute("aria-sort") === "ascending";
    heads.forEach((head) => head.setAttribute("aria-sort", "none"));
    heads[column].setAttribute("aria-sort", down ? "descending" : "ascending");
    const rows = [...table.tBodies[0].rows];
    const missing = (row) => valueOf(row.cells[column]) === "nan";
    rows.sort((a, b) => {
      if (missing(a) || missing(b)) return missing(a) - missing(b); // what was not measured stays at the end
      return (down ? -1 : 1) * compare(valueOf(a.cells[column]), valueOf(b.cells[column]));
    });
    table.tBodies[0].append(...rows);
  }
  table.tHead.querySelectorAll("button").forEach((button, i) => button.addEventListener("click", () => sortBy(i)));

  function asCsv() {
    const field = (text) => (/[",\n\r]/.test(text) ? `"${text.replace(/"/g, '""')}"` : text);
    const safe = (text) => (/^[=+@\t\r]|^-(?!\d|inf)/.test(text) ? `'${text}` : text); // no formulas in spreadsheets
    const heads = [...table.tHead.rows[0].cells].map((cell) => cell.textContent);
    const measured = (cell) => (valueOf(cell) === "nan" ? "" : valueOf(cell));
    const rows = [...table.tBodies[0].rows].map((row) => [...row.cells].map(measured));
    return [heads, ...rows].map((row) => row.map((text) => field(safe(text))).join(",")).join("\r\n");
  }
  const download = byId("csv");
  download.hidden = false;
  download.addEventListener("click", () => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([asCsv()], { type: "text/csv" }));
    link.download = "uncollapse.csv";
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  });

  // ---- copy buttons
  for (const button of document.querySelectorAll(".copy")) {
    button.addEventListener("click", async () => {
      const code = button.previousElementSibling;
      try {
        await navigator.clipboard.writeText(code.textContent);
        button.textContent = "Copied";
      } catch { // no permission: leave it selected, for the user's own copy command
        getSelection().selectAllChildren(code);
        button.textContent = "Selected";
      }
      setTimeout(() => { button.textContent = "Copy"; }, 1600);
    });
  }
})();
