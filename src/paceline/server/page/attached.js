// Text files of the next message: read here, shown with their size, sent as text before what is asked.

const MOST = 400000; // bytes: some hundred pages
const TEXT = /^(?:text\/|application\/(?:json|xml|x-sh|x-yaml|toml|javascript|typescript|sql))/;
const ENDINGS = /\.(?:txt|md|rst|csv|tsv|log|json|jsonl|ya?ml|toml|ini|cfg|xml|html?|css|[cm]?[jt]sx?|py|rb|rs|go|java|kt|swift|c|h|cc|cpp|hpp|cs|php|pl|lua|r|sql|sh|ps1|diff|patch|tex|bib|ipynb)$/i;

export const isText = (file) => TEXT.test(file.type) || (!/^(?:image|audio|video)\//.test(file.type) && ENDINGS.test(file.name));

/** {name, text} of a file. Throws with a sentence for one that cannot be taken. */
export async function textOf(file) {
  if (file.size > MOST) throw new Error(`${file.name} has more than ${MOST / 1000} kB: give a part of it`);
  const bytes = new Uint8Array(await file.arrayBuffer());
  if (bytes.includes(0)) throw new Error(`${file.name} is no text`);
  try {
    return { name: file.name.slice(0, 200), text: new TextDecoder("utf-8", { fatal: true }).decode(bytes) };
  } catch {
    throw new Error(`${file.name} is not UTF-8 text: convert it first`);
  }
}

/** A message with files before what is asked. A fence is longer than any in the file. */
export function withTexts(asked, texts) {
  const parts = texts.map(({ name, text }) => {
    const fence = "`".repeat(Math.max(3, ...[...text.matchAll(/`{3,}/g)].map((found) => found[0].length + 1)));
    return `${name}:\n${fence}\n${text.replace(/\n$/, "")}\n${fence}`;
  });
  return [...parts, ...(asked.trim() ? [asked] : [])].join("\n\n");
}
