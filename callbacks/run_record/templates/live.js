"use strict";
// A page that its server makes anew while the run trains: what has changed is replaced, and nothing else, so that the
// page doesn't flicker, and stays where it was scrolled and zoomed to.

const EVERY = 2000; // milliseconds between two questions
const PARTS = new Set(["MAIN", "SECTION", "DIV"]); // whose children are compared one by one
let before = document.querySelector("main").cloneNode(true); // as the server sent it: `charts.js` changes what is shown
let tag = "";

function merge(shown, was, is) {
  if (was.isEqualNode(is)) return;
  if (PARTS.has(is.tagName) && is.tagName === was.tagName && is.children.length && is.children.length === was.children.length) {
    const pairs = [...shown.children];
    pairs.forEach((child, index) => merge(child, was.children[index], is.children[index]));
  } else {
    shown.replaceWith(document.importNode(is, true));
  }
}

async function ask() {
  // Not while the pointer draws a range of steps: its chart would be replaced.
  if (![...plots.values()].some(plot => plot.pressed !== null)) {
    let text = "No connection any more: this is what there was before.";
    try {
      await refresh();
      text = document.querySelector(".status.running") ? "Live: the page updates by itself." : "The run is over.";
    } catch { /* the server has ended, or will answer again */ }
    document.getElementById("connection").textContent = text;
  }
  setTimeout(ask, EVERY);
}

async function refresh() {
  const answer = await fetch(location.pathname, {headers: {"If-None-Match": tag}, cache: "no-store"});
  if (answer.status === 304) return;
  if (!answer.ok) throw new Error(answer.status);
  const page = new DOMParser().parseFromString(await answer.text(), "text/html"), main = page.querySelector("main");
  merge(document.querySelector("main"), before, main);
  before = main.cloneNode(true);
  tag = answer.headers.get("ETag");
  document.title = page.title;
  start();
}

addEventListener("load", ask);
