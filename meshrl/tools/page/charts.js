for (const plot of document.querySelectorAll("svg[data-chart]")) {
  const { steps, lines, x, across } = JSON.parse(plot.dataset.chart);
  const figure = plot.closest("figure"), at = figure.querySelector(".at");
  const shown = [...figure.querySelectorAll(".legend b")], last = shown.map((b) => b.textContent);
  const cursor = document.createElementNS("http://www.w3.org/2000/svg", "path");
  cursor.setAttribute("class", "cursor");
  plot.append(cursor);
  plot.addEventListener("pointermove", (event) => {
    const box = plot.getBoundingClientRect();
    const here = (event.clientX - box.left) / box.width * plot.viewBox.baseVal.width;
    let near = 0;
    x.forEach((place, i) => { if (Math.abs(place - here) < Math.abs(x[near] - here)) near = i; });
    cursor.setAttribute("d", `M${x[near]} 10V196`);
    at.textContent = `${across} ${steps[near]}`;
    shown.forEach((b, i) => { b.textContent = lines[i][near] || "–"; });
  });
  plot.addEventListener("pointerleave", () => {
    cursor.removeAttribute("d");
    at.textContent = "";
    shown.forEach((b, i) => { b.textContent = last[i]; });
  });
}
