// Plots lines with uPlot in the page's colours.

/* global uPlot */
import { compact, h, number } from "./dom.js";

const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
export const colour = (n) => style(`--series-${n % 8}`);

const decades = (_, values) => values.map((v) => (v !== null && Math.abs(Math.log10(v) % 1) < 1e-9 ? v : null));

// A value whose neighbours are missing is no line; without a point it would not be seen.
const alone = (plot, n) => plot.data[n].flatMap((value, k, all) => (
  value !== null && (all[k - 1] ?? null) === null && (all[k + 1] ?? null) === null ? [k] : []));

const wholeBars = (_, least, most) => [least - 0.5, most + 0.5];

// As wide as the longest label of the axis.
const width = (_, values) => 18 + 7 * Math.max(3, ...(values ?? []).map((each) => each?.length ?? 0));

// The element that is returned has `update(x, values)`, with values for each series.
export function chart({ x, series, xLabel, xSteps = null, logX = false, logY = false, fromZero = false, bars = false, xRange = bars ? wholeBars : null, height = 240, onClick = null, marks = [], xText = number }) {
  const holder = h("div", { class: `chart${xLabel ? "" : " unnamed"}${series.length > 1 ? "" : " single"}`, role: "img", "aria-label": `Chart: ${series.map((each) => each.label).join(", ")}${xLabel ? ` over ${xLabel}` : ""}` });
  holder.style.minHeight = `${height}px`;
  const grid = { stroke: style("--line"), width: 1 };
  const axis = (more) => ({ stroke: style("--quiet"), grid, ticks: { show: false }, font: "12px system-ui, sans-serif", ...more });
  const label = (values, text) => values.map((v) => (v === null ? "" : text(v)));
  const range = logY ? (_, least, most) => (least === null ? [0.1, 100] : uPlot.rangeLog(least, most, 10, true))
    : fromZero ? (_, least, most) => [0, (most || 1) * 1.1] : undefined;
  const options = {
    width: 600, height, legend: { show: series.length > 1 || onClick !== null },
    scales: { x: { time: false, distr: logX ? 3 : 1, ...(xRange ? { range: xRange } : {}) },
      y: { distr: logY ? 3 : 1, ...(range ? { range } : {}) } },
    axes: [
      axis({ label: xLabel, labelSize: 20, labelFont: "12px system-ui, sans-serif", size: 30, grid: { show: false }, ...(xSteps ? { incrs: xSteps } : {}), values: (_, values) => label(values, xText) }),
      // Of a logarithmic axis only the powers of ten are drawn.
      axis({ size: width, ...(logY ? { grid: { ...grid, filter: decades }, filter: decades } : {}), values: (_, values) => label(values, compact) }),
    ],
    series: [{ label: xLabel ?? "", value: (_, v) => (v === null ? "" : xText(v)) }, ...series.map((each, n) => ({
      label: each.label, stroke: colour(n), width: 2, fill: bars ? colour(n) : undefined,
      paths: bars ? uPlot.paths.bars({ size: [0.8, 60] }) : undefined,
      points: { show: false, filter: marks.length ? () => marks : alone, size: marks.length ? 9 : 5, fill: colour(n) },
      // A chart of what goes on shows its last value where no pointer chooses one.
      value: (plot, v, k, at) => {
        const shown = at === null && !xLabel ? plot.data[k].findLast((each) => each !== null) : v;
        return shown === null || shown === undefined ? "" : number(shown);
      },
    }))],
    hooks: onClick ? { ready: [(plot) => plot.over.addEventListener("click", () => {
      if (plot.cursor.idx !== null) onClick(plot.data[0][plot.cursor.idx]);
    })] } : {},
  };
  let data = [x, ...series.map((each) => each.values)];
  let plot = null;
  holder.update = (newX, values) => {
    data = [newX, ...values];
    plot?.setData(data);
  };
  requestAnimationFrame(() => {  // once it stands in the page, and has a width
    plot = new uPlot(options, data, holder);
    new ResizeObserver(() => plot.setSize({ width: Math.max(200, holder.clientWidth), height })).observe(holder);
  });
  return holder;
}
