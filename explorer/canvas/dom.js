// Elements, for every canvas: `parts` in base.py puts this before their own code. Text is set through textContent, never as markup.
const make = (tag, className, text) => {
  const node = document.createElement(tag);
  if (className) node.className = className;
  if (text !== undefined) node.textContent = text;
  return node;
};
const add = (parent, tag, className, text) => parent.appendChild(make(tag, className, text));

