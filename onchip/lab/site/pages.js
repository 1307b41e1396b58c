"use strict";
// The playground. Operations go to the Python pool if a server answers, otherwise to pool.js.

lab.figures.pages = (panel, rules) => {
  const live = document.documentElement.dataset.behind === "live";
  const local = live ? null : new lab.localPool.Playground(rules);
  const PROMPTS = rules.prompts, STORY_MS = 1500, FLIGHT_MS = 550;
  const ACTS = { generate: "draw", fork: "fork", beam: "beam", truncate: "undo", free: "free" };
  let state = null, timer = 0, busy = Promise.resolve();
  const colour = (name) => lab.distinct(name.charCodeAt(0) - 65 + 7 * Number(name.slice(1) || 0));
  const ask = (operation) => { stopStory(); return play(operation); };

  const input = lab.h("input", { id: "pages-text", type: "text", value: PROMPTS[1], maxlength: 400, autocomplete: "off",
    spellcheck: "false", "aria-label": "Prompt: words of a new sequence" });
  const form = lab.h("form", { class: "ask", onsubmit: (event) => { event.preventDefault(); add(); } },
    input, lab.h("button", { class: "act main", id: "pages-add" }, "Add"));
  const act = (id, text, onclick) => lab.h("button", { type: "button", class: "act", id, onclick }, text);
  const story = act("pages-story", "Show me", () => (timer ? stopStory() : playStory()));
  const cells = Array.from({ length: rules.num_pages - 1 }, (_, i) => cell(i + 1));
  const pool = lab.h("ul", { class: "pool", "aria-label": "Pages of the pool" }, cells.map((one) => one.element));
  const tables = lab.h("ul", { class: "tables", "aria-label": "Page tables" });
  const say = lab.h("p", { class: "say", role: "status", id: "pages-say" }, "A prompt, and a fork of it: all but the last page is shared.");
  const facts = lab.facts([["used", "pages in use"], ["cached", "free, cached"], ["shared", "saved by sharing", "of-a"],
    ["hits", "words from the cache", "of-a"]]);
  const key = (kind, text) => lab.h("li", {}, lab.h("i", { class: `key ${kind}` }), text);
  panel.append(form,
    lab.h("div", { class: "controls" },
      act("pages-generate", "Add a word to all", () => ask({ do: "generate", name: null })),
      act("pages-reset", "Start over", () => ask({ do: "reset" })), story),
    say, pool,
    lab.h("ul", { class: "legend" }, key("held", "one colour a sequence"), key("many", "shared"),
      key("cached", "free, caches a prefix"), key("blank", "blank")),
    facts, tables);
  lab.at("pages-behind").textContent = live
    ? "These pages are managed by onchip.kvcache's own pool, in the Python process that serves this page."
    : "These pages are managed by a copy of onchip.kvcache's pool in JavaScript; a test compares both after each of 1,000 operations. "
      + "With “onchip lab” it is the Python pool itself.";

  function cell(page) {
    const words = Array.from({ length: rules.page_size }, () => lab.h("span", {})), refs = lab.h("em", {});
    const number = lab.h("b", { "aria-hidden": "true" }, `${page}`);
    const element = lab.h("li", { class: "page blank", "data-page": page }, words, refs, number);
    element.addEventListener("pointerenter", () => light(holders(page).map((table) => table.name)));
    element.addEventListener("pointerleave", () => light([]));
    return { element, words, refs };
  }

  const holders = (page) => state?.tables.filter((table) => table.pages.includes(page)) ?? [];

  async function send(operation) {
    if (!live) return { ...(operation ? local.do(operation) : { ok: true, say: "" }), state: local.state() };
    const headers = { "content-type": "application/json" }, body = JSON.stringify(operation);
    return (await fetch("pages", operation ? { method: "POST", headers, body } : {})).json();
  }

  // One at a time, in the order of the calls.
  function play(operation) {
    busy = busy.then(async () => {
      try {
        answered(await send(operation));
      } catch {
        answered({ ok: false, say: "The server of these pages has stopped: start onchip lab again." });
      }
    });
    return busy;
  }

  function answered(answer) {
    if (answer.say) say.textContent = answer.say;
    say.classList.toggle("bad", !answer.ok);
    if (answer.state) show(answer.state);
  }

  function add() {
    ask({ do: "add", text: input.value });
    const at = PROMPTS.indexOf(input.value);
    if (at >= 0) input.value = PROMPTS[(at + 1) % PROMPTS.length];
  }

  // Runs a story, one operation at a time, until it ends or another control is used.
  function playStory() {
    const left = rules.story.slice();
    const next = () => {
      play(left.shift());
      if (!left.length) stopStory();
    };
    story.textContent = "Stop";
    timer = setInterval(next, STORY_MS);
    next();
  }

  function stopStory() {
    clearInterval(timer);
    timer = 0;
    story.textContent = "Show me";
  }

  function show(next) {
    const before = state;
    state = next;
    cells.forEach((one, i) => paint(one, i, before));
    if (before) next.copies.forEach(fly);
    facts.update("used", `${cells.length - next.free} of ${cells.length}`);
    facts.update("cached", `${next.cached}`);
    facts.update("shared", `${next.shared}`);
    facts.update("hits", `${next.stats[1] + next.stats[2]} of ${next.stats[0]}`);
    list();
  }

  function paint({ element, words, refs }, i, before) {
    const by = holders(i + 1), filled = state.filled[i], names = by.map((table) => table.name);
    const used = by.length ? Math.max(...by.map((table) => table.words.length - table.pages.indexOf(i + 1) * rules.page_size)) : filled;
    const changed = before && by.length && (!before.refs[i] || before.memory[i].join() !== state.memory[i].join());
    const kind = by.length > 1 ? "held many" : by.length ? "held" : filled ? "cached" : "blank";
    const what = by.length ? `held by ${names.join(", ")}` : filled ? "free, caches a prefix" : "blank";
    words.forEach((word, slot) => { word.textContent = slot < used ? state.memory[i][slot] : ""; });
    refs.textContent = by.length > 1 ? `×${by.length}` : "";
    element.className = `page ${kind}${changed ? " fresh" : ""}`;
    element.style.setProperty("--own", by.length ? colour(names[0]) : "var(--n)");
    element.setAttribute("aria-label", `Page ${i + 1}: ${what}`);
    if (changed) setTimeout(() => element.classList.remove("fresh"), FLIGHT_MS);
  }

  // Animates a copy from one page to the other.
  function fly([from, to]) {
    if (lab.still.matches) return;
    const [a, b] = [from, to].map((page) => cells[page - 1].element), ghost = a.cloneNode(true), pixels = (x) => `${x}px`;
    ghost.setAttribute("aria-hidden", "true");
    ghost.className = "page held ghost";
    ghost.style.setProperty("--own", b.style.getPropertyValue("--own"));
    const [left, top, width, height] = [a.offsetLeft, a.offsetTop, a.offsetWidth, a.offsetHeight].map(pixels);
    Object.assign(ghost.style, { left, top, width, height });
    pool.append(ghost);
    const way = `translate(${pixels(b.offsetLeft - a.offsetLeft)}, ${pixels(b.offsetTop - a.offsetTop)})`;
    ghost.animate([{ transform: "none" }, { transform: way }], { duration: FLIGHT_MS, easing: "ease-in-out" })
      .finished.finally(() => ghost.remove());
  }

  function list() {
    const focus = document.activeElement?.dataset?.act;
    tables.replaceChildren(...state.tables.map(row));
    if (focus) tables.querySelector(`[data-act="${focus}"]`)?.focus();
  }

  function row({ name, pages, words }) {
    const buttons = Object.entries(ACTS).map(([kind, text]) => lab.h("button", {
      type: "button", "data-act": `${kind} ${name}`, "aria-label": `${text} ${name}`, onclick: () => ask({ do: kind, name, count: 1 }),
    }, text));
    const element = lab.h("li", { class: "table", "data-name": name }, lab.h("strong", {}, name),
      lab.h("span", { class: "where", role: "img", "aria-label": `pages ${pages.join(", ")}` }, pages.map((page) => lab.h("i", {}, `${page}`))),
      lab.h("span", { class: "acts" }, buttons), lab.h("span", { class: "text" }, lab.h("bdi", {}, words.join(" "))));
    element.style.setProperty("--own", colour(name));
    element.addEventListener("pointerenter", () => light([name]));
    element.addEventListener("pointerleave", () => light([]));
    return element;
  }

  // Highlights the pages of some sequences; an empty list removes the highlight.
  function light(names) {
    const lit = (page) => !names.length || holders(page).some((table) => names.includes(table.name));
    cells.forEach(({ element }, i) => element.classList.toggle("dim", !lit(i + 1)));
  }

  if (local) rules.opening.forEach((operation) => local.do(operation));
  play(null);
  return { play, get state() { return state; }, idle: () => busy };
};
