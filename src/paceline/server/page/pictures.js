// Pictures and sound of the next message: pasted, dropped or chosen; thumbnails; what of them goes to the server.

import { isPdf, isText, textOf } from "./attached.js";
import { button, make } from "./dom.js";

const SIDE = 4096; // pixels; larger pictures are scaled down here
const MOST_BYTES = 20 * 2 ** 20;
const KINDS = /^data:(image|audio)\/[\w.+-]+;base64,[A-Za-z0-9+/=]+$/;

/** Of a stored message: only data URLs of pictures and sound; `name` is what is shown of them. */
export const checkedMedia = (media) => (Array.isArray(media) ? media : [])
  .filter((one) => typeof one === "object" && one !== null && typeof one.url === "string" && KINDS.test(one.url.slice(0, 200).replace(/[^,]*$/, "A")) && one.url.length < 2 * MOST_BYTES)
  .map((one) => ({ url: one.url, name: typeof one.name === "string" ? one.name.slice(0, 200) : "" }));

export const kindOf = ({ url }) => (url.startsWith("data:audio/") ? "audio" : "image");

/** A message's content as the server takes it: a text, or parts with what is attached before the text. */
export function contentOf({ content, media = [] }) {
  if (!media.length) return content;
  const parts = media.map((one) => (kindOf(one) === "audio"
    ? { type: "input_audio", input_audio: { data: one.url.slice(one.url.indexOf(",") + 1), format: "wav" } }
    : { type: "image_url", image_url: { url: one.url } }));
  return content ? [...parts, { type: "text", text: content }] : parts;
}

/** The other way round, of a file that was exported or saved by `paceline run`. */
export function mediaOf(content) {
  if (typeof content === "string" || !Array.isArray(content)) return { content, media: [] };
  const media = content.flatMap((part) => {
    const url = part?.image_url?.url ?? part?.image ?? part?.audio ?? (part?.input_audio?.data && `data:audio/wav;base64,${part.input_audio.data}`);
    return typeof url === "string" ? [{ url: url.replace("data:application/octet-stream;", part?.type === "audio" ? "data:audio/wav;" : "data:image/png;"), name: "" }] : [];
  });
  return { content: content.map((part) => part?.text ?? "").join(""), media: checkedMedia(media) };
}

/** What a message shows of its files. */
export function shown(media, take = null) {
  return media.map((one, i) => make("figure", { class: "shown" },
    kindOf(one) === "audio" ? make("audio", { controls: true, src: one.url }) : make("img", { src: one.url, alt: one.name || `picture ${i + 1}` }),
    ...(one.tokens ? [make("figcaption", {}, `${one.tokens} tokens`)] : []),
    ...(take ? [button("×", { class: "remove", "data-take": String(i), "aria-label": `Take back ${one.name || `picture ${i + 1}`}` })] : [])));
}

export class Tray {
  #box; #say; #reads; #count; media = []; texts = [];
  reading = ""; // the name of the file that is being read

  /** `box`: where thumbnails are shown; `reads()`: kinds that the model reads; `count(media)`: tokens of one, by the server. */
  constructor(box, say, reads, count) {
    this.#box = box;
    this.#say = say;
    this.#reads = reads;
    this.#count = count;
    box.addEventListener("click", ({ target }) => {
      const file = target.closest("[data-text]")?.dataset.text;
      if (file !== undefined) this.set(this.media, this.texts.filter((_, i) => i !== Number(file)));
      const at = target.closest("[data-take]")?.dataset.take;
      if (at !== undefined) this.set(this.media.filter((_, i) => i !== Number(at)));
    });
  }

  /** Take files in, in their order; says why one is not taken. */
  async add(files) {
    for (const file of files) {
      const kind = file.type.split("/")[0];
      if (isText(file) || isPdf(file)) await this.#addText(file);
      else if (!["image", "audio"].includes(kind)) this.#say(`${file.name} is neither text nor a PDF, a picture or sound.`);
      else if (!this.#reads().includes(kind)) this.#say(`${file.name} is not taken: this model does not read ${kind === "image" ? "pictures" : "sound"}.`);
      else if (file.size > MOST_BYTES) this.#say(`${file.name} has more than 20 MiB: choose a smaller one.`);
      else {
        try {
          const one = { url: await (kind === "image" ? picture(file) : asUrl(file)), name: file.name };
          this.set([...this.media, one]);
          this.#count(one).then((tokens) => { one.tokens = tokens; this.draw(); }, () => {});
        } catch { this.#say(`${file.name} cannot be read by this browser.`); }
      }
    }
  }

  async #addText(file) {
    this.reading = file.name;
    this.draw();
    try {
      const read = await textOf(file);
      this.texts = [...this.texts, read];
    } catch (error) { this.#say(`${error.message}.`); }
    this.reading = "";
    this.draw();
  }

  set(media, texts = this.texts) {
    this.media = media;
    this.texts = texts;
    this.draw();
  }

  draw() {
    this.#box.replaceChildren(...shown(this.media, true), ...this.texts.map(({ name, size }, i) => make("span", { class: "chip" },
      `${name}, ${size}`,
      button("×", { class: "remove", "data-text": String(i), "aria-label": `Take back ${name}` }))),
    ...(this.reading ? [make("span", { class: "chip" }, `${this.reading} is being read`)] : []));
    this.#box.hidden = !(this.media.length || this.texts.length || this.reading);
  }
}

/** A picture as it is, unless it is too large or of a kind that only browsers read (HEIC of phones): then as JPEG. */
async function picture(file) {
  const sent = ["image/png", "image/jpeg", "image/webp", "image/gif", "image/bmp", "image/avif", "image/tiff"].includes(file.type);
  const bitmap = await createImageBitmap(file).catch((error) => { if (sent) return null; throw error; });
  const most = bitmap ? Math.max(bitmap.width, bitmap.height) : 0;
  if (sent && most <= SIDE) return asUrl(file);
  const scale = Math.min(1, SIDE / most);
  const canvas = make("canvas", { width: Math.round(bitmap.width * scale), height: Math.round(bitmap.height * scale) });
  canvas.getContext("2d").drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  return canvas.toDataURL("image/jpeg", 0.92);
}

const asUrl = (file) => new Promise((resolve, reject) => {
  const reader = new FileReader();
  reader.onload = () => resolve(reader.result);
  reader.onerror = () => reject(reader.error);
  reader.readAsDataURL(file);
});
