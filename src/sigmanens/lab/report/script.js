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

  let selected = null;

  // The point of the selected run on a frontier, ringed.
  const ring = (traces, css) => {
    const point = traces.find((trace) => trace.customdata && trace.meta === selected);
    if (!point || point.visible === false) return [];
    const line = { width: 2.5, color: css.getPropertyValue("--focus").trim() };
    const marker = { symbol: "circle-open", size: 25, color: line.color, line };
    return [{ type: "scatter", mode: "markers", x: point.x, y: point.y, marker,
      hoverinfo: "skip", cliponaxis: false }];
  };

  // Draws a plot that is on show; one inside something closed waits until it is opened.
  const draw = (id) => {
    const css = getComputedStyle(root);
    const place = document.getElementById(id);
    if (!place.clientWidth || place.checkVisibility?.() === false) return null;
    const off = hidden[id.slice(0, id.lastIndexOf("-"))] || new Set();
    const traces = resolve(plots[id].traces, css);
    for (const trace of traces) trace.visible = !off.has(trace.meta);
    traces.push(...ring(traces, css));
    const layout = resolve(plots[id].layout, css);
    layout.width = place.clientWidth;
    layout.height = place.clientHeight;
    return Plotly.react(place, traces, layout, config);
  };
  const ids = Object.keys(plots);
  const drawAll = () => Promise.all(ids.map(draw));
  const drawFigure = (figure) => ids.filter((id) => id.startsWith(`${figure}-`)).forEach(draw);
  const resized = new ResizeObserver((entries) => {
    for (const { target } of entries) {
      if (target.clientWidth && target.clientWidth !== target.layout?.width) draw(target.id);
    }
  });

  for (const part of document.querySelectorAll("details.more")) {
    const inside = [...part.querySelectorAll(".plot")].map((plot) => plot.id);
    part.addEventListener("toggle", () => inside.forEach(draw));
  }

  // Legends: each button shows or hides a method in all panels of its figure.
  const switchTo = (button, show) => {
    const { figure, group } = button.dataset;
    const off = (hidden[figure] = hidden[figure] || new Set());
    if (show) off.delete(group);
    else off.add(group);
    button.setAttribute("aria-pressed", String(show));
  };
  for (const button of document.querySelectorAll("button.key")) {
    const pressed = () => button.getAttribute("aria-pressed") === "true";
    switchTo(button, pressed());
    button.addEventListener("click", () => {
      switchTo(button, !pressed());
      drawFigure(button.dataset.figure);
    });
  }
  for (const button of document.querySelectorAll("button.every")) {
    const { figure, off, less } = button.dataset;
    const more = button.textContent;
    const legend = button.closest("ul");
    button.addEventListener("click", () => {
      const open = legend.classList.toggle("open");
      button.setAttribute("aria-expanded", String(open));
      button.textContent = open ? less : more;
      if (off !== "1") return;
      for (const key of legend.querySelectorAll(".rest button")) switchTo(key, open);
      drawFigure(figure);
    });
  }

  // One run in detail: selected in the list, on the frontier or by its name in the results ----

  const picker = document.getElementById("pick");
  const select = (group) => {
    selected = group;
    picker.value = group;
    for (const part of document.querySelectorAll("div.run")) {
      const show = part.id === `run-${group}`;
      if (!show && !part.hidden) part.querySelectorAll(".plot").forEach((p) => Plotly.purge(p));
      part.hidden = !show;
    }
    drawFigure(`run-${group}`);
    drawFigure("frontier");
  };
  const say = (group) => {
    select(group);
    const name = picker.selectedOptions[0].textContent;
    document.getElementById("picked").textContent = `${name} is shown below the frontier`;
  };
  const listen = (place) => {
    place.on("plotly_click", ({ points }) => say(points[0].data.meta));
    const cursor = (name) => () => {
      for (const layer of place.querySelectorAll(".nsewdrag")) layer.style.cursor = name;
    };
    place.on("plotly_hover", cursor("pointer"));
    place.on("plotly_unhover", cursor(""));
  };
  if (picker) {
    selected = picker.value;
    picker.addEventListener("change", () => say(picker.value));
    for (const link of document.querySelectorAll("a[data-run]")) {
      link.addEventListener("click", () => say(link.dataset.run));
    }
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

  drawAll().then((drawn) => {
    for (const id of ids) resized.observe(document.getElementById(id));
    if (picker) document.querySelectorAll("#frontier .plot").forEach(listen);
    root.dataset.drawn = String(drawn.filter(Boolean).length);
  });
})();
