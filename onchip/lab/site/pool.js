"use strict";
// A port of onchip/kvcache/pool.py, prefix.py and onchip/lab/playground.py, for a page without a server: the same pages
// in the same order. A test runs both through the same 1,000 random operations.

lab.localPool = (() => {
  class NoRoom {
    constructor(needed, free) { Object.assign(this, { needed, free }); }
  }

  class Table {
    constructor(pages, length) { Object.assign(this, { pages, length }); }
  }

  // Page 0 is the null page and the head of the list of cached pages, oldest first.
  class Pool {
    constructor(numPages, pageSize) {
      this.numPages = numPages;
      this.pageSize = pageSize;
      const zeros = () => new Array(numPages).fill(0);
      this.refs = zeros();
      this.filled = zeros();
      this.next = zeros();
      this.prev = zeros();
      this.blank = Array.from({ length: numPages - 1 }, (_, i) => numPages - 1 - i);
      this.numCached = 0;
      this.tables = new Set();
      this.onForget = () => {};
    }

    get capacity() { return this.numPages - 1; }
    get numFree() { return this.blank.length + this.numCached; }
    get numShared() {
      let held = 0;
      for (const table of this.tables) held += table.pages.length;
      return held - (this.capacity - this.numFree);
    }

    extend(table, count) { return this.extendAll([table], [count]); }

    extendAll(tables, counts) {
      const growth = tables.map((table, i) => this.growth(table, counts[i]));
      const writers = new Map();
      for (const [, tail] of growth) if (this.refs[tail] > 1) writers.set(tail, (writers.get(tail) ?? 0) + 1);
      let pages = 0;
      for (const [page, count] of writers) pages += Math.min(count, this.refs[page] - 1);  // the last holder keeps the page
      for (const [need] of growth) pages += need;
      if (pages > this.numFree) return new NoRoom(pages, this.numFree);
      return tables.flatMap((table, i) => this.grow(table, counts[i], ...growth[i]));
    }

    fork(table) {
      for (const page of table.pages) this.refs[page]++;
      return this.register(table.pages.slice(), table.length);
    }

    truncate(table, length) {
      const gone = table.pages.splice(this.pagesFor(length));
      table.length = length;
      this.release(gone);
    }

    free(table) {
      this.tables.delete(table);
      this.release(table.pages);
      table.pages = [];
      table.length = 0;
    }

    keep(page, filled) { this.filled[page] = filled; }

    adopt(pages) {
      for (const page of pages) this.pin(page);
      return this.register(pages.slice(), pages.length * this.pageSize);
    }

    copyPartialPage(table, source, count) {
      const free = this.numFree - (this.refs[source] ? 0 : 1);  // a page must not be allocated for its own copy
      if (!free) return new NoRoom(1, free);
      this.pin(source);
      this.grow(table, count, 1, 0);
      this.release([source]);
      return [[source, table.pages.at(-1)]];
    }

    pagesFor(length) { return Math.ceil(length / this.pageSize); }

    growth(table, count) {
      const need = this.pagesFor(table.length + count) - table.pages.length;
      return [need, count && table.length % this.pageSize ? table.pages.at(-1) : 0];
    }

    grow(table, count, need, tail) {
      let copies = [];
      if (tail) {
        if (this.refs[tail] > 1) copies = [this.own(table.pages)];
        const last = table.pages.at(-1);
        if (this.filled[last] > table.length % this.pageSize) this.forget(last);
      }
      table.pages.push(...this.take(need));
      table.length += count;
      return copies;
    }

    // Replaces the shared last page of a table by a new one.
    own(pages) {
      const source = pages.at(-1), [fresh] = this.take(1);
      this.refs[source]--;
      pages[pages.length - 1] = fresh;
      return [source, fresh];
    }

    register(pages, length) {
      const table = new Table(pages, length);
      this.tables.add(table);
      return table;
    }

    take(count) {
      const pages = this.blank.splice(Math.max(0, this.blank.length - count)).reverse();
      while (pages.length < count) {
        const page = this.next[0];
        this.unlink(page);
        this.forget(page);
        pages.push(page);
      }
      for (const page of pages) this.refs[page] = 1;
      return pages;
    }

    release(pages) {
      for (const page of pages.slice().reverse()) {
        if (--this.refs[page]) continue;
        if (this.filled[page]) this.append(page);
        else this.blank.push(page);
      }
    }

    forget(page) {
      this.filled[page] = 0;
      this.onForget(page);
    }

    pin(page) {
      if (!this.refs[page]) this.unlink(page);
      this.refs[page]++;
    }

    append(page) {
      const last = this.prev[0];
      this.next[last] = this.prev[0] = page;
      this.prev[page] = last;
      this.next[page] = 0;
      this.numCached++;
    }

    unlink(page) {
      const before = this.prev[page], after = this.next[page];
      this.next[before] = after;
      this.prev[after] = before;
      this.numCached--;
    }
  }

  // Token ids as strings of 8 characters a token, little end first: compared as Python compares the bytes.
  const WORD = 8;
  const bytesOf = (tokens) => tokens.map((token) =>
    String.fromCharCode(...Array.from({ length: WORD }, (_, i) => Math.floor(token / 2 ** (8 * i)) % 256))).join("");
  const keyAfter = (parent, ids) => `${parent}/${ids}`;  // the history itself, where Python hashes it

  function agreed(a, b) {
    let tokens = 0;
    while ((tokens + 1) * WORD <= Math.min(a.length, b.length)
      && a.slice(tokens * WORD, (tokens + 1) * WORD) === b.slice(tokens * WORD, (tokens + 1) * WORD)) tokens++;
    return tokens;
  }

  class Chain {
    constructor(root, keys = []) { Object.assign(this, { root, keys: keys.slice() }); }
    get last() { return this.keys.length ? this.keys.at(-1) : this.root; }
    fork() { return new Chain(this.root, this.keys); }
  }

  class PrefixIndex {
    constructor(pool) {
      this.pool = pool;
      this.entries = new Map();
      this.after = new Map();
      this.stats = [0, 0, 0];
      pool.onForget = (page) => this.remove(page);
    }

    root() { return ""; }

    match(tokens, root) {
      const size = this.pool.pageSize, limit = tokens.length - 1, ids = bytesOf(tokens);
      const pages = [], chain = new Chain(root);
      for (;;) {
        const start = pages.length * size;
        const wanted = ids.slice(start * WORD, Math.max(0, Math.min(start + size, limit)) * WORD);
        const [count, page] = this.nearest(chain.last, wanted);
        if (count === size) {
          pages.push(page);
          chain.keys.push(keyAfter(chain.last, wanted));
          continue;
        }
        this.stats = this.stats.map((total, i) => total + [tokens.length, start, count][i]);
        return { pages, keys: chain.keys, source: count ? page : null, copied: count };
      }
    }

    publish(table, tokens, length, chain, final = false) {
      const size = this.pool.pageSize, full = Math.floor(length / size), tail = length - full * size;
      const ids = (from, to) => bytesOf(tokens.slice(from, to));
      for (let i = chain.keys.length; i < full; i++) {
        const pageIds = ids(i * size, (i + 1) * size);
        this.insert(table.pages[i], { parent: chain.last, ids: pageIds });
        chain.keys.push(keyAfter(chain.last, pageIds));
      }
      if (tail && this.pool.filled[table.pages[full]] < (final ? tail : 1)) {
        this.insert(table.pages[full], { parent: chain.last, ids: ids(full * size, length) });
      }
    }

    nearest(key, wanted) {
      const many = this.after.get(key) ?? [];
      let at = many.findIndex(([ids]) => ids >= wanted);
      if (at < 0) at = many.length;
      let best = [0, 0];
      for (const [ids, page] of many.slice(Math.max(0, at - 1), at + 1)) {
        const found = [agreed(ids, wanted), page];
        if (found[0] > best[0] || (found[0] === best[0] && page > best[1])) best = found;
      }
      return best;
    }

    insert(page, entry) {
      if (this.entries.has(page)) this.remove(page);
      const many = this.after.get(entry.parent) ?? [];
      many.push([entry.ids, page]);
      many.sort(([a, i], [b, j]) => (a < b ? -1 : a > b ? 1 : i - j));
      this.after.set(entry.parent, many);
      this.entries.set(page, entry);
      this.pool.keep(page, entry.ids.length / WORD);
    }

    remove(page) {
      const { parent } = this.entries.get(page), many = this.after.get(parent);
      this.entries.delete(page);
      many.splice(many.findIndex((one) => one[1] === page), 1);
      if (!many.length) this.after.delete(parent);
    }
  }

  class Refused extends Error {}

  const counted = (number, what) => `${number} ${what}${number === 1 ? "" : "s"}`;
  const names = (sequences) => sequences.map((s) => s.name).join(", ");
  const copied = (copies) => copies.map(([a, b]) => ` Page ${a} was shared, so it was copied to ${b}.`).join("");

  function roomy(answer) {
    if (!(answer instanceof NoRoom)) return answer;
    throw new Refused(`That needs ${counted(answer.needed, "page")} and ${answer.free} are free: free a`
      + " sequence, or remove words.");
  }

  function found(name, asked, shared, copies) {
    if (!shared && !copies) return `${name} has ${counted(asked, "word")}, all of them new.`;
    const parts = [];
    if (shared) parts.push(`${counted(shared, "page")} shared`);
    if (copies) parts.push(`${counted(copies, "word")} copied`);
    return `${name} is partly cached: ${parts.join(", ")}. Only the rest is computed.`;
  }

  // rules: sizes, limits and draws, from playground.py.
  class Playground {
    constructor(rules) {
      this.rules = rules;
      this.reset();
    }

    do(operation) {
      this.copies = [];
      try {
        return { ok: true, say: this[operation.do](operation) };
      } catch (refusal) {
        if (!(refusal instanceof Refused)) throw refusal;
        return { ok: false, say: refusal.message };
      }
    }

    state() {
      const { pool } = this;
      return {
        tables: [...this.sequences.values()].map((s) => (
          { name: s.name, family: s.family, pages: s.table.pages.slice(), words: this.words(s) })),
        refs: pool.refs.slice(1),
        filled: pool.filled.slice(1),
        memory: this.memory.slice(1).map((page) => page.slice()),
        free: pool.numFree,
        cached: pool.numCached,
        shared: pool.numShared,
        stats: this.index.stats,
        copies: this.copies,
      };
    }

    words(s) { return s.tokens.map((token) => this.known[token]); }

    add({ text }) {
      const words = this.wordsOf(text), { max_vocabulary: most } = this.rules;
      if (this.known.length > most) throw new Refused(`More than ${most} words were used: start over.`);
      this.checkSeats(1);
      const tokens = words.map((word) => this.id(word));
      const root = this.index.root(), hit = this.index.match(tokens, root);
      const table = this.pool.adopt(hit.pages);
      const came = this.copyPartialPage(table, hit.source, hit.copied), start = table.length;
      const grown = this.pool.extend(table, tokens.length - start);
      if (grown instanceof NoRoom) {
        this.pool.free(table);
        this.copies = [];
      }
      const name = this.name();
      const sequence = { name, family: name, table, tokens, chain: new Chain(root, hit.keys), cost: 0 };
      this.wrote([sequence], [start], roomy(grown));
      this.sequences.set(name, sequence);
      return found(name, tokens.length, hit.pages.length, came);
    }

    copyPartialPage(table, source, count) {
      const copies = source === null ? [] : this.pool.copyPartialPage(table, source, count);
      if (copies instanceof NoRoom || !copies.length) return 0;
      this.copy(copies);
      return count;
    }

    generate({ name }) {
      const chosen = name == null ? [...this.sequences.values()] : [this.sequence(name)];
      if (!chosen.length) throw new Refused("There is no sequence yet: add one.");
      this.grow(chosen, chosen.map((_, i) => this.drawn + i));
      this.drawn += chosen.length;
      return `${names(chosen)} drew a word.${copied(this.copies)}`;
    }

    fork({ name }) {
      const parent = this.sequence(name);
      this.checkSeats(1);
      const child = this.child(parent);
      return `${child.name} is ${parent.name} forked: ${counted(child.table.pages.length, "page")}, none of them new.`;
    }

    beam({ name }) {
      const { family } = this.sequence(name);
      const beams = [...this.sequences.values()].filter((s) => s.family === family);
      const [winners, drawn] = this.winners(beams), survivors = [];
      this.checkSeats(winners.length - new Set(winners.map((one) => one.parent)).size);
      for (const { parent } of winners) survivors.push(survivors.includes(parent) ? this.child(parent) : parent);
      try {
        this.grow(survivors, winners.map((one) => one.draw));
      } catch (refusal) {
        this.drop(survivors.filter((s) => !beams.includes(s)));
        throw refusal;
      }
      survivors.forEach((survivor, i) => { survivor.cost = winners[i].cost; });
      this.drawn += drawn;
      const losers = beams.filter((s) => !survivors.includes(s));
      this.drop(losers);
      const dropped = losers.length ? ` ${names(losers)} dropped.` : "";
      return `The beams are now ${names(survivors)}.${dropped}${copied(this.copies)}`;
    }

    winners(beams) {
      const { beam_width: width, proposals, costs } = this.rules, proposed = [];
      for (const parent of beams) {
        for (let i = 0; i < (beams.length === 1 ? width : proposals); i++) {
          const draw = this.drawn + proposed.length;
          proposed.push({ cost: parent.cost + costs[draw % costs.length], draw, parent });
        }
      }
      const best = proposed.slice().sort((a, b) => a.cost - b.cost || a.draw - b.draw).slice(0, width);
      return [best, proposed.length];
    }

    truncate({ name, count = 1 }) {
      const s = this.sequence(name), length = Math.max(1, s.table.length - count), removed = s.table.length - length;
      this.pool.truncate(s.table, length);
      s.tokens.splice(length);
      s.chain.keys.splice(Math.floor(length / this.pool.pageSize));
      return `${s.name} lost ${counted(removed, "word")}.`;
    }

    free({ name }) {
      const s = this.sequence(name), before = this.pool.numFree;
      this.drop([s]);
      return `${s.name} is freed: ${counted(this.pool.numFree - before, "page")} free again, and cached until taken.`;
    }

    reset() {
      const { num_pages: numPages, page_size: pageSize } = this.rules;
      this.pool = new Pool(numPages, pageSize);
      this.index = new PrefixIndex(this.pool);
      this.memory = Array.from({ length: numPages }, () => new Array(pageSize).fill(""));
      this.sequences = new Map();
      this.known = [];
      this.named = this.drawn = 0;
      this.copies = [];
      return `All ${this.pool.capacity} pages are blank.`;
    }

    grow(sequences, draws) {
      const { max_words: most, drawn, stride } = this.rules;
      const longest = sequences.find((s) => s.table.length >= most);
      if (longest) throw new Refused(`${longest.name} has ${most} words, the most that a sequence may have here.`);
      const starts = sequences.map((s) => s.table.length);
      const copies = roomy(this.pool.extendAll(sequences.map((s) => s.table), sequences.map(() => 1)));
      sequences.forEach((s, i) => s.tokens.push(this.id(drawn[(draws[i] * stride) % drawn.length])));
      this.wrote(sequences, starts, copies);
    }

    wrote(sequences, starts, copies) {
      const size = this.pool.pageSize;
      this.copy(copies);
      sequences.forEach((s, n) => {
        const words = this.words(s);
        for (let i = starts[n]; i < words.length; i++) this.memory[s.table.pages[Math.floor(i / size)]][i % size] = words[i];
        const full = Math.floor(s.table.length / size), tail = s.table.length % size;
        if (full > s.chain.keys.length || (tail && !this.pool.filled[s.table.pages[full]])) {
          this.index.publish(s.table, s.tokens, s.table.length, s.chain);
        }
      });
    }

    copy(copies) {
      for (const [source, destination] of copies) this.memory[destination] = this.memory[source].slice();
      this.copies.push(...copies);
    }

    child(parent) {
      const name = this.name(), table = this.pool.fork(parent.table);
      const child = { ...parent, name, table, tokens: parent.tokens.slice(), chain: parent.chain.fork() };
      this.sequences.set(name, child);
      return child;
    }

    drop(sequences) {
      for (const s of sequences) {
        this.index.publish(s.table, s.tokens, s.table.length, s.chain, true);
        this.pool.free(s.table);
        this.sequences.delete(s.name);
      }
    }

    sequence(name) {
      if (!this.sequences.has(name)) throw new Refused(`There is no sequence ${name}.`);
      return this.sequences.get(name);
    }

    checkSeats(count) {
      const { max_sequences: most } = this.rules;
      if (this.sequences.size + count > most) throw new Refused(`${most} sequences are the most: free one.`);
    }

    name() {
      const turn = Math.floor(this.named / 26), letter = this.named++ % 26;
      return String.fromCharCode(65 + letter) + (turn || "");
    }

    id(word) {
      const at = this.known.indexOf(word);
      return at < 0 ? this.known.push(word) - 1 : at;
    }

    wordsOf(text) {
      const { max_words: most, max_letters: letters } = this.rules;
      const words = text.split(/\s+/).filter(Boolean);
      if (!words.length) throw new Refused("Type some words first.");
      if (words.length > most || words.some((word) => word.length > letters)) {
        throw new Refused(`At most ${most} words of ${letters} letters are accepted.`);
      }
      return words;
    }
  }

  return { Pool, PrefixIndex, Playground };
})();
