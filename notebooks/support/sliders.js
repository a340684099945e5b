// One minibatch on several ranks, once with a barrier after every microbatch and once with a single one at its end.
// A test runs the arithmetic in Node and compares it with notebooks.support.replay.
(() => {
  const COLOURS = PALETTE;
  const MICROBATCHES = 4;
  const SEED = 22;

  // -- arithmetic ----------------------------------------------------------------------------------------------

  // Standard normal numbers, the same ones in every browser.
  function normals(count) {
    let state = SEED;
    const uniform = () => {
      state = (Math.imul(1664525, state) + 1013904223) >>> 0;
      return (state + 0.5) / 2 ** 32;
    };
    return Array.from({ length: count }, () => {
      const radius = Math.sqrt(-2 * Math.log(uniform()));
      return radius * Math.cos(2 * Math.PI * uniform());
    });
  }

  // By rank and microbatch: lengths whose logarithms have the deviation sigma, and whose mean is 1.
  function lengths(sigma, ranks) {
    const drawn = normals(ranks * MICROBATCHES).map((value) => Math.exp(sigma * value));
    const mean = drawn.reduce((sum, value) => sum + value, 0) / drawn.length;
    return Array.from({ length: ranks }, (_, rank) =>
      drawn.slice(rank * MICROBATCHES, (rank + 1) * MICROBATCHES).map((value) => value / mean));
  }

  // What every rank does when. A microbatch takes as long as its sample; moving bytes takes no time.
  function replay(times, waitAlways) {
    const pieces = [];
    const clocks = times.map(() => 0);
    const waitForAll = () => {
      const last = Math.max(...clocks);
      clocks.forEach((clock, rank) => {
        if (clock < last) pieces.push({ rank, begin: clock, end: last, idle: true });
        clocks[rank] = last;
      });
    };
    for (let microbatch = 0; microbatch < MICROBATCHES; microbatch += 1) {
      times.forEach((row, rank) => {
        const begin = clocks[rank];
        clocks[rank] += row[microbatch];
        pieces.push({ rank, microbatch, begin, end: clocks[rank], idle: false });
      });
      if (waitAlways) waitForAll();
    }
    waitForAll();
    return pieces;
  }

  function totals(pieces, ranks) {
    const time = (some) => some.reduce((sum, piece) => sum + piece.end - piece.begin, 0);
    const idle = time(pieces.filter((piece) => piece.idle));
    return { time: time(pieces) / ranks, idle: idle / ranks, fraction: idle / time(pieces) };
  }

  if (typeof document === "undefined") {
    module.exports = { lengths, replay, totals };
    return;
  }

  // -- the page ------------------------------------------------------------------------------------------------

  const WIDTH = 640;
  const HEIGHT = 130;

  function add(parent, name, attributes, text) {
    const isDrawing = ["svg", "rect", "line"].includes(name);
    const element = isDrawing
      ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    if (text) element.textContent = text;
    parent.append(element);
    return element;
  }

  function draw(svg, pieces, ranks, until) {
    svg.replaceChildren();
    const row = HEIGHT / ranks;
    const x = (time) => (time / until) * (WIDTH - 2);
    for (const { rank, microbatch, begin, end, idle } of pieces) {
      add(svg, "rect", {
        x: x(begin), y: rank * row, width: x(end) - x(begin), height: row - Math.min(3, row / 5),
        style: `fill:var(${idle ? "--idle" : ["--even", "--odd"][microbatch % 2]});stroke:var(--paper);stroke-width:0.6`,
      });
    }
    const end = x(Math.max(...pieces.map((piece) => piece.end)));
    add(svg, "line", { x1: end, x2: end, y1: 0, y2: HEIGHT, style: "stroke:var(--ink);stroke-width:2" });
  }

  function slider(parent, text, attributes) {
    const label = add(parent, "label", { style: "display:inline-block;margin-right:2em" }, `${text}: `);
    const value = add(label, "output", { style: "display:inline-block;min-width:2.5em;font-weight:bold" });
    const input = add(label, "input", { type: "range", style: "vertical-align:middle;width:12em", ...attributes });
    return { input, value };
  }

  function mount(figure) {
    figure.replaceChildren();
    add(figure, "style", {}, COLOURS);
    figure.style.cssText =
      "background:var(--paper);color:var(--ink);color-scheme:var(--scheme);padding:0.8em;border-radius:4px;max-width:720px";
    const skew = slider(figure, "skew of the lengths (sigma)", { min: 0, max: 1.6, step: 0.1, value: 0.9 });
    const count = slider(figure, "ranks", { min: 2, max: 16, step: 1, value: 4 });
    const ways = ["Collectives: synchronize at every layer", "On demand: synchronize once"].map((title) => ({
      title,
      head: add(figure, "div", { style: "margin-top:0.6em" }),
      svg: add(figure, "svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", style: "width:100%;display:block" }),
    }));
    const summary = add(figure, "p", { role: "status", style: "margin:0.6em 0 0" });
    const update = () => {
      const [sigma, ranks] = [Number(skew.input.value), Number(count.input.value)];
      skew.value.textContent = sigma.toFixed(1);
      count.value.textContent = ranks;
      const times = lengths(sigma, ranks);
      const runs = [true, false].map((waitAlways) => replay(times, waitAlways));
      const results = runs.map((pieces) => totals(pieces, ranks));
      ways.forEach(({ title, head, svg }, way) => {
        const { time, idle, fraction } = results[way];
        const percent = Math.round(100 * fraction);
        head.textContent = `${title}: takes ${time.toFixed(1)}, a rank waits ${idle.toFixed(1)} of it (${percent} %)`;
        svg.setAttribute("aria-label", `Timeline of ${ranks} ranks. ${head.textContent}`);
        draw(svg, runs[way], ranks, results[0].time);
      });
      const faster = (results[0].time / results[1].time).toFixed(2);
      summary.textContent = `With one barrier it is ${faster} times as fast. Perfectly level work would take ${MICROBATCHES}.0.`;
    };
    for (const { input } of [skew, count]) input.addEventListener("input", update);
    update();
  }

  for (const figure of document.querySelectorAll(".odc-sliders:not([data-drawn])")) {
    figure.dataset.drawn = "";
    mount(figure);
  }
})();
