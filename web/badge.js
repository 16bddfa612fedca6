// Badge: what Nox H3 Attention says of its run, wherever the user looks at that node from.
//
// ComfyUI's page shows a node's text only while the graph that holds the node is open. From outside
// a subgraph is one node, and who looks at that sees nothing. This extension puts the text on every
// subgraph around the node, and on the node itself where ComfyUI could not.

import { app } from '../../scripts/app.js';
import { api } from '../../scripts/api.js';

const EVENT = 'nox.badge'; // {node, text}; node is an execution id, such as 12:7 for 7 inside 12
const NODE = 'NoxAttention';
const COMFY_TEXT = '$$node-text-preview'; // the widget that ComfyUI shows a node's text in
const OUR_TEXT = 'nox_badge';
// of two lines of thirty characters
const HEIGHT = 44;
const WIDTH = 240;

/** The subgraph nodes around a Nox node and that node last; [] where the open workflow has none. */
function pathTo(executionId) {
  const path = [];
  let graph = app.rootGraph ?? app.graph;
  for (const id of executionId.split(':')) {
    const node = graph?.nodes.find((candidate) => String(candidate.id) === id);
    if (!node) return [];
    path.push(node);
    graph = node.subgraph;
  }
  return path.at(-1).comfyClass === NODE ? path : [];
}

/** A text under a node's widgets that no file holds. */
function addText(node) {
  const element = document.createElement('div');
  Object.assign(element.style, {
    boxSizing: 'border-box',
    padding: '4px 16px',
    fontSize: '12px',
    lineHeight: '18px',
    whiteSpace: 'pre', // the text comes in two short lines
    overflow: 'hidden',
    color: 'var(--input-text)',
  });
  const widget = node.addDOMWidget(OUR_TEXT, 'nox_text', element, {
    serialize: false,
    margin: 0,
    getMinHeight: () => HEIGHT,
    getMaxHeight: () => HEIGHT,
    getValue: () => element.textContent,
    setValue: (text) => {
      element.textContent = text;
    },
  });
  widget.serialize = false;
  const [, height] = node.computeSize();
  node.setSize([Math.max(node.size[0], WIDTH), Math.max(node.size[1], height)]);
  return widget;
}

function show({ node: executionId, text }) {
  const path = pathTo(executionId);
  for (const node of path) {
    const named = (name) => node.widgets?.find((widget) => widget.name === name);
    if (node === path.at(-1) && node.graph === app.canvas.graph) {
      // ComfyUI shows it here; one of ours would be of an earlier run
      if (named(OUR_TEXT)) node.removeWidget(named(OUR_TEXT));
      continue;
    }
    const widget = named(COMFY_TEXT) ?? named(OUR_TEXT) ?? addText(node);
    widget.value = text;
    node.setDirtyCanvas(true);
  }
}

app.registerExtension({
  name: 'nox.badge',
  setup() {
    api.addEventListener(EVENT, ({ detail }) => show(detail));
  },
});
