// What is wrong with how a page looks: a list of sentences. Colours behind texts are those of the elements under them.
(() => {
  const faults = [];
  const width = document.documentElement.clientWidth;
  const say = (what, node, more) => faults.push(`${what}: "${node.textContent.trim().slice(0, 40)}" ${more}`);
  const parse = (text) => {
    const numbers = (text.match(/[\d.]+/g) || []).map(Number);
    if (!numbers.length) return null;
    if (text.startsWith("color(srgb")) numbers.splice(0, 3, ...numbers.slice(0, 3).map((x) => 255 * x));
    return numbers.length > 3 ? numbers : [...numbers.slice(0, 3), 1];
  };
  const over = (top, under) => [0, 1, 2].map((i) => top[i] * top[3] + under[i] * (1 - top[3])).concat(1);
  const luminance = ([r, g, b]) => {
    const [x, y, z] = [r, g, b].map((v) => v / 255).map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * x + 0.7152 * y + 0.0722 * z;
  };
  const contrast = (a, b) => {
    const [low, high] = [luminance(a), luminance(b)].sort((x, y) => x - y);
    return (high + 0.05) / (low + 0.05);
  };
  const paint = (element) => {
    const style = getComputedStyle(element);
    if (element instanceof SVGElement && element.tagName !== "svg") {
      if (element.tagName === "text" || element.tagName === "tspan" || style.fill === "none") return null;
      const found = parse(style.fill);
      const box = element.getBBox ? element.getBBox() : { width: 1, height: 1 };
      if (!found || !box.width || !box.height) return null; // a line has no inside
      found[3] *= Number(style.fillOpacity) * Number(style.opacity);
      return found;
    }
    return parse(style.backgroundColor);
  };
  // Plotly's elements let the mouse through, and then no point is on them.
  const solid = document.createElement("style");
  solid.textContent = "figure.interactive * { pointer-events: all !important; }";
  document.head.append(solid);
  const behind = (node, x, y) => {
    let found = [255, 255, 255, 1];
    const stack = document.elementsFromPoint(x, y).filter((each) => each !== node && !node.contains(each));
    for (const element of stack.reverse()) {
      const colour = paint(element);
      if (colour && colour[3] > 0) found = over(colour, found);
    }
    return found;
  };
  if (document.documentElement.scrollWidth > width) faults.push(`the page is ${document.documentElement.scrollWidth} px wide in ${width}`);
  const shown = (element) => element.getClientRects().length && getComputedStyle(element).visibility !== "hidden";
  const pictures = [...document.querySelectorAll("figure.wide svg, figure.narrow svg, figure.interactive .plot-container")];
  for (const svg of pictures) {
    if (!shown(svg)) continue;
    const frame = svg.getBoundingClientRect();
    if (frame.left < -0.5 || frame.right > width + 0.5) faults.push(`a picture reaches from ${frame.left} to ${frame.right}`);
    if (!svg.querySelector("text")) faults.push("a picture has no text that can be read or searched");
  }
  // A point on a shape: many bars of a static picture are one, and its middle may be beside them all.
  const inside = (shape, frame) => {
    const middle = [frame.left + frame.width / 2, frame.top + frame.height / 2];
    if (shape.closest('[id*="-numbers-"]')) return middle; // which may be the hole of a 0: what is behind it counts
    const start = shape.getPointAtLength(0).matrixTransform(shape.getScreenCTM());
    const points = [-1, 1].flatMap((dx) => [-1, 1].map((dy) => [start.x + 1.5 * dx, start.y + 1.5 * dy]));
    return [middle, ...points].find(([x, y]) => document.elementsFromPoint(x, y).includes(shape));
  };
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  let looked = 0;
  while (walker.nextNode()) {
    const text = walker.currentNode;
    const element = text.parentElement;
    if (!text.textContent.trim() || ["STYLE", "SCRIPT", "TITLE", "DEFS"].includes(element.tagName.toUpperCase())) continue;
    if (element.closest("defs") || !shown(element)) continue;
    looked += 1;
    const style = getComputedStyle(element);
    const svg = element.closest("svg");
    let size = parseFloat(style.fontSize);
    if (svg) {
      const matrix = element.getScreenCTM();
      size *= Math.sqrt(Math.abs(matrix.a * matrix.d - matrix.b * matrix.c));
    }
    if (size < 10.99) say("small", element, `${size.toFixed(1)} px`);
    element.scrollIntoView({ block: "center", inline: "center" });
    const range = document.createRange();
    range.selectNodeContents(text);
    const box = svg ? element.getBoundingClientRect() : range.getBoundingClientRect();
    const frame = svg ? svg.getBoundingClientRect() : null;
    if (svg && (box.left < frame.left - 1 || box.right > frame.right + 1 || box.top < frame.top - 1 || box.bottom > frame.bottom + 1))
      say("cut by its picture", element, `${box.left.toFixed(0)}..${box.right.toFixed(0)} of ${frame.left.toFixed(0)}..${frame.right.toFixed(0)}`);
    const scrolls = element.closest(".scroll, pre");
    if (!scrolls && (box.left < -1 || box.right > width + 1)) say("cut", element, `${box.left.toFixed(0)}..${box.right.toFixed(0)}`);
    const x = box.left + box.width / 2;
    const y = box.top + box.height / 2;
    if (x < 0 || x >= width || y < 0 || y >= innerHeight) continue;
    const ground = behind(element, x, y);
    const ink = svg ? parse(style.fill) : parse(style.color);
    if (svg) ink[3] *= Number(style.fillOpacity) * Number(style.opacity);
    const found = contrast(over(ink, ground), ground);
    if (found < 4.5) say("pale", element, `${found.toFixed(2)} ${svg ? style.fill : style.color} on ${ground.slice(0, 3).map(Math.round)}`);
  }
  // Bars of timelines and the numbers on them, which are shapes.
  const bars = [...document.querySelectorAll('figure [id*="-bars-"] path, figure [id*="-numbers-"] :is(path, use)')];
  for (const picture of document.querySelectorAll("figure.interactive .js-plotly-plot"))
    picture.querySelectorAll(".trace.bars").forEach((trace, index) => {
      const { name } = picture.data.filter((each) => each.type === "bar")[index];
      if (!/bubble|waits/.test(name)) bars.push(...trace.querySelectorAll(".point path"));
    });
  let bars_looked = 0;
  for (const bar of bars) {
    if (!shown(bar) || bar.closest("defs")) continue;
    const whole = bar.getBoundingClientRect();
    if (whole.width < 3 || whole.height < 1) continue; // no point is on it alone
    bar.scrollIntoView({ block: "center" });
    const frame = bar.getBoundingClientRect();
    const point = inside(bar, frame);
    if (!point) continue;
    const [x, y] = point;
    const ground = behind(bar, x, y);
    const ink = parse(getComputedStyle(bar).fill);
    ink[3] *= Number(getComputedStyle(bar).fillOpacity);
    bars_looked += 1;
    const found = contrast(over(ink, ground), ground);
    if (found < 4.5) faults.push(`pale bar: ${found.toFixed(2)} ${getComputedStyle(bar).fill} on ${ground.slice(0, 3).map(Math.round)} at ${Math.round(x)}, ${Math.round(y)}`);
  }
  // Texts of a picture that lie over each other.
  for (const svg of pictures) {
    if (!shown(svg)) continue;
    const boxes = [...svg.querySelectorAll("text")].filter((each) => each.textContent.trim()).map((each) => [each, each.getBoundingClientRect()]);
    boxes.forEach(([a, p], i) => boxes.slice(i + 1).forEach(([b, q]) => {
      const x = Math.min(p.right, q.right) - Math.max(p.left, q.left);
      const y = Math.min(p.bottom, q.bottom) - Math.max(p.top, q.top);
      if (x > 3 && y > 4) say("covers another text", a, `"${b.textContent.slice(0, 30)}"`);
    }));
  }
  const ground = luminance(parse(getComputedStyle(document.body).backgroundColor));
  solid.remove();
  return { faults, looked, bars: bars_looked, ground };
})();
