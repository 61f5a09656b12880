// Draws the interactive pictures over the static ones. Where no script runs, or something fails, the static ones stay.
const drawn = (async () => {
  const root = document.documentElement;
  const phone = matchMedia("(max-width: 979px)");
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const buttons = [["zoom2d", "pan2d"], ["zoomIn2d", "zoomOut2d", "resetScale2d"], ["toImage"]];
  const config = { displaylogo: false, displayModeBar: true, modeBarButtons: buttons, responsive: true };
  const unpacked = (element) => {
    const bytes = Uint8Array.from(atob(element.textContent), (character) => character.charCodeAt(0));
    return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
  };
  // Colours are named by those of the light scheme, as in the style sheet.
  const themed = (value, colours) => {
    if (typeof value === "string" && /^#[0-9a-f]{6}$/.test(value))
      return colours.getPropertyValue(`--c${value.slice(1)}`).trim() || value;
    if (Array.isArray(value)) return value.map((each) => themed(each, colours));
    if (value === null || typeof value !== "object") return value;
    return Object.fromEntries(Object.entries(value).map(([name, each]) => [name, themed(each, colours)]));
  };
  // Bars have their texts where these fit: to leave that to plotly takes four times as long.
  const fitting = (data, [from, to], width) =>
    data.map((trace) => {
      if (trace.type !== "bar" || !trace.text) return trace;
      const fits = (text, index) => (trace.x[index] / (to - from)) * width > 6 + 7 * text.length;
      return { ...trace, text: trace.text.map((text, index) => (fits(text, index) ? text : "")) };
    });
  const draw = async ({ place, data, layout, narrow }) => {
    const colours = getComputedStyle(root);
    const chosen = themed(phone.matches ? { ...layout, ...narrow } : layout, colours);
    const traces = themed(data, colours);
    const shown = (range) => fitting(traces, range || [0, 1], place.clientWidth * 0.9);
    await Plotly.react(place, shown(layout.xaxis.range), chosen, config);
    place.removeAllListeners("plotly_relayout");
    place.on("plotly_relayout", () => Plotly.react(place, shown(place.layout.xaxis.range), place.layout, config));
  };
  try {
    const script = document.createElement("script");
    script.textContent = await unpacked(document.getElementById("plotly"));
    document.head.append(script);
    root.classList.add("drawn");
    const pictures = [];
    for (const figure of document.querySelectorAll("figure.interactive")) {
      const picture = JSON.parse(await unpacked(figure.querySelector("script")));
      pictures.push({ place: figure.querySelector("div"), ...picture });
      await draw(pictures.at(-1));
    }
    for (const query of [phone, dark]) query.addEventListener("change", () => pictures.forEach(draw));
  } catch (problem) {
    root.classList.remove("drawn");
    throw problem;
  }
})();
