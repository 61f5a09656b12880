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
      if (!found) return null;
      found[3] *= Number(style.fillOpacity) * Number(style.opacity);
      return found;
    }
    return parse(style.backgroundColor);
  };
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
  for (const svg of document.querySelectorAll("svg")) {
    if (!shown(svg)) continue;
    const frame = svg.getBoundingClientRect();
    if (frame.left < -0.5 || frame.right > width + 0.5) faults.push(`a picture reaches from ${frame.left} to ${frame.right}`);
    if (!svg.querySelector("text")) faults.push("a picture has no text that can be read or searched");
  }
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
  // Texts of a picture that lie over each other.
  for (const svg of document.querySelectorAll("svg")) {
    if (!shown(svg)) continue;
    const boxes = [...svg.querySelectorAll("text")].filter((each) => each.textContent.trim()).map((each) => [each, each.getBoundingClientRect()]);
    boxes.forEach(([a, p], i) => boxes.slice(i + 1).forEach(([b, q]) => {
      const x = Math.min(p.right, q.right) - Math.max(p.left, q.left);
      const y = Math.min(p.bottom, q.bottom) - Math.max(p.top, q.top);
      if (x > 3 && y > 4) say("covers another text", a, `"${b.textContent.slice(0, 30)}"`);
    }));
  }
  const ground = luminance(parse(getComputedStyle(document.body).backgroundColor));
  return { faults, looked, ground };
})();
