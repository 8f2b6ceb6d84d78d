/* A formula, table or figure that scrolls inside itself can be reached, and scrolled, by keyboard. */
(() => {
  const regions = 'mjx-container[display="true"], div.math, .pst-scrollable-table-container, div.cell_output, div.cell_output pre';
  const mark = () => {
    for (const region of document.querySelectorAll(regions)) {
      if (region.scrollWidth > region.clientWidth) region.tabIndex = 0;
      else region.removeAttribute("tabindex");
    }
  };
  window.addEventListener("load", () => {
    Promise.resolve(window.MathJax?.startup?.promise).then(mark);
    window.addEventListener("resize", mark);
  });
})();
