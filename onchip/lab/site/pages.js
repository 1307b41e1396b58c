"use strict";
// The playground: operations go to the Python pool where a server is behind the page, else to its twin.

lab.figures.pages = (panel, rules) => {
  const live = document.documentElement.dataset.behind === "live";
  const twin = live ? null : new lab.twin.Playground(rules);
  const PROMPTS = rules.prompts, STORY_MS = 1500;
  let state = null, telling = 0, busy = Promise.resolve();

  const input = lab.h("input", { id: "pages-text", type: "text", value: PROMPTS[1], maxlength: 400, autocomplete: "off", spellcheck: "false", "aria-label": "Prompt: words of a new sequence" });
  const form = lab.h("form", { class: "ask", onsubmit: (event) => { event.preventDefault(); hush(); add(); } }, input, lab.h("button", { class: "act main", id: "pages-add" }, "Add"));
  const act = (id, text, operation) => lab.h("button", { type: "button", class: "act", id, onclick: () => { hush(); play(operation); } }, text);
  const story = lab.h("button", { type: "button", class: "act", id: "pages-story", onclick: () => (telling ? hush() : tell()) }, "Show me");
  const pool = lab.h("ul", { class: "pool", "aria-label": "Pages of the pool" });
  const cells = Array.from({ length: rules.num_pages - 1 }, (_, i) => cell(i + 1));
  const tables = lab.h("ul", { class: "tables", "aria-label": "Page tables" });
  const say = lab.h("p", { class: "say", role: "status", id: "pages-say" }, "A prompt, and a fork of it: all but the last page is shared.");
  const facts = lab.facts([["used", "pages in use"], ["cached", "free, remembering"], ["shared", "saved by sharing", "of-a"], ["hits", "words found again", "of-a"]]);
  const key = (name, text) => lab.h("li", {}, lab.h("i", { class: `key ${name}` }), text);
  pool.append(...cells.map((one) => one.element));
  panel.append(form,
    lab.h("div", { class: "controls" }, act("pages-generate", "All draw a word", { do: "generate", name: null }), act("pages-reset", "Start over", { do: "reset" }), story),
    say, pool,
    lab.h("ul", { class: "legend" }, key("held", "one colour a sequence"), key("many", "shared"), key("cached", "free, remembers a prefix"), key("blank", "blank")),
    facts, tables);
  lab.at("pages-behind").textContent = live
    ? "These pages are managed by onchip.kvcache's own pool, in the Python process that serves this page."
    : "These pages are managed by a twin of onchip.kvcache's pool; a test drives both through the same 1,000 operations. Under “onchip lab” it is the Python pool itself.";

  const colour = (name) => lab.distinct(name.charCodeAt(0) - 65 + 7 * Number(name.slice(1) || 0));

  function cell(page) {
    const words = Array.from({ length: rules.page_size }, () => lab.h("span", {})), refs = lab.h("em", {});
    const element = lab.h("li", { class: "page blank", "data-page": page }, words, refs, lab.h("b", { "aria-hidden": "true" }, `${page}`));
    element.addEventListener("pointerenter", () => light(state?.tables.filter((t) => t.pages.includes(page)).map((t) => t.name) ?? []));
    element.addEventListener("pointerleave", () => light(null));
    return { element, words, refs };
  }

  async function send(operation) {
    if (!live) return { ...(operation ? twin.do(operation) : { ok: true, say: "" }), state: twin.state() };
    const reply = await fetch("pages", operation ? { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(operation) } : {});
    return reply.json();
  }

  // One after another, in the order they were asked for.
  function play(operation) {
    busy = busy.then(async () => {
      try {
        const answer = await send(operation);
        if (answer.say) say.textContent = answer.say;
        say.classList.toggle("bad", !answer.ok);
        if (answer.state) show(answer.state);
      } catch {
        say.textContent = "The server that keeps these pages is gone: start onchip lab again.";
        say.classList.add("bad");
      }
    });
    return busy;
  }

  function add() {
    play({ do: "add", text: input.value });
    const at = PROMPTS.indexOf(input.value);
    if (at >= 0) input.value = PROMPTS[(at + 1) % PROMPTS.length];
  }

  // A story, an operation at a time, until it ends or somebody does something else.
  function tell() {
    const left = rules.story.slice();
    const next = () => {
      play(left.shift());
      if (!left.length) hush();
    };
    story.textContent = "Stop";
    telling = setInterval(next, STORY_MS);
    next();
  }

  function hush() {
    clearInterval(telling);
    telling = 0;
    story.textContent = "Show me";
  }

  function show(next) {
    const before = state;
    state = next;
    const holders = next.refs.map(() => []);
    for (const table of next.tables) for (const page of table.pages) holders[page - 1].push(table.name);
    cells.forEach((one, i) => paint(one, i, holders[i], before));
    if (before) next.copies.forEach(fly);
    facts.tell("used", `${cells.length - next.free} of ${cells.length}`);
    facts.tell("cached", `${next.cached}`);
    facts.tell("shared", `${next.shared}`);
    facts.tell("hits", `${next.stats[1] + next.stats[2]} of ${next.stats[0]}`);
    list();
  }

  function paint({ element, words, refs }, i, names, before) {
    const filled = state.filled[i], held = names.length;
    const length = held ? longest(i + 1) : filled;
    words.forEach((word, slot) => { word.textContent = slot < length ? state.memory[i][slot] : ""; });
    refs.textContent = held > 1 ? `×${held}` : "";
    const fresh = before && held && (!before.refs[i] || before.memory[i].join() !== state.memory[i].join());
    element.className = `page ${held > 1 ? "held many" : held ? "held" : filled ? "cached" : "blank"}${fresh ? " fresh" : ""}`;
    element.style.setProperty("--own", held ? colour(names[0]) : "var(--n)");
    element.setAttribute("aria-label", `Page ${i + 1}: ${held ? `held by ${names.join(", ")}` : filled ? "free, remembers a prefix" : "blank"}`);
    if (fresh) setTimeout(() => element.classList.remove("fresh"), 500);
  }

  // A copy is seen to go from one page to the other.
  function fly([from, to]) {
    if (lab.still.matches) return;
    const [a, b] = [from, to].map((page) => cells[page - 1].element), ghost = a.cloneNode(true);
    ghost.setAttribute("aria-hidden", "true");
    ghost.className = "page held ghost";
    ghost.style.setProperty("--own", b.style.getPropertyValue("--own"));
    Object.assign(ghost.style, { left: `${a.offsetLeft}px`, top: `${a.offsetTop}px`, width: `${a.offsetWidth}px`, height: `${a.offsetHeight}px` });
    pool.append(ghost);
    const way = `translate(${b.offsetLeft - a.offsetLeft}px, ${b.offsetTop - a.offsetTop}px)`;
    ghost.animate([{ transform: "none", opacity: 0.9 }, { transform: way, opacity: 0.9 }], { duration: 550, easing: "ease-in-out" }).finished.finally(() => ghost.remove());
  }

  // Slots of a page that its holders use.
  function longest(page) {
    return Math.max(...state.tables.filter((t) => t.pages.includes(page))
      .map((t) => Math.min(rules.page_size, t.words.length - t.pages.indexOf(page) * rules.page_size)));
  }

  function list() {
    const focus = document.activeElement?.dataset?.act;
    tables.replaceChildren(...state.tables.map((table) => {
      const button = (name, text, operation) => lab.h("button", { type: "button", "data-act": `${name} ${table.name}`, "aria-label": `${text} ${table.name}`, onclick: () => { hush(); play(operation); } }, text);
      const row = lab.h("li", { class: "table", "data-name": table.name },
        lab.h("strong", {}, table.name),
        lab.h("span", { class: "where", "aria-label": `pages ${table.pages.join(", ")}` }, table.pages.map((page) => lab.h("i", {}, `${page}`))),
        lab.h("span", { class: "acts" }, button("generate", "draw", { do: "generate", name: table.name }), button("fork", "fork", { do: "fork", name: table.name }),
          button("beam", "beam", { do: "beam", name: table.name }), button("truncate", "undo", { do: "truncate", name: table.name, count: 1 }),
          button("free", "free", { do: "free", name: table.name })),
        lab.h("span", { class: "text" }, lab.h("bdi", {}, table.words.join(" "))));
      row.style.setProperty("--own", colour(table.name));
      row.addEventListener("pointerenter", () => light([table.name]));
      row.addEventListener("pointerleave", () => light(null));
      return row;
    }));
    if (focus) tables.querySelector(`[data-act="${focus}"]`)?.focus();
  }

  function light(names) {
    if (!state) return;
    cells.forEach(({ element }, i) => element.classList.toggle("dim", Boolean(names?.length)
      && !state.tables.some((t) => names.includes(t.name) && t.pages.includes(i + 1))));
  }

  if (twin) rules.opening.forEach((operation) => twin.do(operation));
  play(null);
  return { play, get state() { return state; }, idle: () => busy };
};
