for (const table of document.querySelectorAll("table.sortable")) {
  table.querySelectorAll("th").forEach((head, column) => {
    const button = document.createElement("button");
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const up = head.getAttribute("aria-sort") === "descending";
      table.querySelectorAll("th").forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      const key = (row) => row.cells[column].dataset.value ?? row.cells[column].textContent;
      const rows = [...table.tBodies[0].rows].sort((a, b) => key(a).localeCompare(key(b), undefined, { numeric: false }));
      const numeric = head.dataset.kind === "number";
      if (numeric) rows.sort((a, b) => key(a) - key(b));
      table.tBodies[0].append(...(up ? rows : rows.reverse()));
      for (const row of rows) row.classList.remove("first");
    });
  });
}
