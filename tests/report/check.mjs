// Opens reports in headless Chromium, in both widths and both colour schemes: no error on the console, no request but the file
// itself, no horizontal scroll of the page, filter and sorting by keyboard. By hand:
//
//   apt-get install -y chromium; npm install --prefix /tmp/check playwright-core
//   for p in …; do ithaca report $p.json -o $p.html; done
//   ithaca plan … --mode serve … --report serving.html
//   NODE_PATH=/tmp/check/node_modules node tests/report/check.mjs SCREENSHOTS *.html
//
// It writes a picture of each part to the folder SCREENSHOTS, to be looked at, and exits with 1 after a failure.
import { mkdirSync, mkdtempSync, statSync } from "node:fs";
import { createRequire } from "node:module";
import { tmpdir } from "node:os";
import { basename, join, resolve } from "node:path";
import { pathToFileURL } from "node:url";

const load = createRequire(join(process.env.NODE_PATH ?? ".", "x.js"));
const { chromium } = load("playwright-core");
const [pictures, ...files] = process.argv.slice(2);
mkdirSync(pictures, { recursive: true });
const failures = [];
const expect = (holds, what) => { if (!holds) failures.push(what); };

const context = await chromium.launchPersistentContext(mkdtempSync(join(tmpdir(), "report-")), {
  executablePath: process.env.CHROMIUM ?? "/usr/bin/chromium",
  headless: true,
  args: ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync"],
});

for (const file of files) {
  const name = basename(file, ".html");
  expect(statSync(file).size < 1.5e6, `${name}: ${statSync(file).size} bytes`);
  for (const width of [1280, 390]) {
    for (const scheme of ["light", "dark"]) {
      const what = `${name} ${width} ${scheme}`;
      const page = await context.newPage();
      const address = pathToFileURL(resolve(file)).href;
      page.on("console", (message) => expect(!["error", "warning"].includes(message.type()), `${what}: ${message.text()}`));
      page.on("pageerror", (error) => failures.push(`${what}: ${error}`));
      page.on("request", (request) => expect(request.url() === address, `${what}: asks for ${request.url()}`));
      await page.setViewportSize({ width, height: width === 390 ? 844 : 900 });
      await page.emulateMedia({ colorScheme: scheme });
      await page.goto(address);
      await page.waitForTimeout(200);
      await check(page, what);
      await page.addStyleTag({ content: "nav { position: static !important; }" });
      await page.screenshot({ path: join(pictures, `${name}-${width}-${scheme}.png`), fullPage: true });
      for (const part of ["alternatives", "deployments", "timeline", "memory", "traffic", "layout", "kernels"]) {
        const section = page.locator(`#${part}`);
        if (await section.isVisible()) await section.screenshot({ path: join(pictures, `${name}-${width}-${scheme}-${part}.png`) });
      }
      await page.close();
    }
  }
}
await context.close();
for (const failure of failures) console.error(failure);
console.log(failures.length ? `${failures.length} failures` : `${files.length} reports passed`);
process.exit(failures.length ? 1 : 0);

/** What holds of every page. */
async function check(page, what) {
  const wide = await page.evaluate(() => document.documentElement.scrollWidth - document.documentElement.clientWidth);
  expect(wide <= 0, `${what}: the page scrolls sideways by ${wide} pixels`);
  // Texts of charts end inside the page.
  const outside = await page.evaluate(() => [...document.querySelectorAll(".chart text")].filter((text) => {
    const { left, right } = text.getBoundingClientRect();
    return text.textContent && (left < -1 || right > innerWidth + 1);
  }).map((text) => text.textContent));
  expect(outside.length === 0, `${what}: texts are clipped: ${outside.slice(0, 3)}`);
  // Names for those who do not see.
  const unnamed = await page.evaluate(() => [...document.querySelectorAll("button, input, select, [role=application], [role=group]")]
    .filter((one) => !(one.textContent.trim() || one.getAttribute("aria-label") || one.labels?.length)).map((one) => one.outerHTML.slice(0, 80)));
  expect(unnamed.length === 0, `${what}: without a name: ${unnamed}`);

  // The rest of the plans, and the filter, by keyboard.
  if (await page.isVisible("#more")) {
    await page.focus("#more");
    await page.keyboard.press("Enter");
  }
  const rows = () => page.locator("#plans tbody tr");
  const all = await rows().count();
  expect(all > 0, `${what}: no plans`);
  await page.focus("#filter");
  const word = (await page.locator("#plans tr.chosen td").first().innerText()).split(/[\s+]/)[0];
  await page.keyboard.type(`${word} zzz`);
  expect((await rows().count()) === 0, `${what}: the filter keeps what it should not`);
  for (let i = 0; i < 4; i += 1) await page.keyboard.press("Backspace");
  const some = await rows().count();
  expect(some > 0 && some <= all, `${what}: the filter hides the plan`);
  for (let i = 0; i < word.length; i += 1) await page.keyboard.press("Backspace");
  expect((await rows().count()) === all, `${what}: the filter does not end`);
  await page.keyboard.press("Tab");
  await page.keyboard.press("Space");
  expect((await page.locator("#plans .badge.frontier").count()) === (await rows().count()), `${what}: the frontier`);
  await page.keyboard.press("Space");

  // Sorting, by keyboard: two presses order a column downwards.
  await page.locator("#plans th button").nth(1).focus();
  await page.keyboard.press("Enter");
  const button = page.locator("#plans th button").nth(5);
  await button.focus();
  await page.keyboard.press("Enter");
  await page.keyboard.press("Enter");
  expect((await page.locator("#plans th").nth(5).getAttribute("aria-sort")) === "descending", `${what}: sorting is not told`);
  const order = await page.evaluate(() => {
    const { alternatives, frontier, others } = JSON.parse(document.querySelector("#data").textContent);
    const sizes = alternatives ? alternatives.rows.map((row) => row.memory) : [...frontier, ...others].map((row) => row.gpus);
    return [...document.querySelectorAll("#plans tbody tr")].map((row) => sizes[Number(row.id.slice(4))]);
  });
  expect(order.length > 0 && order.every((size, i) => i === 0 || size <= order[i - 1]), `${what}: not sorted by size`);
  const time = page.locator("#plans th button").nth(1);
  await time.focus();
  await page.keyboard.press("Enter");

  if (await page.isVisible("#runs")) await timeline(page, what);

  // A point of the scatter, by keyboard.
  await page.locator("#scatter [role=button]").last().focus();
  await page.keyboard.press("Enter");
  expect((await page.locator("tr.found").count()) === 1, `${what}: a point does not find its row`);
  await page.evaluate(() => { document.querySelector("tr.found").classList.remove("found"); document.activeElement.blur(); scrollTo(0, 0); document.querySelectorAll(".scroll").forEach((of) => of.scrollTo(0, 0)); });
}

/** The timeline, by keyboard. */
async function timeline(page, what) {
  await page.focus("#runs");
  const window = () => page.locator("#window").innerText();
  const whole = await window();
  await page.keyboard.press("+");
  expect((await window()) !== whole, `${what}: the timeline does not zoom`);
  await page.keyboard.press("ArrowRight");
  await page.keyboard.press("PageDown");
  expect((await page.locator("#run").innerText()).includes("rank"), `${what}: a run is not told`);
  await page.keyboard.press("0");
  expect((await window()) === whole, `${what}: the timeline does not return`);
}
