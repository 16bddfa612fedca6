// Driver: opens ComfyUI's page in headless Chromium and does there what a user would.
//
//   node driver.mjs URL CHROMIUM
//
// Reads one JSON request per line, {"call": NAME, "arguments": [...]}, and answers each with one
// line, {"value": ...} or {"error": "..."}. Ends when its input closes. playwright-core comes from
// the working directory or from NODE_PATH.

import { createRequire } from 'node:module';
import { createInterface } from 'node:readline';
import process from 'node:process';

const { chromium } = createRequire(`${process.cwd()}/`)('playwright-core');
const [url, executablePath] = process.argv.slice(2);
const RUN_LIMIT_MS = 240_000;
const SETTLE_MS = 800; // the page places widgets and redraws in later frames

const browser = await chromium.launch({
  executablePath,
  args: ['--no-sandbox', '--disable-gpu', '--disable-dev-shm-usage'],
});
const page = await browser.newPage({ viewport: { width: 1600, height: 1000 } });
let pageErrors = [];
page.on('pageerror', (error) => pageErrors.push(String(error)));
// no request leaves this machine
await page.route('**/*', (route) => {
  const { protocol, hostname } = new URL(route.request().url());
  const local = ['data:', 'blob:'].includes(protocol) || ['127.0.0.1', 'localhost'].includes(hostname);
  return local ? route.continue() : route.abort();
});

const settle = () => page.waitForTimeout(SETTLE_MS);

const calls = {
  /** Load the page anew, in classic drawing or with Vue nodes. */
  async open(vueNodes) {
    pageErrors = [];
    await page.goto(url, { waitUntil: 'domcontentloaded', timeout: 120_000 });
    await page.waitForFunction(
      () => window.app?.graph && Object.keys(window.LiteGraph?.registered_node_types ?? {}).length > 100,
      null,
      { timeout: 120_000 },
    );
    await settle();
    await page.keyboard.press('Escape'); // the first-run dialog
    await page.evaluate((on) => app.ui.settings.setSettingValue('Comfy.VueNodes.Enabled', on), vueNodes);
    await settle();
  },

  /** Open a workflow; returns the types that the page does not know. */
  async load(workflow) {
    await page.evaluate((graph) => app.loadGraphData(graph), workflow);
    await settle();
    return page.evaluate(() =>
      app.graph.nodes.map((node) => node.type).filter((type) => !LiteGraph.registered_node_types[type]),
    );
  },

  /** Drop a file of the output folder on the canvas, by the event that a browser sends. */
  async drop({ filename, subfolder, type }) {
    const kinds = { mp4: 'video/mp4', mov: 'video/quicktime', mkv: 'video/x-matroska' };
    await page.evaluate(async ([query, kind]) => {
      const answer = await fetch(`/view?${new URLSearchParams(query)}`);
      const file = new File([await answer.blob()], query.filename, { type: kind });
      const dataTransfer = new DataTransfer();
      dataTransfer.items.add(file);
      const event = new DragEvent('drop', { dataTransfer, bubbles: true, cancelable: true });
      app.canvas.canvas.dispatchEvent(event);
    }, [{ filename, subfolder, type }, kinds[filename.split('.').pop()]]);
    await settle();
  },

  /** The graph as the page would save it now. */
  graph: () => page.evaluate(() => app.graph.serialize()),

  /** The API prompt that Run would send. */
  prompt: () => page.evaluate(async () => (await app.graphToPrompt()).output),

  /** Widgets that a node shows: name -> value; those without a place in the file left out. */
  widgets: (id) =>
    page.evaluate((id) => {
      const shown = app.graph.getNodeById(id).widgets.filter((widget) => widget.serialize !== false);
      return Object.fromEntries(shown.map((widget) => [widget.name, widget.value]));
    }, id),

  /** Type into a widget. */
  async set(id, name, value) {
    await page.evaluate(
      ([id, name, value]) => {
        const node = app.graph.getNodeById(id);
        const widget = node.widgets.find((candidate) => candidate.name === name);
        if (!widget) throw new Error(`${node.type} has no widget ${name}`);
        if (widget.setValue) {
          widget.setValue(value, { e: new PointerEvent('pointerup'), node, canvas: app.canvas });
        } else {
          widget.value = value; // a promoted widget is a view of the one inside
          widget.callback?.(value, app.canvas, node);
        }
      },
      [id, name, value],
    );
    await page.waitForTimeout(60);
  },

  /** Add a node below all others, as the search dialog does; returns its id. */
  async add(type) {
    const id = await page.evaluate((type) => {
      const bottom = Math.max(...app.graph.nodes.map((node) => node.pos[1] + node.size[1]));
      const node = LiteGraph.createNode(type);
      node.pos = [0, bottom + 100];
      app.graph.add(node);
      return Number(node.id);
    }, type);
    await settle();
    return id;
  },

  /** Drag a wire from an output to an input. */
  async connect(from, output, to, input) {
    await page.evaluate(
      ([from, output, to, input]) => {
        const [source, target] = [from, to].map((id) => app.graph.getNodeById(id));
        source.connect(source.findOutputSlot(output), target, target.findInputSlot(input));
      },
      [from, output, to, input],
    );
    await settle();
  },

  /** Put one node into a subgraph and promote widgets; returns the id of the subgraph's node. */
  async enclose(id, names) {
    const outer = await page.evaluate((id) => {
      const { node } = app.graph.convertToSubgraph(new Set([app.graph.getNodeById(id)]));
      return Number(node.id);
    }, id);
    for (const name of names) {
      await settle();
      await page.evaluate(
        ([outer, name]) => {
          const { subgraph } = app.graph.getNodeById(outer);
          const [inner] = subgraph.nodes;
          const input = inner.inputs.find((candidate) => candidate.name === name);
          subgraph.inputNode.emptySlot.connect(input, inner); // what dragging a wire does
        },
        [outer, name],
      );
    }
    await settle();
    return outer;
  },

  /** Press Run and wait for the end; returns {status, error, outputs}. */
  async run() {
    const known = new Set(Object.keys(await history()));
    await page.evaluate(() => app.queuePrompt(0, 1));
    const end = Date.now() + RUN_LIMIT_MS;
    while (Date.now() < end) {
      for (const [id, entry] of Object.entries(await history())) {
        if (known.has(id)) continue;
        await page.waitForTimeout(1500); // the page shows what came
        const failure = entry.status.messages.find(([name]) => name === 'execution_error');
        return {
          status: entry.status.status_str,
          error: failure?.[1].exception_message ?? '',
          outputs: entry.outputs,
        };
      }
      await page.waitForTimeout(200);
    }
    throw new Error('the run did not end; did the server refuse the prompt?');
  },

  /** Text under the widgets of a node in sight, by ComfyUI or by our extension; null without one. */
  badge: (id) =>
    page.evaluate((id) => {
      const names = ['$$node-text-preview', 'nox_badge'];
      const texts = app.canvas.graph.getNodeById(id).widgets.filter((w) => names.includes(w.name));
      if (texts.length > 1) throw new Error('two texts on one node');
      return texts.length ? String(texts[0].value) : null;
    }, id),

  /** Open the subgraph of a node in sight; without one, go back to the whole graph. */
  async enter(id) {
    await page.evaluate((id) => {
      if (id === null) app.canvas.setGraph(app.rootGraph);
      else {
        const node = app.canvas.graph.getNodeById(id);
        app.canvas.openSubgraph(node.subgraph, node);
      }
    }, id ?? null);
    await settle();
  },

  /** Fold a node in sight to its title, or unfold it. */
  async fold(id) {
    await page.evaluate((id) => app.canvas.graph.getNodeById(id).collapse(), id);
    await settle();
  },

  /** Address of the clip that a node plays; null without one. */
  player: (id) =>
    page.evaluate((id) => app.nodeOutputs?.[id]?.images?.[0]?.filename ?? null, id),

  /** Uncaught errors since the page was opened. */
  errors: async () => pageErrors,

  /** Take a picture of the window with a node in its middle. */
  async shoot(id, file) {
    await page.evaluate((id) => {
      const node = app.canvas.graph.getNodeById(id);
      const { ds } = app.canvas;
      ds.scale = 1;
      ds.offset = [innerWidth / 2 - node.pos[0] - node.size[0] / 2, 200 - node.pos[1]];
      app.canvas.setDirty(true, true);
    }, id);
    await settle();
    await page.screenshot({ path: file });
  },
};

async function history() {
  return (await fetch(`${url}/history`)).json();
}

try {
  for await (const line of createInterface({ input: process.stdin })) {
    const request = JSON.parse(line);
    let answer;
    try {
      answer = { value: (await calls[request.call](...request.arguments)) ?? null };
    } catch (error) {
      answer = { error: String(error) };
    }
    process.stdout.write(`${JSON.stringify(answer)}\n`);
  }
} finally {
  await browser.close();
}
