"use strict";
// Before the first paint: the theme that was chosen on the pages of the site, or else the system's.
const base = new URL(`${document.currentScript.dataset.base}/`, location);
const read = () => { try { return JSON.parse(localStorage.getItem(`${base.pathname}.__palette`)); } catch { return null; } };
const system = matchMedia("(prefers-color-scheme: dark)").matches ? "slate" : "default";
const scheme = read()?.color?.scheme ?? system;
document.documentElement.dataset.theme = scheme === "slate" ? "dark" : "light";
