// Markdown to DOM nodes, for text that grows. Only nodes are made, never HTML from text, so nothing that a
// model writes can become markup or script. Blocks whose source has not changed keep their nodes.

const make = (name, props = {}, ...children) => {
  const node = Object.assign(document.createElement(name), props);
  node.append(...children);
  return node;
};

const INLINE = /(`+)([\s\S]*?[^`])\1(?!`)|!?\[([^\]\n]*)\]\(([^()\s]+(?:\([^()\s]*\))?)[^)\n]*\)|\*\*(?=\S)([\s\S]*?\S)\*\*|__(?=\S)([\s\S]*?\S)__(?!\w)|~~(?=\S)([\s\S]*?\S)~~|\*(?=[^\s*])([^*\n]*[^\s*])\*|(?<!\w)_(?=[^\s_])([^_\n]*[^\s_])_(?!\w)|(https?:\/\/[^\s<>()]*[^\s<>().,;:!?'"])|\\([\\`*_{}[\]()#+\-.!|~])|( {2,}\n)/;

export function inline(text) {
  const nodes = [];
  for (let match; (match = INLINE.exec(text)); text = text.slice(match.index + match[0].length)) {
    if (match.index) nodes.push(text.slice(0, match.index));
    nodes.push(inlineNode(match));
  }
  if (text) nodes.push(text);
  return nodes;
}

function inlineNode([all, , code, label, target, strong, strong2, gone, em, em2, url, escaped]) {
  if (code !== undefined) return make("code", { textContent: code.replace(/^ (.*) $/s, "$1") });
  if (target !== undefined) return link(target, inline(label || target));
  const bold = strong ?? strong2;
  if (bold !== undefined) return make("strong", {}, ...inline(bold));
  if (gone !== undefined) return make("del", {}, ...inline(gone));
  const slanted = em ?? em2;
  if (slanted !== undefined) return make("em", {}, ...inline(slanted));
  if (url !== undefined) return link(url, [url]);
  if (escaped !== undefined) return escaped;
  return make("br");
}

function link(target, children) {
  if (!/^(https?:|mailto:)/i.test(target)) return make("span", {}, ...children);
  return make("a", { href: target, target: "_blank", rel: "noopener noreferrer" }, ...children);
}

// The source cut into blocks: [kind, source lines].
function blocks(text) {
  const found = [];
  const lines = text.split("\n");
  for (let i = 0; i < lines.length; ) {
    const kind = kindOf(lines, i);
    const end = endOf(kind, lines, i);
    if (kind !== "blank") found.push([kind, lines.slice(i, end)]);
    i = end;
  }
  return found;
}

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^`\s]*)/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])(?:\s+|$)/;

function kindOf(lines, i) {
  const line = lines[i];
  if (!line.trim()) return "blank";
  if (FENCE.test(line)) return "code";
  if (/^ {0,3}#{1,6}(\s|$)/.test(line)) return "heading";
  if (/^ {0,3}([-*_])( *\1){2,} *$/.test(line)) return "rule";
  if (/^ {0,3}>/.test(line)) return "quote";
  if (ITEM.test(line)) return "list";
  if (line.includes("|") && /^[\s:|-]*-[\s:|-]*$/.test(lines[i + 1] ?? "") && lines[i + 1].includes("|")) return "table";
  return "text";
}

function endOf(kind, lines, start) {
  let i = start + 1;
  if (kind === "code") {
    const fence = FENCE.exec(lines[start])[1];
    const closing = new RegExp(`^ {0,3}\\${fence[0]}{${fence.length},}\\s*$`);
    while (i < lines.length && !closing.test(lines[i])) i++;
    return Math.min(i + 1, lines.length);
  }
  if (kind === "heading" || kind === "rule" || kind === "blank") return i;
  if (kind === "table") {
    while (i < lines.length && lines[i].includes("|")) i++;
    return i;
  }
  if (kind === "list") {
    while (i < lines.length) {
      const blank = !lines[i].trim();
      const goesOn = blank ? /^\s/.test(lines[i + 1] ?? "") || ITEM.test(lines[i + 1] ?? "") : /^\s/.test(lines[i]) || ITEM.test(lines[i]) || kindOf(lines, i) === "text";
      if (!goesOn) break;
      if (!blank && kindOf(lines, i) === "text" && !/^\s/.test(lines[i]) && !lines[i - 1].trim()) break;
      i++;
    }
    return i;
  }
  while (i < lines.length && (kindOf(lines, i) === kind || (kind === "quote" && kindOf(lines, i) === "text"))) i++;
  return i;
}

const BUILD = {
  text: (lines) => make("p", {}, ...inline(lines.join("\n"))),
  rule: () => make("hr"),
  heading: ([line]) => {
    const [, marks, words] = /^ {0,3}(#{1,6})\s*(.*?)\s*#*$/.exec(line);
    return make(`h${Math.min(marks.length, 4)}`, {}, ...inline(words));
  },
  quote: (lines) => make("blockquote", {}, ...nodesOf(lines.map((line) => line.replace(/^ {0,3}> ?/, "")).join("\n"))),
  code: (lines) => {
    const [, fence, language] = FENCE.exec(lines[0]);
    const closed = lines.length > 1 && new RegExp(`^ {0,3}\\${fence[0]}{${fence.length},}\\s*$`).test(lines.at(-1));
    return codeBlock(lines.slice(1, closed ? -1 : undefined).join("\n"), language);
  },
  table: (lines) => {
    const cells = (line) => line.trim().replace(/^\||\|$/g, "").split(/(?<!\\)\|/).map((cell) => cell.trim());
    const row = (name, line) => make("tr", {}, ...cells(line).map((cell) => make(name, {}, ...inline(cell))));
    const body = make("tbody", {}, ...lines.slice(2).map((line) => row("td", line)));
    const table = make("table", {}, make("thead", {}, row("th", lines[0])), body);
    return make("div", { className: "table" }, table);
  },
  list: (lines) => {
    const [, indent, mark] = ITEM.exec(lines[0]);
    const list = make(/\d/.test(mark) ? "ol" : "ul");
    if (/\d/.test(mark)) list.start = parseInt(mark, 10);
    for (const item of itemsOf(lines, indent.length)) list.append(make("li", {}, ...itemNodes(item)));
    return list;
  },
};

// The lines of each item, without its mark and indentation.
function itemsOf(lines, indent) {
  const items = [];
  for (const line of lines) {
    const match = ITEM.exec(line);
    if (match && match[1].length <= indent + 1) items.push([line.slice(match[0].length)]);
    else items.at(-1).push(line.replace(/^ {1,4}|^\t/, ""));
  }
  return items;
}

function itemNodes(lines) {
  const made = nodesOf(lines.join("\n").replace(/^\[( |x)\] /i, (_, mark) => (mark === " " ? "☐ " : "☑ ")));
  // A single paragraph stands in its item without one.
  return made.filter((node) => node.nodeName === "P").length === 1 && made[0].nodeName === "P"
    ? [...made[0].childNodes, ...made.slice(1)] : made;
}

function codeBlock(source, language) {
  const button = make("button", { type: "button", textContent: "Copy" });
  button.addEventListener("click", () => copy(source, button));
  const bar = make("div", { className: "bar" }, make("span", { textContent: language || "text" }), button);
  return make("div", { className: "code" }, bar, make("pre", { tabIndex: 0 }, make("code", { textContent: source })));
}

export async function copy(text, button) {
  const before = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    button.textContent = "Could not copy";
  }
  setTimeout(() => { button.textContent = before; }, 1500);
}

const nodesOf = (text) => blocks(text).map(([kind, lines]) => BUILD[kind](lines));

// Shows `text` in `place`; what stood there already and is the same stays.
export function show(place, text) {
  const wanted = blocks(text);
  wanted.forEach(([kind, lines], i) => {
    const source = kind + lines.join("\n");
    const old = place.children[i];
    if (old?.source === source) return;
    const node = BUILD[kind](lines);
    node.source = source;
    old ? old.replaceWith(node) : place.append(node);
  });
  while (place.children.length > wanted.length) place.lastElementChild.remove();
}
