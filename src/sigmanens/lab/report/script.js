"use strict";
(() => {
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];
  const plots = (root) => all(".plotly-graph-div", root);

  // Legends: each button shows or hides a method in all panels of its figure.
  const show = (figure, group, on) => {
    for (const plot of plots(document.getElementById(figure))) {
      const at = plot.data.flatMap((trace, i) => (trace.meta === group ? [i] : []));
      if (at.length) Plotly.restyle(plot, { visible: on }, at);
    }
  };
  const press = (button, on) => {
    button.setAttribute("aria-pressed", String(on));
    show(button.dataset.figure, button.dataset.group, on);
  };
  for (const button of all("button.key")) {
    button.addEventListener("click", () => press(button, button.ariaPressed !== "true"));
  }
  for (const button of all("button.every")) {
    const more = button.textContent;
    const legend = button.closest("ul");
    button.addEventListener("click", () => {
      const open = legend.classList.toggle("open");
      button.setAttribute("aria-expanded", String(open));
      button.textContent = open ? button.dataset.less : more;
      for (const key of all(".rest button", legend)) press(key, open);
    });
  }

  // One run in detail: its plots are drawn when it is selected.
  const picker = document.getElementById("pick");
  const select = (group) => {
    picker.value = group;
    const view = document.getElementById("run-view");
    plots(view).forEach((plot) => Plotly.purge(plot));
    view.replaceChildren(document.getElementById(`run-${group}`).content.cloneNode(true));
  };
  const say = (group) => {
    if (!document.getElementById(`run-${group}`)) return;
    select(group);
    const name = picker.selectedOptions[0].textContent;
    document.getElementById("picked").textContent = `${name} is shown in detail`;
  };
  if (picker) {
    select(picker.value);
    picker.addEventListener("change", () => say(picker.value));
    for (const link of all("a[data-run]")) {
      link.addEventListener("click", () => say(link.dataset.run));
    }
    for (const plot of all("#frontier .plotly-graph-div")) {
      plot.on("plotly_click", ({ points }) => say(points[0].data.meta));
    }
  }

  // Differences: every method minus a chosen one.
  const reference = document.getElementById("reference");
  if (reference) {
    const data = JSON.parse(document.getElementById("differences-data").textContent);
    const table = document.getElementById("differences-table");
    const order = [...reference.options].map((option) => option.value);
    reference.addEventListener("change", () => {
      const { rows, halves } = data[reference.value];
      for (const row of table.tBodies[0].rows) {
        rows[order.indexOf(row.dataset.group)].forEach(([text, value, mark, hint], i) => {
          const cell = row.cells[i + 1];
          cell.dataset.v = value ?? "";
          cell.title = hint;
          cell.textContent = text;
          if (!mark) return;
          const badge = document.createElement("span");
          badge.textContent = mark;
          badge.className = `mark ${mark.replace("†", "")}`;
          cell.append(" ", badge);
        });
      }
      halves.forEach((text, i) => { table.tFoot.rows[0].cells[i + 1].textContent = text; });
    });
  }

  // Tables: numbers sort by size, words by letters; what was not measured stays last either way.
  const value = (cell) => {
    const raw = cell.dataset.v;
    return raw === "" || Number.isNaN(Number(raw)) ? raw : Number(raw);
  };
  const compare = (a, b, sign) => {
    if (a === "" || b === "") return (a === "") - (b === "");
    if (typeof a === "number" && typeof b === "number") return sign * (a - b);
    return sign * String(a).localeCompare(String(b), undefined, { numeric: true });
  };
  const next = { none: "ascending", ascending: "descending", descending: "none" };
  for (const table of all("div.table table")) {
    const body = table.tBodies[0];
    const original = [...body.rows];
    const heads = [...table.tHead.rows[table.tHead.rows.length - 1].cells];
    heads.forEach((head, column) => {
      head.querySelector("button").addEventListener("click", () => {
        const order = next[head.getAttribute("aria-sort")];
        for (const other of heads) other.setAttribute("aria-sort", "none");
        head.setAttribute("aria-sort", order);
        const sign = order === "descending" ? -1 : 1;
        const rows = [...original];
        if (order !== "none") {
          rows.sort((a, b) => compare(value(a.cells[column]), value(b.cells[column]), sign));
        }
        body.append(...rows);
      });
    });
  }

  // Tab-separated values at full precision; a column with a spread is followed by its "sd".
  const tsv = (table) => {
    const head = [...table.tHead.rows[table.tHead.rows.length - 1].cells];
    const bands = table.tHead.rows.length > 1
      ? [...table.tHead.rows[0].cells].flatMap((c) => Array(c.colSpan).fill(c.textContent)) : [];
    const rows = [...table.tBodies[0].rows];
    const spread = head.map((_, i) => rows.some((row) => row.cells[i].dataset.sd !== undefined));
    const names = head.map((cell, i) => [bands[i], cell.textContent].filter(Boolean).join(" "));
    const clean = (text) => text.replace(/[\t\r\n]+/g, " ");
    const line = (texts, sds) =>
      texts.flatMap((text, i) => (spread[i] ? [clean(text), sds[i]] : [clean(text)])).join("\t");
    return [
      line(names, names.map((name) => clean(`${name} sd`))),
      ...rows.map((row) => line(
        [...row.cells].map((cell) => cell.dataset.v),
        [...row.cells].map((cell) => cell.dataset.sd ?? ""),
      )),
    ].join("\n");
  };
  for (const button of all("button.copy")) {
    button.addEventListener("click", async () => {
      const table = document.getElementById(button.getAttribute("aria-controls"));
      const status = button.nextElementSibling;
      try {
        await navigator.clipboard.writeText(tsv(table));
        status.textContent = `${table.tBodies[0].rows.length} rows copied`;
      } catch {
        status.textContent = "The browser refused; select the table by hand";
      }
    });
  }
  // A plot is drawn before its neighbours are there, and as wide as if it were alone.
  for (const plot of plots(document)) if (plot.offsetWidth) Plotly.Plots.resize(plot);
  document.documentElement.dataset.drawn = String(plots(document).length);
})();
