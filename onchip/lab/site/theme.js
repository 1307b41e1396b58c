"use strict";
// Runs before the first paint: the stored theme, or the system's.

const theme = {
  kept() { try { return localStorage.getItem("onchip-theme"); } catch { return null; } },
  keep(name) { try { localStorage.setItem("onchip-theme", name); } catch { /* a page that may store nothing */ } },
};
if (["light", "dark"].includes(theme.kept())) document.documentElement.dataset.theme = theme.kept();
