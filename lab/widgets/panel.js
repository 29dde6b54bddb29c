// Keys for the live panel that this widget stands in. They are heard at the window, before JupyterLab's own shortcuts,
// and only while the panel has the focus and no text is being typed. Other letters then do nothing: pressed beside "s",
// "d" would be half way to deleting the cell.
const NAMES = { " ": "toggle", s: "step", ArrowRight: "step", ArrowLeft: "back", r: "restart", "+": "faster", "=": "faster", "-": "slower" };
const OWN = "input, textarea, select, [contenteditable], [role=slider], .noUi-handle";

function render({ model, el }) {
  let panel = null;
  const find = () => {
    panel = panel ?? el.closest(".refrain-panel");
    if (panel && panel.tabIndex < 0) {
      panel.tabIndex = 0;
      panel.setAttribute("role", "group");
      panel.setAttribute("aria-label", "Live play: space plays and pauses, s steps, r restarts, plus and minus set the speed");
    }
    return panel;
  };
  const pressed = (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || !find()?.contains(event.target)) return;
    if (event.target.closest(OWN) || !(event.key in NAMES || event.key.length === 1 || event.key === "Enter")) return;
    event.stopImmediatePropagation();
    if (!(event.key in NAMES) || (event.key === " " && event.target.closest("button"))) return; // space presses a button
    event.preventDefault();
    model.send({ key: NAMES[event.key] });
  };
  // After a click on a button or on the picture the keys are on.
  const clicked = (event) => {
    if (!find()?.contains(event.target) || event.target.closest(OWN) || event.detail === 0) return;
    panel.focus({ preventScroll: true });
  };
  // "Run all" leaves the reader at the notebook's end: when play begins, it is brought into view, once.
  model.on("msg:custom", (said) => said.begins && find()?.scrollIntoView({ block: "nearest", behavior: "smooth" }));
  window.addEventListener("keydown", pressed, true);
  window.addEventListener("click", clicked);
  requestAnimationFrame(find);
  setTimeout(find, 500);
  return () => {
    window.removeEventListener("keydown", pressed, true);
    window.removeEventListener("click", clicked);
  };
}

export default { render };
