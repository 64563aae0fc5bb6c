// Elements. What the model or the server says gets into the page as text, and as markup only through markdown.js.

export const $ = id => document.getElementById(id);

export const make = (tag, className, text = "") => {
  const element = document.createElement(tag);
  if (className) element.className = className;
  element.textContent = text;
  return element;
};

export const seconds = value => value < 1 ? `${Math.round(value * 1000)} ms` : `${value.toFixed(1)} s`;
