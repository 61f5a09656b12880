// Draws the interactive pictures over the static ones. Where no script runs, or something fails, the static ones stay.
const drawn = (async () => {
  const packed = document.getElementById("plotly");
  const root = document.documentElement;
  const phone = matchMedia("(max-width: 979px)");
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const pictures = [...document.querySelectorAll("figure.interactive")].map((figure) => ({
    place: figure.querySelector("div"),
    ...JSON.parse(figure.querySelector("script").textContent),
  }));
  const buttons = [["zoom2d", "pan2d"], ["zoomIn2d", "zoomOut2d", "resetScale2d"], ["toImage"]];
  const config = { displaylogo: false, displayModeBar: true, modeBarButtons: buttons, responsive: true };
  // Colours are named by those of the light scheme, as in the style sheet.
  const themed = (value, colours) => {
    if (typeof value === "string" && /^#[0-9a-f]{6}$/.test(value))
      return colours.getPropertyValue(`--c${value.slice(1)}`).trim() || value;
    if (Array.isArray(value)) return value.map((each) => themed(each, colours));
    if (value === null || typeof value !== "object") return value;
    return Object.fromEntries(Object.entries(value).map(([name, each]) => [name, themed(each, colours)]));
  };
  const draw = async () => {
    const colours = getComputedStyle(root);
    for (const { place, data, layout, narrow } of pictures) {
      const chosen = phone.matches ? { ...layout, ...narrow } : layout;
      await Plotly.react(place, themed(data, colours), themed(chosen, colours), config);
    }
  };
  try {
    const bytes = Uint8Array.from(atob(packed.textContent), (character) => character.charCodeAt(0));
    const unpacked = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    const script = document.createElement("script");
    script.textContent = await new Response(unpacked).text();
    document.head.append(script);
    root.classList.add("drawn");
    await draw();
  } catch (problem) {
    root.classList.remove("drawn");
    throw problem;
  }
  for (const query of [phone, dark]) query.addEventListener("change", draw);
})();
