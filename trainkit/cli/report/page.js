const charts = JSON.parse(document.getElementById("points").textContent);
const HEIGHT = 250;
const plots = {};  // by the names of their places
const colour = name => getComputedStyle(root).getPropertyValue("--" + name).trim();

// As `number` in look.py.
function number(value) {
  const size = Math.abs(value), short = Number(value.toPrecision(6));
  if (size && (size < 1e-4 || size >= 1e7)) return short.toExponential();
  const digits = size >= 1e6 ? 7 : 6;
  return value.toLocaleString("en", {maximumSignificantDigits: digits});
}
const step = value => value.toLocaleString("en");

// As `limits` in look.py.
function limits(low, high, {isLog, fromZero}) {
  if (isLog) {
    const factor = Math.max(1.1, Math.min(1e30, (high / low) ** 0.06));
    return [low / factor || low, high * factor];
  }
  if (fromZero) [low, high] = [Math.min(low, 0), Math.max(high, 0)];
  if (low === high) {
    const around = Math.abs(low) * 0.1 || 1;
    return fromZero ? [0, 1] : [low - around, high + around];
  }
  const least = Math.max(Math.abs(low), Math.abs(high)) * 1e-4;
  const margin = Math.max((high - low) * 0.06, (least - (high - low)) / 2);
  return [low - (fromZero && !low ? 0 : margin), high + (fromZero && !high ? 0 : margin)];
}

// Round steps, and the last one, which takes the place of any tick too near to it.
function stepTicks(low, high, by, last, near) {
  const ticks = [];
  for (let n = Math.ceil(low / by); n * by <= high; n++) ticks.push(n * by);
  if (last < low || last > high || ticks.includes(last)) return ticks;
  return [...ticks.filter(tick => last - tick >= near), last];
}

function evenTicks(low, high) {
  const least = (high - low) / 7, size = 10 ** Math.floor(Math.log10(least));
  const by = size * [1, 2, 5, 10].find(digit => digit * size >= least);
  const ticks = [];
  for (let n = Math.ceil(low / by); n * by <= high; n++) ticks.push(n * by + 0);
  return ticks;
}

// As `label_decades` in look.py does.
function logTicks(low, high) {
  const powers = [];
  for (let p = Math.floor(Math.log10(low)); p <= Math.log10(high); p++) powers.push(p);
  const within = digits => powers
    .flatMap(power => digits.map(digit => Number(`${digit}e${power}`)))
    .filter(tick => low <= tick && tick <= high);
  const fine = within([1, 2, 5]), tens = within([1]);
  const every = Math.ceil(tens.length / 8);
  if (fine.length > 6) return tens.filter((_, place) => place % every === 0);
  return fine.length > 2 ? fine : evenTicks(low, high);
}

// One row for each step of any line: the steps, and for each line the places of its
// points. A line may have a step twice.
function align(lines) {
  const rows = new Map();
  lines.forEach(({steps}, n) => {
    let nth = 0;
    steps.forEach((step, i) => {
      nth = step === steps[i - 1] ? nth + 1 : 0;
      const key = step + " " + nth;
      if (!rows.has(key)) rows.set(key, {step, nth, places: []});
      rows.get(key).places[n] = i;
    });
  });
  const sorted = [...rows.values()].sort((a, b) => a.step - b.step || a.nth - b.nth);
  return [sorted.map(row => row.step), lines.map((_, n) => sorted.map(r => r.places[n]))];
}

// Of uPlot's columns null is a gap and undefined is no point at all; beside a gap it
// belongs to the gap.
function widened(column) {
  const fill = () => column.forEach((y, row) => {
    if (y === undefined && column[row - 1] === null) column[row] = null;
  });
  fill();
  column.reverse();
  fill();
  return column.reverse();
}

const AXES = {whole: "linear", log: "log", late: "start clipped"};

// Buttons that choose the axis; the first one is the best.
function addAxes(id, chart) {
  if (chart.axes.length < 2) return;
  const group = document.createElement("div");
  group.className = "axes";
  group.setAttribute("role", "group");
  group.setAttribute("aria-label", "Axis");
  const said = document.createElement("span");
  for (const name of Object.keys(AXES).filter(each => chart.axes.includes(each))) {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = AXES[name];
    const press = () => {
      for (const each of group.querySelectorAll("button"))
        each.setAttribute("aria-pressed", each === button);
      said.textContent = name === "late" ? chart.clipped : "";
    };
    button.addEventListener("click", () => {
      press();
      const old = plots[id], {min, max} = old.scales.x;
      const isShown = old.series.map(({show}) => show);
      old.destroy();
      draw(id, chart, name, isShown);
      plots[id].setScale("x", {min, max});
    });
    group.append(button);
    if (name === chart.axes[0]) press();
  }
  group.append(said);
  document.getElementById(id).before(group);
}

function draw(id, chart, axis, isShown = []) {
  const place = document.getElementById(id), isLog = axis === "log";
  const [steps, places] = align(chart.lines);
  const ends = [steps[0], steps.at(-1)];
  const clipped = (plot, low, high) => axis === "late" && plot.scales.x.min <= ends[0]
    ? Math.min(high, Math.max(low, chart.late[1])) : high;
  const placed = x => chart.over === "step" ? `step ${step(x)}` : `${step(x)} ${chart.over}`;
  const text = y => chart.isShare ? number(100 * y) + "%" : number(y);
  const columns = [steps], series = [{class: "unlisted"}], bands = [];
  chart.lines.forEach((line, n) => {
    const column = values => widened(places[n].map(i => i === undefined ? i : values[i]));
    const stroke = () => colour(line.style), isPlan = line.style === "plan";
    const alone = new Set(line.alone);
    const isAlone = places[n].flatMap((i, row) => alone.has(i) ? [row] : []);
    const last = places[n].findLastIndex(i => i !== undefined && line.values[i] !== null);
    // What stands beside the name: the value pointed at, or else the last one.
    const value = (plot, _, index, row) => {
      const i = places[n][row ?? last], y = line.values[i];
      if (i === undefined || y === null) return "";
      const range = line.low.length && line.low[i] < line.high[i]
        ? ` (${text(line.low[i])} to ${text(line.high[i])})` : "";
      return `${text(y)}${range} at ${placed(line.steps[i])}`;
    };
    columns.push(column(line.values));
    series.push({
      label: line.label,
      class: line.style,
      stroke,
      value,
      width: isPlan ? 5 : 1.5,
      alpha: isPlan ? 0.45 : 1,
      dash: [[], [8, 4], [2, 4]][line.dash],
      paths: chart.asStairs ? uPlot.paths.stepped({align: 1}) : uPlot.paths.linear(),
      points: {
        size: 5, fill: stroke, width: 0, space: 12,
        ...isPlan && {show: false},
        filter: (plot, index, isShown) => isShown ? null : isAlone,
      },
    });
    if (!line.low.length) return;
    const at = series.length;
    for (const edge of [line.low, line.high]) {
      columns.push(column(edge));
      series.push({class: "unlisted", points: {show: false, filter: () => []},
        paths: series[at - 1].paths});
    }
    bands.push({series: [at + 1, at], fill: () => stroke() + "40"});
  });
  const ink = {stroke: () => colour("quiet"), font: "12px system-ui, sans-serif"};
  const none = {show: false};
  const room = high => 30 + 7 * step(Math.round(high)).length;
  series.forEach((each, n) => { each.show = isShown[n] ?? true; });
  const plot = new uPlot({
    padding: [null, Math.max(12, 4 * step(ends[1]).length), null, null],
    width: place.clientWidth,
    height: HEIGHT,
    series,
    bands,
    scales: {
      x: {time: false},
      y: {
        distr: isLog ? 3 : 1,
        range: (plot, low, high) => low === null ? [null, null]
          : limits(low, clipped(plot, low, high), {...chart, isLog}),
      },
    },
    axes: [
      {
        ...ink, label: chart.over, labelSize: 18, labelFont: ink.font, size: 28, gap: 3,
        grid: none, ticks: {stroke: ink.stroke, width: 1, size: 4},
        border: {show: true, stroke: ink.stroke, width: 1},
        incrs: [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12].flatMap(
          power => [1, 2, 5].map(digit => digit * 10 ** power)),
        space: (_, axis, low, high) => room(high),
        splits: ({over}, axis, low, high, by) => stepTicks(
          low, high, by, ends[1], 0.8 * room(high) * (high - low) / over.clientWidth),
        values: (_, ticks) => ticks.map(step),
      },
      {
        ...ink, ticks: none, gap: 8,
        grid: {
          stroke: () => colour("faint"), width: 1,
          filter: ({scales: {y}}, ticks) => ticks.map(tick => tick > y.min ? tick : null),
        },
        // Its own know no numbers beyond 1e16; it takes any from 5 on, and leaves the
        // ticks to us.
        incrs: (_, axis, low, high) => [Math.max(5, high - low)],
        splits: (_, axis, low, high) => (isLog ? logTicks : evenTicks)(low, high),
        filter: (_, ticks) => ticks,
        size: (_, labels) => 14 + 7 * Math.max(3, ...(labels ?? []).map(l => l.length)),
        values: (_, ticks) => ticks.map(text),
      },
    ],
    legend: {markers: {width: 0}},
    cursor: {
      y: false,
      drag: {dist: 4},
      points: {
        size: (_, index) => series[index].label ? 8 : 0,
      },
      hover: {skip: [undefined, null]},
    },
    hooks: {
      setSeries: [(plot, index, {show}) => {
        const band = bands.find(({series: [, low]}) => low === index + 1);
        if (band && show !== undefined)
          for (const edge of band.series) plot.setSeries(edge, {show}, false);
      }],
    },
  }, columns, place);
  plot.setLegend({idx: null});
  plot.root.querySelectorAll(".u-series:not(.unlisted)").forEach(
    (row, n) => row.classList.add(`dash${chart.lines[n].dash}`));
  plots[id] = plot;
  plot.over.addEventListener("pointermove", event => {
    if (event.pointerType === "touch")
      plot.setCursor({left: event.offsetX, top: event.offsetY});
  });
  for (const name of plot.root.querySelectorAll(".u-legend th")) {
    name.tabIndex = 0;
    name.setAttribute("role", "button");
    name.addEventListener("keydown", event => {
      if (event.key === "Enter" || event.key === " ") {
        event.preventDefault();
        name.click();
      }
    });
  }
}

function listen(id) {
  const place = document.getElementById(id);
  new ResizeObserver(() => {
    plots[id].setSize({width: place.clientWidth, height: HEIGHT});
  }).observe(place);
  place.addEventListener("keydown", event => {
    const plot = plots[id];
    const by = {ArrowLeft: -1, ArrowRight: 1}[event.key];
    if (event.key === "Escape") plot.setCursor({left: -10, top: -10});
    if (!by) return;
    event.preventDefault();
    const [first, last] = plot.series[0].idxs;
    const from = plot.cursor.idx ?? (by > 0 ? first - 1 : last + 1);
    const to = Math.min(Math.max(from + by, first), last);
    plot.setCursor({left: plot.valToPos(plot.data[0][to], "x"), top: HEIGHT / 3});
  });
}

repainted.push(() => Object.values(plots).forEach(plot => plot.redraw(false)));
document.getElementById("hint").hidden = false;
for (const [id, chart] of Object.entries(charts)) {
  addAxes(id, chart);
  draw(id, chart, chart.axes[0]);
  listen(id);
}
