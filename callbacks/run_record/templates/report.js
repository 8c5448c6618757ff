for (const chart of document.querySelectorAll(".chart")) {
  const rows = JSON.parse(chart.dataset.rows), cursor = chart.querySelector(".cursor");
  const cells = [...chart.closest("figure").querySelectorAll("[data-value]")];
  const usual = cells.map(cell => cell.textContent);
  const show = texts => cells.forEach((cell, index) => cell.textContent = texts[index]);
  chart.onpointermove = event => {
    const box = chart.getBoundingClientRect(), at = 100 * (event.clientX - box.left) / box.width;
    const [place, texts] = rows.reduce((one, other) => Math.abs(other[0] - at) < Math.abs(one[0] - at) ? other : one);
    cursor.setAttribute("x1", place + "%");
    cursor.setAttribute("x2", place + "%");
    chart.classList.add("on");
    show(texts);
  };
  chart.onpointerleave = () => { chart.classList.remove("on"); show(usual); };
}
