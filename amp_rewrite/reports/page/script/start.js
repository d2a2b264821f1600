const data = JSON.parse(document.getElementById("data").textContent);
for (const host of document.querySelectorAll("[data-graphs]")) new Board(host, data[host.dataset.graphs]);
