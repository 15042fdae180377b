// Light, dark, or the system's setting. Not a module, so that it runs before the first paint.
(() => {
  const ORDER = ["system", "light", "dark"];
  const SYMBOL = { system: "◐", light: "○", dark: "●" };
  const SAYS = { system: "follow the system", light: "light", dark: "dark" };
  const system = matchMedia("(prefers-color-scheme: dark)");
  let chosen = "system";
  try {
    chosen = localStorage.getItem("warmpath.theme") ?? "system";
  } catch {
    // Without storage, the page follows the system.
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
    document.getElementById("theme")?.addEventListener("click", () => {
      chosen = ORDER[(ORDER.indexOf(chosen) + 1) % ORDER.length];
      try {
        localStorage.setItem("warmpath.theme", chosen);
      } catch {
        // Without storage, the choice lasts until the page is closed.
      }
      show();
    });
  });
})();
