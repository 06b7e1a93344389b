// Elements, for every canvas: `parts` in base.py puts this before their own code. Text is set through textContent, never as markup.
const make = (tag, className, text) => {
  const node = document.createElement(tag);
  if (className) node.className = className;
  if (text !== undefined) node.textContent = text;
  return node;
};
// How many of the first elements of two lists are alike in everything.
const alike = (a, b) => {
  let n = 0;
  while (n < a.length && n < b.length && JSON.stringify(a[n]) === JSON.stringify(b[n])) n++;
  return n;
};
const add = (parent, tag, className, text) => parent.appendChild(make(tag, className, text));

