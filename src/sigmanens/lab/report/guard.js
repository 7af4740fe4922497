"use strict";
// Collects whatever goes wrong, from the first line on, where a test or a reader can find it.
(() => {
  const problems = [];
  const note = (what) => {
    problems.push(String(what));
    document.documentElement.dataset.problems = JSON.stringify(problems);
  };
  document.documentElement.dataset.problems = "[]";
  window.addEventListener("error", (event) => note(event.message || event.type));
  window.addEventListener("unhandledrejection", (event) => note(event.reason));
  document.addEventListener("securitypolicyviolation", (event) =>
    note(`blocked ${event.violatedDirective} ${event.blockedURI}`));
})();
