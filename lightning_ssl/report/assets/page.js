// Draws the charts of a page with uPlot when they come into view; what it draws stands in #curves as JSON.
(() => {
  "use strict";
  const read = (id) => JSON.parse((document.getElementById(id) || { textContent: "null" }).textContent);
  const data = read("curves"), pictures = read("pictures") || [];
  const ink = getComputedStyle(document.body).color, faint = "rgba(128,128,128,.25)";
  const hue = (i, n) => (n <= 10
    ? ["#2f6fde", "#e0703a", "#2a9d5c", "#b5489b", "#c9a100", "#17a2b8", "#d6455d", "#7a5cd6", "#8a6d3b", "#5b6770"][i]
    : `hsl(${Math.round(250 - (250 * i) / (n - 1))} 65% 52%)`);
  const plots = new Map();  // chart -> uPlot
  const hidden = new Set();  // runs
  const show = (v) => (v === 0 || (Math.abs(v) >= 1e-3 && Math.abs(v) < 1e5) ? String(+v.toPrecision(4)) : v.toExponential(2));

  function nearest(values, at) {  // the position of the value that lies nearest to a position
    for (let d = 0; d < values.length; d++) {
      if (values[at - d] != null) return at - d;
      if (values[at + d] != null) return at + d;
    }
    return at;
  }

  function options(chart, holder, log) {
    const many = data.runs.length > 1, n = many ? data.runs.length : chart.series.length;
    const tip = holder.parentElement.querySelector(".tip");
    const lines = chart.series.map((line, i) => {
      const count = line.y.reduce((sum, v) => sum + (v != null), 0);
      return {
        label: line.label, show: !hidden.has(line.run), stroke: hue(many ? line.run : i, n),
        width: chart.series.length > 12 ? 1 : 1.5, spanGaps: true, dash: line.dash || [],
        points: { show: count < 40, size: 5 },
      };
    });
    const axis = { stroke: ink, grid: { stroke: faint, width: 1 }, ticks: { stroke: faint, width: 1 }, font: "11px system-ui" };
    return {
      width: Math.max(260, holder.clientWidth), height: chart.wide ? 320 : 220, legend: { show: false },
      scales: { x: { time: false }, y: { distr: log ? 3 : 1 } },
      axes: [{ ...axis, size: 34 }, { ...axis, size: 58, values: (u, ticks) => ticks.map((v) => (v == null ? "" : show(v))) }],
      series: [{ label: "step" }, ...lines],
      cursor: { drag: { x: true, y: false }, focus: { prox: 24 }, dataIdx: (u, i, at) => (i ? nearest(u.data[i], at) : at) },
      focus: { alpha: chart.series.length > 12 ? 0.25 : 0.6 },
      hooks: {
        setCursor: [(u) => {
          const { left, top, idx } = u.cursor;
          if (idx == null || left < 0) { tip.style.display = "none"; return; }
          const rows = [];
          for (let i = 1; i < u.series.length; i++) {
            const at = u.cursor.idxs[i], v = at == null ? null : u.data[i][at];
            if (u.series[i].show && v != null) rows.push({ i, v, step: u.data[0][at], far: Math.abs(u.valToPos(v, "y") - top) });
          }
          rows.sort((a, b) => a.far - b.far);
          tip.replaceChildren();
          const head = document.createElement("b");
          head.textContent = rows.length ? `step ${rows[0].step}` : "";
          tip.append(head);
          for (const row of rows.slice(0, 8)) {
            const line = document.createElement("div"), mark = document.createElement("i");
            mark.style.background = u.series[row.i].stroke();
            const where = row.step === rows[0].step ? "" : ` (step ${row.step})`;
            line.append(mark, `${u.series[row.i].label}: ${show(row.v)}${where}`);
            tip.append(line);
          }
          if (rows.length > 8) tip.append(Object.assign(document.createElement("div"), { textContent: `and ${rows.length - 8} more` }));
          tip.style.display = rows.length ? "block" : "none";
          const box = u.over.getBoundingClientRect(), own = holder.parentElement.getBoundingClientRect();
          const x = box.left - own.left + left, right = x + tip.offsetWidth + 20 > own.width;
          tip.style.left = `${Math.max(0, right ? x - tip.offsetWidth - 12 : x + 12)}px`;
          tip.style.top = `${box.top - own.top + Math.max(0, top - 10)}px`;
        }],
      },
    };
  }

  function draw(chart, log) {
    const holder = document.getElementById(chart.id);
    if (plots.has(chart)) plots.get(chart).destroy();
    const keep = (v) => (v != null && (!log || v > 0) ? v : null);
    const plot = new uPlot(options(chart, holder, log), [chart.x, ...chart.series.map((s) => (log ? s.y.map(keep) : s.y))], holder);
    plots.set(chart, plot);
    holder.dataset.drawn = log ? "log" : "linear";
    holder.uplot = plot;
  }

  for (const chart of data.charts) {
    const holder = document.getElementById(chart.id), figure = holder.parentElement;
    const tools = figure.querySelector(".tools");
    const log = Object.assign(document.createElement("button"), { textContent: "log", title: "logarithmic scale" });
    log.onclick = () => { log.classList.toggle("on"); draw(chart, log.classList.contains("on")); };
    const all = Object.assign(document.createElement("button"), { textContent: "all", title: "show all steps" });
    all.onclick = () => plots.has(chart) && plots.get(chart).setScale("x", { min: chart.x[0], max: chart.x[chart.x.length - 1] });
    tools.append(log, all);
    figure.append(Object.assign(document.createElement("div"), { className: "tip" }));
    if (data.runs.length === 1 && chart.series.length > 1 && chart.series.length <= 16) {
      const legend = Object.assign(document.createElement("div"), { className: "legend" });
      chart.series.forEach((line, i) => {
        const entry = document.createElement("span"), mark = document.createElement("i");
        mark.style.background = hue(i, chart.series.length);
        entry.append(mark, line.label);
        legend.append(entry);
      });
      holder.after(legend);
    }
  }
  const byHolder = new Map(data.charts.map((chart) => [document.getElementById(chart.id), chart]));
  const watch = new IntersectionObserver((entries) => {
    for (const { isIntersecting, target } of entries) {
      if (isIntersecting) { watch.unobserve(target); draw(byHolder.get(target), false); }
    }
  }, { rootMargin: "200px" });
  for (const holder of byHolder.keys()) watch.observe(holder);

  let width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth === width) return;
    width = innerWidth;
    for (const plot of plots.values()) plot.setSize({ width: Math.max(260, plot.root.parentElement.clientWidth), height: plot.height });
  });

  const keys = document.getElementById("keys");
  if (keys && data.runs.length > 1) data.runs.forEach((name, run) => {
    const label = document.createElement("label"), box = document.createElement("input"), mark = document.createElement("i");
    label.className = "key"; box.type = "checkbox"; box.checked = true; mark.style.background = hue(run, data.runs.length);
    box.onchange = () => {
      if (box.checked) hidden.delete(run); else hidden.add(run);
      for (const [chart, plot] of plots) chart.series.forEach((s, i) => s.run === run && plot.setSeries(i + 1, { show: box.checked }));
    };
    label.append(box, mark, name);
    keys.append(label);
  });

  for (const picture of pictures) {
    const figure = document.getElementById(picture.id), image = figure.querySelector("img"), slide = figure.querySelector("input");
    const step = figure.querySelector("output");
    slide.oninput = () => { image.src = picture.images[slide.value]; step.textContent = `step ${picture.steps[slide.value]}`; };
  }

  if (data.running) {  // look for news, unless somebody is looking closely
    setInterval(() => {
      const zoomed = [...plots].some(([chart, plot]) => plot.scales.x.min > chart.x[0] || plot.scales.x.max < chart.x[chart.x.length - 1]);
      if (!zoomed && !document.querySelector(".tip[style*='block']")) location.reload();
    }, 30000);
  }
})();
