"use strict";
const root = document.documentElement;
const repainted = [];  // what is called when the colours change

const isDark = () => root.dataset.theme
  ? root.dataset.theme === "dark"
  : matchMedia("(prefers-color-scheme: dark)").matches;
const theme = document.getElementById("theme");
function repaint() {
  theme.textContent = isDark() ? "Light" : "Dark";
  repainted.forEach(each => each());
}
theme.addEventListener("click", () => {
  root.dataset.theme = isDark() ? "light" : "dark";
  repaint();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);
theme.hidden = false;
repaint();
