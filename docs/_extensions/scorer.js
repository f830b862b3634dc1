/* The order of what a search finds: pages for a task before records of decisions. Words alone give most pages
   the same score; the folder decides between these. Sphinx reads this file in place of its own Scorer. */
const FOLDERS = [
  [/^(install|start|howto|migrate|notebooks)/, 0.5],
  [/^(reference\/(ways|errors)|project\/faq)/, 0.4],
  [/^(reference|performance|explanation|examples)/, 0.2],
  [/^decisions/, -100],
];

var Scorer = {
  score: ([page, , , , score]) => score + (FOLDERS.find(([folder]) => folder.test(page))?.[1] ?? 0),
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
