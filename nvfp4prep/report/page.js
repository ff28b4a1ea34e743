(() => {
  "use strict";
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const themes = {
    light: { text: "#1d2430", grid: "#dfe3e8", back: "#ffffff", line: "#b4bac3" },
    dark: { text: "#e4e8ee", grid: "#333b47", back: "#1d232d", line: "#5b6472" },
  };
  const config = { responsive: true, displaylogo: false, showSendToCloud: false, plotlyServerURL: "" };
  const plots = [];

  // Colours of a theme, as Plotly.relayout takes them.
  function colours(layout, theme) {
    const change = {
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      "font.color": theme.text,
      "font.family": "system-ui, 'Segoe UI', 'DejaVu Sans', sans-serif",
      "hoverlabel.bgcolor": theme.back,
      "hoverlabel.bordercolor": theme.line,
      "hoverlabel.font.color": theme.text,
      "hoverlabel.align": "left",
      "modebar.bgcolor": "rgba(0,0,0,0)",
      "modebar.color": theme.line,
      "modebar.activecolor": theme.text,
    };
    for (const name of Object.keys(layout).filter((key) => /^[xy]axis\d*$/.test(key))) {
      change[name + ".gridcolor"] = theme.grid;
      change[name + ".linecolor"] = theme.line;
      change[name + ".tickcolor"] = theme.line;
      change[name + ".showline"] = true;
      change[name + ".ticks"] = "outside";
    }
    return change;
  }

  function assign(layout, change) {
    for (const [path, value] of Object.entries(change)) {
      const keys = path.split(".");
      const last = keys.pop();
      let place = layout;
      for (const key of keys) place = place[key] = place[key] || {};
      place[last] = value;
    }
  }

  function webgl() {
    try {
      return Boolean(document.createElement("canvas").getContext("webgl"));
    } catch {
      return false;
    }
  }

  const current = () => (dark.matches ? themes.dark : themes.light);
  const repaint = (theme) => plots.forEach((plot) => Plotly.relayout(plot, colours(plot.layout, theme)));

  async function draw() {
    const gl = webgl();
    for (const place of document.querySelectorAll(".plot")) {
      const figure = JSON.parse(document.getElementById(place.dataset.figure).textContent);
      if (!gl) for (const trace of figure.data) if (trace.type === "scattergl") trace.type = "scatter";
      assign(figure.layout, colours(figure.layout, current()));
      await Plotly.newPlot(place, figure.data, figure.layout, config);
      plots.push(place);
      await new Promise((resolve) => setTimeout(resolve));
    }
    document.body.dataset.plots = String(plots.length);
  }

  dark.addEventListener("change", () => repaint(current()));
  function print(width, theme) {
    document.body.style.width = width;
    repaint(theme);
    plots.forEach((plot) => Plotly.Plots.resize(plot));
  }
  window.addEventListener("beforeprint", () => print("700px", themes.light)); // A4 without its margins
  window.addEventListener("afterprint", () => print("", current()));
  draw();
})();
