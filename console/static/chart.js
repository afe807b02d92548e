// Draws small charts as SVG: a line, the area below it, and the newest point.
const POINTS_MAX = 60;
const WIDTH = 120;
const HEIGHT = 24;
const SVG = "http://www.w3.org/2000/svg";

/** Return the numbers of a chart. */
export function pointsOf(element) {
  return (element.dataset.points || "").split(" ").filter(Boolean).map(Number).filter(Number.isFinite);
}

/** Return the coordinates of a chart's line, newest at the right. */
export function lineOf(points) {
  const top = Math.max(...points, 1e-9);
  const step = WIDTH / (POINTS_MAX - 1);
  const left = WIDTH - step * (points.length - 1);
  return points.map((value, index) => [
    Math.round((left + index * step) * 10) / 10,
    Math.round((HEIGHT - 2 - (value / top) * (HEIGHT - 4)) * 10) / 10,
  ]);
}

function draw(element) {
  const points = pointsOf(element);
  const base = document.createElementNS(SVG, "line");
  for (const [name, value] of [["x1", 0], ["x2", WIDTH], ["y1", HEIGHT - 1], ["y2", HEIGHT - 1]]) {
    base.setAttribute(name, value);
  }
  base.setAttribute("class", "base");
  element.replaceChildren(base);
  if (points.length < 2) {
    return;
  }
  const line = lineOf(points);
  const text = line.map(([x, y]) => `${x},${y}`).join(" ");
  const area = document.createElementNS(SVG, "polygon");
  area.setAttribute("points", `${line[0][0]},${HEIGHT} ${text} ${WIDTH},${HEIGHT}`);
  area.setAttribute("class", "area");
  const stroke = document.createElementNS(SVG, "polyline");
  stroke.setAttribute("points", text);
  stroke.setAttribute("class", "line");
  element.append(area, stroke);
}

/** Draw all charts below an element. */
export function drawCharts(root) {
  for (const element of root.querySelectorAll("[data-chart]")) {
    draw(element);
  }
}

/** Add the newest point to a chart. */
export function addPoint(element, value) {
  element.dataset.points = [...pointsOf(element), value].slice(-POINTS_MAX).join(" ");
  draw(element);
}
