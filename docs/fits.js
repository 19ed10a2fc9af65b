// Makes the page's table one of all rows of the data, which is filtered and sorted, and on narrow screens one of a device at a time.
// Without scripts the short table stays as it is.
const NARROW = "(max-width: 44em)";
const TRAINERS = { plain: "a loop", sft: "TRL's SFT" };

function numbers(cell) {
  return cell === "-" ? 0 : Number(cell.replaceAll(",", "").split(" / ")[0]);
}

function cell([longest, largest]) {
  if (!longest) return "-";
  return longest.toLocaleString("en") + (largest < 2 ? "" : ` / ${largest}`);
}

function filtered(source, data) {
  const names = [...source.querySelectorAll("th")].map((head) => head.textContent.trim());
  const rows = data.rows.map(({ model, precision, trainer, fits }) => {
    const found = data.devices.map((device) => cell(fits[device]));
    const cells = [model.split("/").pop(), precision, TRAINERS[trainer], ...found];
    return Object.fromEntries(cells.map((text, place) => [names[place], text]));
  });
  const devices = names.slice(3);
  const titles = names.slice(0, 3);
  const narrow = window.matchMedia(NARROW);
  const column = (name) => {
    const isDevice = devices.includes(name);
    const isModel = name === titles[0];
    return {
      title: name,
      field: name,
      hozAlign: isDevice ? "right" : "left",
      sorter: isDevice ? (one, other) => numbers(one) - numbers(other) : "string",
      headerFilter: isModel ? "input" : isDevice ? false : "list",
      headerFilterPlaceholder: isModel ? "filter" : "all",
      headerFilterParams: isModel || isDevice ? {} : { valuesLookup: true, clearable: true },
      headerSort: !narrow.matches, // its arrows take room
      headerSortStartingDir: isDevice ? "desc" : "asc",
    };
  };

  const choice = document.createElement("select");
  for (const device of devices) choice.add(new Option(device, device, false, device === "24 GB"));
  const label = document.createElement("label");
  label.className = "fits-device";
  label.append("On a device of ", choice);
  const place = document.createElement("div");
  source.replaceWith(label, place);

  const columns = () => {
    const [model, ...others] = titles;
    const shown = narrow.matches ? [model, choice.value, ...others] : [...titles, ...devices];
    return shown.map(column);
  };
  const table = new Tabulator(place, {
    data: rows,
    columns: columns(),
    layout: "fitDataFill",
    maxHeight: "40em",
  });
  const show = () => {
    const filters = table.getHeaderFilters();
    table.setColumns(columns());
    for (const { field, value } of filters) table.setHeaderFilterValue(field, value);
  };
  choice.addEventListener("change", show);
  narrow.addEventListener("change", show);
}

const source = document.querySelector("#fits table");
if (source && window.Tabulator) {
  const response = await fetch("../benchmarks/fits.json");
  if (response.ok) filtered(source, await response.json());
}
