"use strict";
// The lab in its frame has the theme of the page around it. It reads its theme when it is loaded.
const frame = document.querySelector("iframe.lab");
const follow = () => {
  const dark = document.body.dataset.mdColorScheme === "slate";
  try { localStorage.setItem("onchip-theme", dark ? "dark" : "light"); } catch { /* the system's theme */ }
  frame.src = frame.dataset.src;
};
if (frame) {
  const choices = document.querySelectorAll("[data-md-component=palette] input");
  for (const choice of choices) choice.addEventListener("change", () => setTimeout(follow));
  follow();
}
