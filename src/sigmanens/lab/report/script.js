"use strict";
(() => {
  const root = document.documentElement;
  const { plots } = JSON.parse(document.getElementById("report-data").textContent);
  const config = { displayModeBar: false, scrollZoom: false, doubleClick: false };
  const hidden = {};

  // Plots -------------------------------------------------------------------------------------

  // A copy of a plotly specification with every "var(--name)" replaced by the page's colour.
  const resolve = (value, css) => {
    if (typeof value === "string") {
      const name = /^var\((--[\w-]+)\)$/.exec(value);
      return name ? css.getPropertyValue(name[1]).trim() : value;
    }
    if (Array.isArray(value)) return value.map((item) => resolve(item, css));
    if (value === null || typeof value !== "object") return value;
    return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, resolve(item, css)]));
  };

  const draw = (id) => {
    const css = getComputedStyle(root);
    const place = document.getElementById(id);
    const off = hidden[id.slice(0, id.lastIndexOf("-"))] || new Set();
    const traces = resolve(plots[id].traces, css);
    for (const trace of traces) trace.visible = !off.has(trace.meta);
    const layout = resolve(plots[id].layout, css);
    layout.width = place.clientWidth;
    layout.height = place.clientHeight;
    return Plotly.react(place, traces, layout, config);
  };
  const drawAll = () => Promise.all(Object.keys(plots).map(draw));
  const resized = new ResizeObserver((entries) => {
    for (const { target } of entries) {
      if (target.clientWidth && target.clientWidth !== target.layout.width) draw(target.id);
    }
  });

  for (const button of document.querySelectorAll("button.key")) {
    button.addEventListener("click", () => {
      const { figure, group } = button.dataset;
      const off = (hidden[figure] = hidden[figure] || new Set());
      const show = off.delete(group);
      if (!show) off.add(group);
      button.setAttribute("aria-pressed", String(show));
      Object.keys(plots).filter((id) => id.startsWith(`${figure}-`)).forEach(draw);
    });
  }

  // Tables ------------------------------------------------------------------------------------

  const value = (cell) => {
    const raw = cell.dataset.v;
    return raw === "" || Number.isNaN(Number(raw)) ? raw : Number(raw);
  };

  // Numbers by size, words by letters; what was not measured stays last either way.
  const compare = (a, b, sign) => {
    if (a === "" || b === "") return (a === "") - (b === "");
    if (typeof a === "number" && typeof b === "number") return sign * (a - b);
    return sign * String(a).localeCompare(String(b), undefined, { numeric: true });
  };

  const next = { none: "ascending", ascending: "descending", descending: "none" };
  for (const table of document.querySelectorAll("div.table table")) {
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
      ? [...table.tHead.rows[0].cells].flatMap((cell) => Array(cell.colSpan).fill(cell.textContent))
      : [];
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

  const copy = async (text) => {
    try {
      await navigator.clipboard.writeText(text);
      return true;
    } catch {
      const area = document.createElement("textarea");
      area.value = text;
      document.body.append(area);
      area.select();
      const done = document.execCommand("copy");
      area.remove();
      return done;
    }
  };

  for (const button of document.querySelectorAll("button.copy")) {
    button.addEventListener("click", async () => {
      const table = document.getElementById(button.getAttribute("aria-controls"));
      const done = await copy(tsv(table));
      button.focus();
      button.nextElementSibling.textContent = done
        ? `${table.tBodies[0].rows.length} rows copied`
        : "The browser refused; select the table by hand";
    });
  }

  // Theme and print ---------------------------------------------------------------------------

  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  window.addEventListener("beforeprint", () => {
    root.dataset.theme = "light";
    root.classList.add("printing");
    drawAll();
  });
  window.addEventListener("afterprint", () => {
    delete root.dataset.theme;
    root.classList.remove("printing");
    drawAll();
  });

  drawAll().then(() => {
    for (const id of Object.keys(plots)) resized.observe(document.getElementById(id));
    root.dataset.drawn = String(Object.keys(plots).length);
  });
})();
