// A box that scrolls sideways takes the keyboard's focus; one that does not is no stop on its way.
const boxes = "article pre, .table-wrapper, .formula";
const reach = (box) => {
  const scrolls = box.scrollWidth > box.clientWidth + 1;
  box.toggleAttribute("data-scrolls", scrolls);
  if (scrolls) box.tabIndex = 0;
  else box.removeAttribute("tabindex");
};
const watcher = new ResizeObserver((entries) => entries.forEach((entry) => reach(entry.target)));
document.querySelectorAll(boxes).forEach((box) => { reach(box); watcher.observe(box); });

// What the theme leaves out, for those who hear the page.
const label = (where, name) => document.querySelector(where)?.setAttribute("aria-label", name);
label(".sidebar-drawer", "All pages");
label(".toc-drawer", "This page");
document.querySelectorAll(".caption[role=heading]").forEach((e) => { e.ariaLevel = "2"; });
if (!document.querySelector("h1")) { // the search
  const heading = document.createElement("h1");
  heading.textContent = document.title.split(" - ")[0];
  document.querySelector("article")?.prepend(heading);
}
document.querySelectorAll(".sig dl").forEach((list) => {
  const term = document.createElement("dt");
  term.className = "unseen";
  term.textContent = "parameters";
  list.prepend(term);
});
document.querySelectorAll("th").forEach((head) => {
  if (head.textContent.trim()) return;
  const cell = document.createElement("td");
  cell.className = head.className;
  head.replaceWith(cell);
});
