"use strict";
// Draws the figures of a report. All data and words come from the page itself.
(() => {
  const root = document.documentElement;
  const byId = (id) => document.getElementById(id);
  const data = JSON.parse(byId("report-data").textContent);
  const SYMBOLS = ["circle", "square", "diamond", "triangle-up", "triangle-down", "cross"];
  // The buttons are listed because plotly's own list has one that sends the figure to a server.
  const BUTTONS = [["toImage"], ["zoom2d", "pan2d", "resetScale2d"]];
  const CONFIG = { responsive: true, displaylogo: false, modeBarButtons: BUTTONS };
  // cividis: from dark blue to yellow, in even steps of lightness, alike for all kinds of color vision
  const CIVIDIS = [[0, 32, 76], [0, 52, 110], [57, 72, 107], [87, 93, 109], [112, 113, 115], [138, 134, 120],
    [167, 158, 113], [199, 183, 98], [233, 209, 74], [255, 234, 70]];
  const SCALE = CIVIDIS.map((stop, i) => [i / (CIVIDIS.length - 1), `rgb(${stop})`]);

  // plotly reads <b>, <a href>, $math$ and %{value} in every text it is given: names must stay what they are
  const plain = (text) => String(text).replace(/[&<>$%]/g, (character) => `&#${character.charCodeAt(0)};`);

  // ---- colors: from the style sheet, so that both themes and print are described in one place
  const probe = document.body.appendChild(document.createElement("span"));
  probe.hidden = true;
  function color(name, alpha = 1) {
    probe.style.color = `var(--${name})`;
    const [r, g, b] = getComputedStyle(probe).color.match(/[\d.]+/g);
    return `rgba(${r},${g},${b},${alpha})`;
  }
  const seriesColor = (of, alpha) => color(`s${of % 6}`, alpha);

  const axisLook = (title, extra) => ({
    title: { text: title, standoff: 8, font: { size: 12 } },
    tickfont: { size: 11 }, gridcolor: color("grid"), linecolor: color("line"), zeroline: false, automargin: true,
    ...extra,
  });
  const PRINTED = 630; // px that a figure has on a sheet of A4 or Letter
  function printedSize(plot) {
    if (!plot.dataset.map) return { width: PRINTED, height: plot.id === "spectrum-plot" ? 300 : 230 };
    const width = document.querySelectorAll("[data-map]").length > 1 ? PRINTED / 2 - 10 : 0.65 * PRINTED;
    return { width, height: width / 1.07 };
  }
  const widthOf = (plot) => (printing ? printedSize(plot).width : plot.clientWidth);
  let printing = false;
  let chosen; // the theme before printing
  function layoutOf(plot, extra) {
    return {
      ...(printing ? printedSize(plot) : { autosize: true }),
      showlegend: false, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      margin: { l: 48, r: 12, t: 26, b: 40 },
      font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: color("quiet") },
      hoverlabel: {
        bgcolor: color("surface"), bordercolor: color("line"), align: "left",
        font: { color: color("ink"), family: getComputedStyle(document.body).fontFamily, size: 12 },
      },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: color("quiet"), activecolor: color("accent") },
      dragmode: false, hovermode: "closest", hoverdistance: 60, ...extra,
    };
  }

  // As many ticks as there is room for, the last one among them.
  function ticks(labels, width, room) {
    const step = Math.max(1, Math.ceil(labels.length / Math.max(2, Math.floor(width / room))));
    const last = labels.length - 1;
    const at = labels.map((_, i) => i).filter((i) => i === last || (i % step === 0 && last - i >= step));
    return { tickmode: "array", tickvals: at, ticktext: at.map((i) => plain(labels[i])) };
  }

  // ---- curves by layer
  const random = new Set(data.axis.tracks.filter((track) => track.baseline).map((track) => track.of));
  const randomColor = (of) => (random.size > 1 ? seriesColor(of, 0.6) : color("random"));
  const box = (name) => [...document.querySelectorAll("[data-show]")].find((one) => one.dataset.show === name);
  const isShown = (name) => box(name)?.checked ?? true;
  const isRelative = () => box("depth")?.checked ?? false;

  // Names go in as data (%{meta}, %{customdata}), never into the template itself.
  const whose = (of, isRandom) =>
    (data.names.length > 1 && (!isRandom || random.size > 1) ? `${plain(data.names[of])} · ` : "")
    + (isRandom ? "random weights · " : "");

  function isTrackShown(track) {
    return isShown(`of-${track.of}`) && (!track.baseline || isShown("baseline"))
      && (track.main || isShown(`place-${track.place}`));
  }

  const SPREAD = " ± %{customdata[1]:.2~g}<br>middle half: %{customdata[2]:.3~g} to %{customdata[3]:.3~g}"
    + "<br>n = %{customdata[4]}";
  function curve(line) {
    const track = data.axis.tracks[line.track];
    const x = isRelative() ? track.depth : track.x;
    const trace = {
      x, y: line.mean, type: "scatter", connectgaps: false,
      mode: track.x.length > 40 || track.baseline ? "lines" : "lines+markers",
      line: {
        color: track.baseline ? randomColor(track.of) : seriesColor(track.of),
        width: track.main && !track.baseline ? 2.4 : 1.6, dash: track.dash,
      },
      marker: { symbol: SYMBOLS[track.of % 6] + (track.main ? "" : "-open"), size: 6.5 },
      meta: whose(track.of, track.baseline),
      customdata: track.names.map((name, i) =>
        [plain(name), line.std?.[i], line.low?.[i], line.high?.[i], line.count?.[i]]),
      hovertemplate: `%{meta}%{customdata[0]}<br><b>%{y:.4~g}</b>${line.low ? SPREAD : ""}<extra></extra>`,
    };
    if (track.x.length === 1) trace.mode = "markers";
    return line.low && track.main ? [...band(x, line, seriesColor(track.of, 0.16)), trace] : [trace];
  }

  function band(x, line, fillcolor) {
    const edge = { x, type: "scatter", mode: "lines", line: { width: 0 }, hoverinfo: "skip" };
    return [{ ...edge, y: line.low }, { ...edge, y: line.high, fill: "tonexty", fillcolor }];
  }

  function healthyBand({ healthy }) {
    if (!healthy || !isShown("healthy")) return [];
    return band(isRelative() ? healthy.depth : healthy.x, healthy, color("none", 0.18));
  }

  function onsetMarks() {
    const onsets = data.axis.onsets.filter((onset) => isShown(`of-${onset.of}`));
    const at = (onset) => (isRelative() ? onset.depth : onset.x);
    const half = isRelative() ? 0.5 : data.axis.labels.length / 2;
    return {
      shapes: onsets.map((onset) => ({
        type: "line", xref: "x", yref: "paper", x0: at(onset), x1: at(onset), y0: 0, y1: 1, layer: "below",
        line: { color: seriesColor(onset.of, 0.75), width: 1.5, dash: "dashdot" },
      })),
      annotations: onsets.map((onset, i) => ({
        xref: "x", yref: "paper", x: at(onset), y: 1 - 0.08 * i, showarrow: false, yanchor: "top",
        xanchor: at(onset) > half ? "right" : "left", text: ` onset: ${plain(onset.name)} `,
        font: { size: 11, color: seriesColor(onset.of) },
      })),
    };
  }

  function boundMarks(measure) {
    return {
      shapes: measure.bounds.map((bound) => ({
        type: "line", xref: "paper", yref: "y", x0: 0, x1: 1, y0: bound, y1: bound, layer: "below",
        line: { color: color("dimensional", 0.8), width: 1, dash: "dot" },
      })),
      annotations: measure.bounds.map((bound) => ({
        xref: "paper", yref: "y", x: 0, y: measure.log ? Math.log10(bound) : bound, xanchor: "left", yanchor: "bottom",
        showarrow: false, text: "bound", font: { size: 10, color: color("dimensional") },
      })),
    };
  }

  function drawGroup(group) {
    const figure = document.querySelector(`[data-group="${group.id}"]`);
    const plot = figure.querySelector(".plot");
    const measure = group.measures[Number(figure.querySelector("input:checked").value)];
    figure.querySelector(".says").textContent = measure.says;
    figure.querySelector("figcaption").textContent = measure.caption;
    const lines = measure.lines.filter((line) => isTrackShown(data.axis.tracks[line.track]));
    const last = data.axis.labels.length - 1;
    const xaxis = isRelative()
      ? { range: [-0.02, 1.02] }
      : { ...ticks(data.axis.labels, widthOf(plot), 30), range: [-0.4, last + 0.4] };
    const yaxis = measure.log ? { type: "log", exponentformat: "power" } : { range: measure.range };
    const [onsets, bounds] = [onsetMarks(), boundMarks(measure)];
    return Plotly.react(plot, [...healthyBand(measure), ...lines.flatMap(curve)], layoutOf(plot, {
      xaxis: axisLook(isRelative() ? "relative depth" : "layer", { showgrid: false, ...xaxis }),
      yaxis: axisLook(plain(measure.title), yaxis),
      shapes: [...onsets.shapes, ...bounds.shapes],
      annotations: [...onsets.annotations, ...bounds.annotations],
    }), CONFIG);
  }

  // ---- singular values
  function faintSpectra() {
    const steps = data.spectra.steps;
    const every = Math.max(1, Math.ceil(steps.length / 24));
    const x = [], y = [];
    for (const step of steps.filter((_, i) => i % every === 0)) {
      const curve = step.curves.find(Boolean);
      x.push(...data.spectra.ranks[curve.ranks], null);
      y.push(...curve.value, null);
    }
    return { x, y, type: "scatter", mode: "lines", hoverinfo: "skip", connectgaps: false,
      line: { color: color("random", 0.28), width: 1 } };
  }

  function spectrumTrace(curve, of, isRandom) {
    return {
      x: data.spectra.ranks[curve.ranks], y: curve.value, type: "scatter", mode: "lines",
      line: isRandom
        ? { color: randomColor(of), width: 1.6, dash: "6px,4px" }
        : { color: seriesColor(of), width: 2.6 },
      meta: whose(of, isRandom),
      hovertemplate: "%{meta}singular value %{x}: <b>%{y:.3~g}</b><extra></extra>",
    };
  }

  function drawSpectrum() {
    const at = Number(byId("spectrum-slider").value);
    const plot = byId("spectrum-plot");
    const step = data.spectra.steps[at];
    const traces = [faintSpectra()];
    step.random.forEach((curve, of) => curve && traces.push(spectrumTrace(curve, of, true)));
    step.curves.forEach((curve, of) => curve && traces.push(spectrumTrace(curve, of, false)));
    const [low, high] = data.spectra.range.map(Math.log10);
    tell("spectrum", step);
    return Plotly.react(plot, traces, layoutOf(plot, {
      xaxis: axisLook("rank of the singular value", { rangemode: "tozero" }),
      yaxis: axisLook("share of the sum", {
        type: "log", range: [low - 0.1, high + 0.15], exponentformat: "power", ...(high - low > 2 ? { dtick: 1 } : {}),
      }),
    }), CONFIG);
  }

  // ---- token similarity
  const squares = new Map();
  function square(at, of) {
    const key = `${at} ${of}`;
    if (!squares.has(key)) {
      const half = data.heatmaps.steps[at].maps[of];
      squares.set(key, half && half.map((row, i) =>
        half.map((_, j) => (j <= i ? row[j] : half[j][i])).map((v) => (v === null ? null : v / 1000))));
    }
    return squares.get(key);
  }

  function drawMap(plot, at) {
    const of = Number(plot.dataset.map);
    const z = square(at, of);
    const empty = { xaxis: { visible: false }, yaxis: { visible: false } };
    if (!z) return Plotly.react(plot, [], layoutOf(plot, empty), CONFIG);
    const tokens = z.map((_, i) => data.heatmaps.tokens[of][i] ?? `${data.heatmaps.noun} ${i + 1}`);
    const labels = tokens.map((token) => (token.length > 12 ? `${token.slice(0, 11)}…` : token));
    const marked = ticks(labels, widthOf(plot) - 120, 13);
    const look = { ...marked, tickfont: { size: 10 }, showgrid: false, ticks: "" };
    return Plotly.react(plot, [{
      type: "heatmap", z, zmin: data.heatmaps.lowest, zmax: 1, colorscale: SCALE,
      customdata: z.map((row, i) => row.map((_, j) => [i, j].map((k) => `${k + 1}: ${plain(tokens[k])}`))),
      hovertemplate: "%{customdata[0]}<br>%{customdata[1]}<br>cosine <b>%{z:.3f}</b><extra></extra>",
      colorbar: {
        thickness: 10, outlinewidth: 0, tickfont: { size: 10 },
        title: { text: "cosine", side: "right", font: { size: 11 } },
      },
    }], layoutOf(plot, {
      margin: { l: 60, r: 4, t: 26, b: 60 },
      xaxis: axisLook("", { ...look, tickangle: -90, constrain: "domain" }),
      yaxis: axisLook("", { ...look, autorange: "reversed", scaleanchor: "x", constrain: "domain" }),
    }), CONFIG);
  }

  // All layers at once, small: a button each, which moves the slider. A layer can stand for several of a deeper model.
  function film(strip) {
    const of = Number(strip.dataset.film);
    let last;
    data.heatmaps.steps.forEach((step, at) => {
      if (!step.maps[of] || step.short[of] === last) return;
      last = step.short[of];
      const button = strip.appendChild(document.createElement("button"));
      button.type = "button";
      button.dataset.short = last;
      button.ariaLabel = button.title = step.label;
      button.append(thumbnail(square(at, of)), last);
      button.addEventListener("click", () => {
        byId("heatmap-slider").value = at;
        drawMaps();
      });
    });
  }

  function thumbnail(z) {
    const canvas = document.createElement("canvas");
    canvas.width = canvas.height = z.length;
    const pixels = new ImageData(z.length, z.length);
    z.flat().forEach((value, i) => {
      const share = ((value ?? 0) - data.heatmaps.lowest) / (1 - data.heatmaps.lowest);
      const at = Math.min(Math.max(share, 0), 1) * (CIVIDIS.length - 1);
      const [low, high] = [CIVIDIS[Math.floor(at)], CIVIDIS[Math.ceil(at)]];
      pixels.data.set([...low.map((c, k) => c + (high[k] - c) * (at % 1)), 255], 4 * i);
    });
    canvas.getContext("2d").putImageData(pixels, 0, 0);
    return canvas;
  }

  function drawMaps() {
    const at = Number(byId("heatmap-slider").value);
    const step = data.heatmaps.steps[at];
    tell("heatmap", step);
    document.querySelectorAll("[data-film] button").forEach((button) => {
      const own = step.short[Number(button.parentElement.dataset.film)];
      button.setAttribute("aria-pressed", String(button.dataset.short === own));
    });
    return [...document.querySelectorAll("[data-map]")].map((plot) => drawMap(plot, at));
  }

  function tell(name, step) {
    byId(`${name}-layer`).textContent = step.label;
    byId(`${name}-says`).textContent = step.says;
    byId(`${name}-slider`).setAttribute("aria-valuetext", step.label);
  }

  function drawAll() {
    const drawn = data.groups.map(drawGroup);
    if (data.spectra) drawn.push(drawSpectrum());
    if (data.heatmaps) drawn.push(...drawMaps());
    return Promise.all(drawn);
  }

  // ---- theme
  const prefersDark = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : prefersDark.matches);
  function showTheme() {
    byId("theme").textContent = isDark() ? "Light theme" : "Dark theme";
    if (window.Plotly) drawAll();
  }
  byId("theme").hidden = false;
  byId("theme").addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    showTheme();
  });
  prefersDark.addEventListener("change", showTheme);
  showTheme();

  // Paper is light and narrow, and the figures must know before the browser lays the page out for it.
  function forPrint(begins) {
    printing = begins;
    if (begins) chosen = root.dataset.theme;
    if (begins) root.dataset.theme = "light";
    else if (chosen) root.dataset.theme = chosen;
    else delete root.dataset.theme;
    drawAll();
  }

  // ---- start
  async function loadPlotly() {
    const packed = Uint8Array.from(atob(byId("plotly-packed").textContent), (c) => c.charCodeAt(0));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
    const script = document.createElement("script");
    script.textContent = await new Response(stream).text();
    document.head.append(script);
  }
  function listen() {
    for (const group of data.groups) {
      document.querySelector(`[data-group="${group.id}"]`).addEventListener("change", () => drawGroup(group));
    }
    document.querySelectorAll("[data-show]").forEach((one) =>
      one.addEventListener("change", () => data.groups.forEach(drawGroup)));
    byId("spectrum-slider")?.addEventListener("input", drawSpectrum);
    byId("heatmap-slider")?.addEventListener("input", drawMaps);
    addEventListener("beforeprint", () => forPrint(true));
    addEventListener("afterprint", () => forPrint(false));
  }
  if (data.heatmaps && data.heatmaps.steps.length > 1) document.querySelectorAll("[data-film]").forEach(film);
  loadPlotly().then(drawAll).then(() => {
    listen();
    root.dataset.ready = "true";
  }, (error) => {
    byId("no-figures").hidden = false;
    throw error;
  });
})();
