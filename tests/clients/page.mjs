// Drives the page in headless Chromium: a prompt, its stream, a race, both themes, narrow and wide.
// Run by hand: `node page.mjs http://127.0.0.1:8000 OUT_FOLDER`, with playwright-core installed and chromium on the path.
import { chromium } from "playwright-core";

const [url = "http://127.0.0.1:8000", out = "."] = process.argv.slice(2);
const tokens = Number(process.env.TOKENS ?? 160);
const browser = await chromium.launch({ executablePath: process.env.CHROMIUM ?? "/usr/bin/chromium", args: ["--no-sandbox"] });
const problems = [];

async function open(options) {
  const page = await browser.newPage(options);
  page.on("console", (m) => { if (m.type() === "error") problems.push(m.text()); });
  page.on("pageerror", (e) => problems.push(String(e)));
  page.on("request", (r) => { if (!r.url().startsWith(url)) problems.push(`asked for ${r.url()}`); });
  await page.goto(url);
  await page.waitForSelector('#state[data-state="ready"]', { timeout: 60000 });
  await page.click("#settings > summary");
  await page.fill("#max-tokens", String(tokens));
  await page.click("#settings > summary");
  return page;
}

const done = (page) => page.waitForFunction(() => !document.body.dataset.running, null, { timeout: 300000 });

for (const scheme of ["light", "dark"]) {
  const page = await open({ viewport: { width: 1280, height: 960 }, colorScheme: scheme });
  await page.focus("#prompt");
  await page.keyboard.press("Control+Enter"); // by keyboard alone
  await page.waitForSelector("#tokens .t");
  const early = await page.locator("#tokens .t").count();
  await done(page);
  const late = await page.locator("#tokens .t").count();
  if (!(late >= early && late > 0)) problems.push(`nothing streamed: ${early}, ${late}`);
  const kinds = await page.$$eval("#tokens .t", (all) => Object.fromEntries(["kept", "own", "overruled"].map((k) => [k, all.filter((t) => t.classList.contains(k)).length])));
  console.log(scheme, "tokens", late, JSON.stringify(kinds), await page.textContent("#figures"));
  await page.focus("#tokens");
  for (let i = 0; i < 6; i++) await page.keyboard.press("ArrowRight");
  if (await page.isHidden("#tip")) problems.push("no tip by keyboard");
  await page.locator("#tokens").blur();
  await page.evaluate(() => { document.getElementById("tokens").scrollTop = 0; scrollTo(0, 0); });
  await page.locator("#tokens .t.overruled").nth(0).hover();
  await page.screenshot({ path: `${out}/write-${scheme}.png` });
  await page.mouse.move(5, 5);
  await page.click("#tab-race");
  await page.click("#run");
  await done(page);
  const equal = await page.getAttribute("#proof", "data-equal");
  console.log(scheme, "race equal:", equal, await page.textContent("#proof"));
  if (equal !== "true") problems.push("the race's texts differ");
  if ((await page.textContent("#plain-tokens")) !== (await page.textContent("#fast-tokens"))) problems.push("shown texts differ");
  await page.screenshot({ path: `${out}/race-${scheme}.png`, fullPage: true });
  await page.close();
}
const narrow = await open({ viewport: { width: 390, height: 844 }, colorScheme: "light" });
await narrow.click("#run");
await done(narrow);
const wide = await narrow.evaluate(() => document.documentElement.scrollWidth > innerWidth);
if (wide) problems.push("the narrow page scrolls sideways");
await narrow.screenshot({ path: `${out}/narrow.png`, fullPage: true });
await narrow.click("#theme");
if ((await narrow.evaluate(() => document.documentElement.dataset.theme)) !== "dark") problems.push("the theme button does nothing");
await narrow.goto(`${url}/docs`);
await narrow.waitForSelector("#docs section");
await narrow.screenshot({ path: `${out}/docs.png` });
await browser.close();
console.log(problems.length ? `PROBLEMS\n${problems.join("\n")}` : "no problems");
process.exit(problems.length ? 1 : 0);
