// Every heading becomes a button that sorts its table: numbers highest first, words from A to Z, and back on the next press.
for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0];
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    const numeric = head.dataset.kind === "number";
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    const value = (row) => {
      const cell = row.cells[column];
      const text = cell.dataset.value ?? cell.textContent;
      return numeric ? Number(text) : text;
    };
    button.addEventListener("click", () => {
      const before = head.getAttribute("aria-sort");
      const up = before ? before === "descending" : !numeric;
      for (const other of heads) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      const compare = (a, b) => {
        const [x, y] = [value(a), value(b)];
        if (!numeric) return up ? x.localeCompare(y) : y.localeCompare(x);
        if (Number.isNaN(x) || Number.isNaN(y)) return Number.isNaN(x) - Number.isNaN(y);  // what was not measured stands last
        return up ? x - y : y - x;
      };
      const rows = [...body.rows].sort(compare);
      body.append(...rows);
      for (const row of rows) row.classList.remove("first");
    });
  });
}
