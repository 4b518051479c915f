"use strict";
// Elements and numbers. Text from runs becomes text nodes only.
function h(tag, attributes, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name === "class") element.className = value;
    else if (name === "color") element.style.background = value;
    else if (name === "width") element.style.width = value;
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value != null) element.setAttribute(name, value);
  }
  for (const child of children.flat()) if (child != null && child !== false) element.append(child instanceof Node ? child : String(child));
  return element;
}
const $ = (id) => document.getElementById(id);
const fill = (element, ...children) => { element.replaceChildren(...children.flat().filter((child) => child != null && child !== false)); return element; };
const isNumber = (value) => typeof value === "number" && Number.isFinite(value);
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const isDark = () => document.documentElement.dataset.theme === "dark";

const whole = (value) => (isNumber(value) ? Math.round(value).toLocaleString("en-US") : "–");
function short(value) {
  for (const [size, letter] of [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"]]) if (Math.abs(value) >= size) return trim(value / size) + letter;
  return trim(value);
}
const trim = (value) => (Math.abs(value) >= 100 ? value.toFixed(0) : Math.abs(value) >= 10 ? value.toFixed(1) : value.toFixed(2)).replace(/\.0+$/, "");
function bytes(value) {
  if (!isNumber(value)) return "–";
  for (const [size, unit] of [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]]) if (value >= size) return `${trim(value / size)} ${unit}`;
  return `${Math.round(value)} B`;
}
function duration(seconds) {
  if (!isNumber(seconds)) return "–";
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  const s = Math.round(seconds);
  if (s < 60) return `${s} s`;
  if (s < 3600) return `${Math.floor(s / 60)}m ${String(s % 60).padStart(2, "0")}s`;
  if (s < 172800) return `${Math.floor(s / 3600)}h ${String(Math.floor((s % 3600) / 60)).padStart(2, "0")}m`;
  return `${Math.floor(s / 86400)}d ${Math.floor((s % 86400) / 3600)}h`;
}
const countRanks = (n) => (language === "en" && n === 1 ? "1 rank" : `${whole(n)} ${t("ranks_n")}`);
const percent = (share) => (isNumber(share) ? `${(share * 100).toFixed(1)}%` : "–");
function clock(seconds) {
  if (!isNumber(seconds)) return "";
  const date = new Date(seconds * 1000), two = (n) => String(n).padStart(2, "0");
  return `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())} ${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}`;
}
function precise(value) {
  if (!isNumber(value)) return "–";
  const size = Math.abs(value);
  if (size && (size < 1e-3 || size >= 1e7)) return value.toExponential(2);
  return size >= 1000 ? value.toLocaleString("en-US", { maximumFractionDigits: 1 }) : value.toFixed(size >= 100 ? 2 : 4);
}
// How each metric is written: in words beside a curve, and at its axis.
const STYLES = {
  lr: { value: (v) => v.toExponential(2), axis: (v) => (v ? v.toExponential(1).replace(".0e", "e") : "0") },
  mfu: { value: percent, axis: (v) => `${+(v * 100).toFixed(1)}%` },
  peak_memory_bytes: { value: bytes, axis: bytes },
  tokens_per_s: { value: (v) => short(v), axis: short },
  samples_per_s: { value: (v) => short(v), axis: short },
  skipped_steps: { value: whole, axis: whole },
  grad_norm: { value: (v) => v.toFixed(3), axis: (v) => (Math.abs(v) >= 1000 ? short(v) : +v.toPrecision(4) + "") },
};
const styleOf = (name) => STYLES[name] || { value: precise, axis: (v) => (Math.abs(v) >= 10000 ? short(v) : +v.toPrecision(5) + "") };
const AXIS_STYLES = { step: { value: whole, axis: (v) => (v >= 100000 ? short(v) : whole(v)) }, tokens: { value: short, axis: short }, time: { value: duration, axis: duration } };

const tip = {
  show(event, text) { const box = $("tip"); box.textContent = text; box.hidden = false; const { width, height } = box.getBoundingClientRect();
    box.style.left = `${Math.max(6, Math.min(innerWidth - width - 6, event.clientX + 14))}px`; box.style.top = `${Math.max(6, event.clientY + 18 + height > innerHeight ? event.clientY - height - 10 : event.clientY + 18)}px`; },
  hide() { $("tip").hidden = true; },
};
const PALETTE = { light: ["#2f5fb3", "#c2710c", "#2d8a5f", "#a23b72", "#6b57b8", "#0f7f8c", "#8a6d1d", "#b0413e"], dark: ["#7aa7f0", "#e9a655", "#68c79b", "#e08bb5", "#ab9bf0", "#5fc3cf", "#d1b766", "#ec8d86"] };
const colorOf = (index) => { const all = PALETTE[isDark() ? "dark" : "light"]; return all[index % all.length]; };
const PHASES = { data: ["#8d79b8", "#a594d1"], forward: ["#5b8fcf", "#6ea2e3"], backward: ["#2f5fa3", "#4877bd"], compute: ["#3f77bb", "#5a92d6"], wait: ["#d8d3c8", "#3a4147"], optimizer: ["#4d9a72", "#5fb388"], save: ["#d39a3c", "#dba951"], other: ["#a9a398", "#6f777d"] };
const EXTRA = ["#c26a8b", "#7a9e3f", "#3aa0a0", "#b5763f", "#6c6fc4"];
const phaseColor = (name, index) => (Object.hasOwn(PHASES, name) ? PHASES[name][isDark() ? 1 : 0] : EXTRA[index % EXTRA.length]);
// A canvas as sharp as the screen.
function canvasOf(canvas, height) {
  const width = Math.max(10, canvas.parentElement.clientWidth), ratio = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * ratio); canvas.height = Math.round(height * ratio); canvas.style.height = `${height}px`;
  const g = canvas.getContext("2d"); g.setTransform(ratio, 0, 0, ratio, 0, 0); g.clearRect(0, 0, width, height);
  return [g, width];
}
// A word of a command line.
const quoted = (text) => (/^[\w./~+-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`);
