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

for (const button of document.querySelectorAll("button.copy")) {
  if (!navigator.clipboard) break;  // a click on the line selects it whole
  button.hidden = false;
  button.addEventListener("click", async () => {
    await navigator.clipboard.writeText(button.previousElementSibling.textContent);
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  });
}
