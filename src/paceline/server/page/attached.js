// Text files and PDFs of the next message: read here, shown with their size, sent as text before what is asked.

const MOST = 400000; // bytes of a file, letters of a PDF: some hundred pages
const MOST_PDF = 20 * 2 ** 20; // bytes
const PATIENCE = 30000; // ms for the pages of a PDF
const TEXT = /^(?:text\/|application\/(?:json|xml|x-sh|x-yaml|toml|javascript|typescript|sql))/;
const ENDINGS = /\.(?:txt|md|rst|csv|tsv|log|json|jsonl|ya?ml|toml|ini|cfg|xml|html?|css|[cm]?[jt]sx?|py|rb|rs|go|java|kt|swift|c|h|cc|cpp|hpp|cs|php|pl|lua|r|sql|sh|ps1|diff|patch|tex|bib|ipynb)$/i;

export const isText = (file) => TEXT.test(file.type) || (!/^(?:image|audio|video)\//.test(file.type) && ENDINGS.test(file.name));

export const isPdf = (file) => file.type === "application/pdf" || /\.pdf$/i.test(file.name);

/** {name, text, size} of a file; `size` in words. Throws with a sentence for one that cannot be taken. */
export async function textOf(file) {
  const { name, text, pages = "" } = await (isPdf(file) ? pdfOf(file) : plainOf(file));
  return { name: `${name.slice(0, 200)}${pages && ` (${pages})`}`, text, size: `${text.length.toLocaleString("en")} letters` };
}

async function plainOf(file) {
  if (file.size > MOST) throw new Error(`${file.name} has more than ${MOST / 1000} kB: give a part of it`);
  const bytes = new Uint8Array(await file.arrayBuffer());
  if (bytes.includes(0)) throw new Error(`${file.name} is no text`);
  try {
    return { name: file.name, text: new TextDecoder("utf-8", { fatal: true }).decode(bytes) };
  } catch {
    throw new Error(`${file.name} is not UTF-8 text: convert it first`);
  }
}

/** The text of a PDF, by pdf.js, which is fetched with the first one. Pictures in it are not read. */
async function pdfOf(file) {
  const { name } = file;
  if (file.size > MOST_PDF) throw new Error(`${name} has more than ${MOST_PDF / 2 ** 20} MiB: give a part of it`);
  await import("./vendor/pdf.worker.js"); // it works on this page's own thread: the page may start no other script by its address
  const { getDocument, VerbosityLevel } = await import("./vendor/pdf.js");
  const task = getDocument({ data: await file.arrayBuffer(), verbosity: VerbosityLevel.ERRORS, useWorkerFetch: false, useWasm: false, disableFontFace: true });
  try {
    return { name, ...(await pagesOf(await task.promise, name)) };
  } catch (error) {
    if (error.name === "PasswordException") throw new Error(`${name} is locked by a password: save it without one`);
    throw error instanceof NoText ? error : new Error(`${name} cannot be read as a PDF: it is damaged, or is something else`);
  } finally {
    await task.destroy();
  }
}

class NoText extends Error {}

async function pagesOf(pdf, name) {
  const texts = [], count = pdf.numPages, end = Date.now() + PATIENCE;
  let letters = 0;
  for (let at = 1; at <= count && letters < MOST && Date.now() < end; at++) {
    const { items } = await (await pdf.getPage(at)).getTextContent();
    texts.push(items.map(({ str = "", hasEOL }) => (hasEOL ? `${str}\n` : str)).join("").trim());
    letters += texts.at(-1).length;
  }
  if (!letters) throw new NoText(`${name} has no text: its pages are pictures`);
  const read = texts.length < count ? `pages 1 to ${texts.length} of ${count}` : count === 1 ? "1 page" : `${count} pages`;
  return { text: texts.filter(Boolean).join("\n\n"), pages: read };
}

/** A message with files before what is asked. A fence is longer than any in the file. */
export function withTexts(asked, texts) {
  const parts = texts.map(({ name, text }) => {
    const fence = "`".repeat(Math.max(3, ...[...text.matchAll(/`{3,}/g)].map((found) => found[0].length + 1)));
    return `${name}:\n${fence}\n${text.replace(/\n$/, "")}\n${fence}`;
  });
  return [...parts, ...(asked.trim() ? [asked] : [])].join("\n\n");
}
