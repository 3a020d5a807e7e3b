// The search takes a leading dash as "without this word", so `--watch` would find everything else: the dashes are dropped.
document.addEventListener("input", (event) => {
  const field = event.target;
  if (!field.matches("[data-md-component=search-query]")) return;
  const words = field.value.replace(/(^|\s)-+(?=\w)/g, "$1");
  if (words !== field.value) field.value = words;
}, true);
