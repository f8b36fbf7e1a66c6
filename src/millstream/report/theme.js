"use strict";

// Dark or light as the system prefers, until the button is pressed; remembered if the browser allows it.
function followTheme(button) {
  const root = document.documentElement, dark = matchMedia("(prefers-color-scheme: dark)"), key = "millstream-theme";
  const isDark = () => root.dataset.theme ? root.dataset.theme === "dark" : dark.matches;
  const show = () => { button.textContent = isDark() ? "Light" : "Dark"; };
  try {
    const kept = localStorage.getItem(key);
    if (["dark", "light"].includes(kept)) root.dataset.theme = kept;
  } catch { /* a page from a file or in a frame may have no storage */ }
  button.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    try { localStorage.setItem(key, root.dataset.theme); } catch { /* not remembered */ }
    show();
  });
  dark.addEventListener("change", show);
  show();
}
