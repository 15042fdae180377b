// Light, dark, or as the system has it. No module: it runs before anything is painted.
(() => {
  const ORDER = ["system", "light", "dark"];
  const SYMBOL = { system: "◐", light: "○", dark: "●" };
  const SAYS = { system: "as the system has them", light: "light", dark: "dark" };
  const system = matchMedia("(prefers-color-scheme: dark)");
  let chosen = "system";
  try {
    chosen = localStorage.getItem("warmpath.theme") ?? "system";
  } catch {
    // Storage may be shut off; the system's colours do.
  }
  if (!ORDER.includes(chosen)) chosen = "system";

  function show() {
    const dark = chosen === "dark" || (chosen === "system" && system.matches);
    document.documentElement.dataset.theme = dark ? "dark" : "light";
    const button = document.getElementById("theme");
    if (!button) return;
    button.textContent = SYMBOL[chosen];
    button.setAttribute("aria-label", `Colours: ${SAYS[chosen]}`);
    button.title = `Colours: ${SAYS[chosen]}`;
  }

  show();
  system.addEventListener("change", show);
  document.addEventListener("DOMContentLoaded", () => {
    show();
    document.getElementById("theme").addEventListener("click", () => {
      chosen = ORDER[(ORDER.indexOf(chosen) + 1) % ORDER.length];
      try {
        localStorage.setItem("warmpath.theme", chosen);
      } catch {
        // It holds until the page is left.
      }
      show();
    });
  });
})();
