// Makes the table of the page one that is filtered and sorted, and on narrow screens one of a device at a time.
// Without scripts the table stays as it is.
const NARROW = "(max-width: 44em)";

function numbers(cell) {
  return cell === "-" ? 0 : Number(cell.replaceAll(",", "").split(" / ")[0]);
}

function filtered(source) {
  const names = [...source.querySelectorAll("th")].map((head) => head.textContent.trim());
  const rows = [...source.querySelectorAll("tbody tr")].map((row) =>
    Object.fromEntries([...row.cells].map((cell, place) => [names[place], cell.textContent.trim()])),
  );
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
if (source && window.Tabulator) filtered(source);
