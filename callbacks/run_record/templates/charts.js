"use strict";
// The charts of a page: values under the pointer, zoom by dragging, smoothing. As the page comes, each chart shows all of
// its steps; what another view needs is drawn here, from the points in `data-chart`, as `charts.py` draws the first one.

const POINTS_WITH_DOTS = 40;
const view = {range: null, smoothing: 0}; // of all charts: [first step, last step], or all; 0 to 0.99
const plots = new Map();

const number = value => typeof value === "number" ? String(Number(value.toPrecision(4))) : value;
const grouped = step => Math.round(step).toLocaleString("en-US");

function short(value) {
  for (const [unit, size] of [["G", 1e9], ["M", 1e6], ["k", 1e3]]) {
    if (Math.abs(value) >= Math.max(size, 1e4) && Math.abs(value) < 1e13) return Number((value / size).toPrecision(6)) + unit;
  }
  return String(Number(value.toPrecision(6)));
}

function make(tag, attributes, text = "") {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.textContent = text;
  return element;
}

// The index of the first of these ascending steps that is at least `step`.
function search(steps, step) {
  let low = 0, high = steps.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (steps[middle] < step) low = middle + 1; else high = middle;
  }
  return low;
}

// A moving average without the bias of its start. A value that is no number stays as it is.
function smoothed(values, weight) {
  let sum = 0, count = 0;
  return values.map(value => {
    if (typeof value !== "number") return value;
    sum = weight * sum + (1 - weight) * value;
    count = weight * count + (1 - weight);
    return sum / count;
  });
}

// At most four round numbers between two numbers.
function ticks(low, high) {
  let unit = 10 ** Math.floor(Math.log10((high - low) / 4));
  unit *= [1, 2, 5, 10].find(times => (high - low) / (unit * times) <= 4) || 10;
  const found = [];
  for (let count = Math.ceil(low / unit); count <= Math.floor(high / unit); count++) found.push(unit * count);
  return found;
}

// Round numbers whose logarithms are between two numbers.
function powers(low, high) {
  const every = Math.max(1, Math.ceil((high - low) / 4));
  let found = [];
  for (const digits of [[1], [1, 3], [1, 2, 5]]) {
    found = [];
    for (let decade = every * Math.ceil(Math.floor(low) / every); decade <= Math.ceil(high); decade += every) {
      for (const digit of digits) {
        const value = digit * 10 ** decade;
        if (low <= Math.log10(value) && Math.log10(value) <= high) found.push(value);
      }
    }
    if (found.length >= 3) break;
  }
  return found;
}

class Plot {
  constructor(figure) {
    this.svg = figure.querySelector(".chart");
    this.axis = figure.querySelector(".axis");
    this.cursor = figure.querySelector(".cursor");
    this.cells = [...figure.querySelectorAll("[data-value]")];
    this.usual = this.cells.map(cell => cell.textContent);
    Object.assign(this, JSON.parse(this.svg.dataset.chart)); // lines, marks, log
    this.height = Number(this.svg.getAttribute("height"));
    this.top = Number(this.cursor.getAttribute("y1"));
    this.bottom = Number(this.cursor.getAttribute("y2"));
    this.asItCame = [[...this.axis.childNodes], [...this.svg.childNodes]];
    this.steps = [...new Set(this.lines.flatMap(line => line.steps))].sort((one, other) => one - other);
    this.pressed = null;
    this.svg.onpointermove = event => this.move(event);
    this.svg.onpointerdown = event => this.press(event);
    this.svg.onpointerup = event => this.release(event);
    this.svg.onpointercancel = this.svg.onpointerleave = () => this.leave();
    this.svg.ondblclick = () => show({range: null});
  }

  get first() { return view.range ? view.range[0] : this.steps[0]; }
  get last() { return view.range ? view.range[1] : this.steps[this.steps.length - 1]; }
  x(step) { return this.first === this.last ? 50 : 100 * (step - this.first) / (this.last - this.first); }

  percent(event) {
    const box = this.svg.getBoundingClientRect();
    return Math.min(100, Math.max(0, 100 * (event.clientX - box.left) / box.width));
  }

  move(event) {
    const at = this.percent(event);
    if (this.pressed !== null) {
      this.selection.setAttribute("x", Math.min(at, this.pressed) + "%");
      this.selection.setAttribute("width", Math.abs(at - this.pressed) + "%");
    }
    const wanted = this.first + (this.last - this.first) * at / 100;
    const next = search(this.steps, wanted), near = this.steps.slice(Math.max(0, next - 1), next + 1);
    const step = near.reduce((one, other) => Math.abs(other - wanted) < Math.abs(one - wanted) ? other : one);
    this.cursor.setAttribute("x1", this.x(step) + "%");
    this.cursor.setAttribute("x2", this.x(step) + "%");
    this.svg.classList.toggle("on", this.x(step) >= 0 && this.x(step) <= 100);
    this.tell(["step " + grouped(step), ...this.lines.map(line => {
      const count = search(line.steps, step + 1e-9);
      return count ? number(line.values[count - 1]) : "-";
    })]);
  }

  press(event) {
    if (event.button || this.steps.length < 2) return;
    this.pressed = this.percent(event);
    this.selection = make("rect", {class: "selection", y: this.top, height: this.bottom - this.top, width: 0});
    this.svg.append(this.selection);
    this.svg.setPointerCapture?.(event.pointerId);
  }

  release(event) {
    const from = this.pressed, to = this.percent(event);
    this.stop();
    if (from === null || Math.abs(to - from) < 2) return;
    const [low, high] = [Math.min(from, to), Math.max(from, to)];
    const width = this.last - this.first;
    show({range: [this.first + width * low / 100, this.first + width * high / 100]});
  }

  leave() {
    this.stop();
    this.svg.classList.remove("on");
    this.tell(this.usual);
  }

  stop() {
    this.pressed = null;
    this.selection?.remove();
  }

  tell(texts) { this.cells.forEach((cell, index) => { cell.textContent = texts[index]; }); }

  draw() {
    const [axis, svg] = this.asItCame;
    if (!view.range && !view.smoothing) {
      this.axis.replaceChildren(...axis);
      this.svg.replaceChildren(...svg);
      return;
    }
    const curves = this.curves();
    this.scale(curves);
    const values = this.log ? powers(this.low, this.high) : ticks(this.low, this.high);
    this.axis.replaceChildren(...values.map(value => make("text", {x: 48, y: this.y(value), dy: ".32em"}, short(value))));
    const height = this.bottom - this.top;
    const picture = make("svg", {viewBox: `0 ${this.top} 1000 ${height}`, y: this.top, width: "100%", height, preserveAspectRatio: "none"});
    const drawn = [...curves].sort((one, other) => (other.kind === "within") - (one.kind === "within"));
    for (const curve of drawn) picture.append(...this.paths(curve));
    this.svg.replaceChildren(
      ...values.map(value => make("line", {x1: 0, x2: "100%", y1: this.y(value), y2: this.y(value)})),
      ...this.stepTicks(), ...this.markLines(), picture, ...drawn.flatMap(curve => this.dots(curve)), this.cursor);
  }

  // Each line's points in the range, with one more at either side, so that it goes on to the edge.
  curves() {
    return this.lines.map(line => {
      const from = Math.max(0, search(line.steps, this.first) - 1), to = search(line.steps, this.last) + 1;
      const values = view.smoothing ? smoothed(line.values, view.smoothing) : line.values;
      return {kind: line.kind, steps: line.steps.slice(from, to), values: values.slice(from, to), raw: line.values.slice(from, to)};
    });
  }

  // The vertical scale: of the values that are shown, with a margin.
  scale(curves) {
    const all = [], within = [];
    for (const curve of curves) {
      curve.values.forEach((value, index) => {
        if (typeof value !== "number" || this.log && value <= 0) return;
        const height = this.log ? Math.log10(value) : value;
        all.push(height);
        if (curve.steps[index] >= this.first && curve.steps[index] <= this.last) within.push(height);
      });
    }
    const heights = within.length ? within : all.length ? all : [0];
    const low = Math.min(...heights), high = Math.max(...heights);
    const room = Math.max(0.04 * (high - low), 5e-4 * Math.max(Math.abs(low), Math.abs(high)), 1e-12);
    this.low = low - room;
    this.high = high + room;
  }

  y(value) {
    const height = this.log ? Math.log10(value) : value;
    return this.bottom - (this.bottom - this.top) * (height - this.low) / (this.high - this.low);
  }

  path(steps, values) {
    let text = "", pen = "M";
    steps.forEach((step, index) => {
      const value = values[index];
      if (typeof value !== "number" || this.log && value <= 0) { pen = "M"; return; }
      text += `${pen}${(10 * this.x(step)).toFixed(1)} ${this.y(value).toFixed(1)}${pen === "M" ? "h0" : ""}`;
      pen = "L";
    });
    return text;
  }

  paths(curve) {
    const kind = curve.kind + (curve.steps.length > 180 ? " dense" : "");
    const line = make("path", {class: kind, d: this.path(curve.steps, curve.values)});
    if (!view.smoothing) return [line];
    return [make("path", {class: kind + " raw", d: this.path(curve.steps, curve.raw)}), line];
  }

  dots(curve) {
    if (curve.steps.length > POINTS_WITH_DOTS) return [];
    return curve.steps.flatMap((step, index) => {
      const value = curve.values[index];
      if (typeof value !== "number" || step < this.first || step > this.last) return [];
      return [make("circle", {class: curve.kind, cx: this.x(step) + "%", cy: this.y(value), r: 2.6})];
    });
  }

  stepTicks() {
    const steps = this.first === this.last ? [this.first] : ticks(this.first, this.last).filter(Number.isInteger);
    return steps.map(step => {
      const x = this.x(step), anchor = x < 8 ? "start" : x > 92 ? "end" : "middle";
      return make("text", {x: x + "%", y: this.height - 4, "text-anchor": anchor}, grouped(step));
    });
  }

  markLines() {
    const shown = this.marks.filter(step => step >= this.first && step <= this.last).map(step => this.x(step) + "%");
    return shown.map(x => make("line", {class: "mark", x1: x, x2: x, y1: this.top, y2: this.bottom}));
  }
}

// Shows another range of steps, or another smoothing, in all charts.
function show(change) {
  Object.assign(view, change);
  for (const plot of plots.values()) plot.draw();
  for (const tools of document.querySelectorAll(".tools")) {
    tools.querySelector("button").hidden = !view.range;
    tools.querySelector("b").textContent = view.smoothing;
  }
}

// Makes the charts of the page work, also those that have come since the last call.
function start() {
  for (const figure of plots.keys()) if (!figure.isConnected) plots.delete(figure);
  for (const figure of document.querySelectorAll("figure")) if (!plots.has(figure)) plots.set(figure, new Plot(figure));
  for (const tools of document.querySelectorAll(".tools")) {
    tools.hidden = false;
    tools.querySelector("input").value = view.smoothing;
    tools.querySelector("input").oninput = event => show({smoothing: Number(event.target.value)});
    tools.querySelector("button").onclick = () => show({range: null});
  }
  show({});
}

start();
