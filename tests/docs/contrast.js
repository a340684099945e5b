// Text of the page that is harder to read than WCAG 2 level AA allows: contrast below 4.5, or 3 for large text.
() => {
  const parse = c => (c.match(/[\d.]+/g) || [0, 0, 0, 0]).map(Number);
  const over = (f, b) => { const a = f[3] ?? 1; return [0, 1, 2].map(i => f[i] * a + b[i] * (1 - a)); };
  const background = element => {
    const layers = [];
    for (let e = element; e; e = e.parentElement) layers.push(parse(getComputedStyle(e).backgroundColor));
    return layers.reverse().reduce((below, layer) => over(layer, below), [255, 255, 255]);
  };
  const light = c => {
    const [r, g, b] = c.map(v => v / 255).map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const found = new Set();
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    const visible = element.checkVisibility({ opacityProperty: true, visibilityProperty: true });
    if (!visible || !walker.currentNode.data.trim()) continue;
    if (!element.closest('article') || element.closest('svg')) continue;
    const style = getComputedStyle(element), below = background(element);
    const a = light(over(parse(style.color), below)), b = light(below);
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    const size = parseFloat(style.fontSize), large = size >= 24 || (size >= 18.6 && style.fontWeight >= 700);
    const start = walker.currentNode.data.trim().slice(0, 30);
    if (ratio < (large ? 3 : 4.5)) found.add(`${ratio.toFixed(2)} ${element.tagName}.${element.className} ${start}`);
  }
  return [...found];
}
