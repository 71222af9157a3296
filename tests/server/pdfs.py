"""Small PDFs: each text is a page."""

from __future__ import annotations

LOCK = b"<< /Filter /Standard /V 1 /R 2 /P -4 /O <" + b"11" * 32 + b"> /U <" + b"22" * 32 + b"> >>"


def pdf(*texts: str, locked: bool = False) -> bytes:
    """One page for each text, in a font that every reader has. `locked`: by a password that nobody knows."""
    pages = range(4, 4 + 2 * len(texts), 2)
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        f"<< /Type /Pages /Count {len(texts)} /Kids [{' '.join(f'{i} 0 R' for i in pages)}] >>".encode(),
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    for number, text in zip(pages, texts, strict=True):
        drawn = f"BT /F1 12 Tf 20 100 Td ({text}) Tj ET".encode()
        font = "/Resources << /Font << /F1 3 0 R >> >>"
        box = f"[0 0 {200 + 8 * len(text)} 200]"
        page = f"<< /Type /Page /Parent 2 0 R /MediaBox {box} /Contents {number + 1} 0 R {font} >>"
        objects += [page.encode(), b"<< /Length %d >>\nstream\n%s\nendstream" % (len(drawn), drawn)]
    out, places = b"%PDF-1.4\n", []
    for i, made in enumerate(objects, 1):
        places.append(len(out))
        out += b"%d 0 obj\n%s\nendobj\n" % (i, made)
    table = b"".join(b"%010d 00000 n \n" % place for place in places)
    lock = b" /Encrypt %s /ID [<00> <00>]" % LOCK if locked else b""
    head = b"xref\n0 %d\n0000000000 65535 f \n" % (len(objects) + 1)
    tail = b"trailer\n<< /Size %d /Root 1 0 R%s >>\nstartxref\n%d\n%%%%EOF\n" % (
        len(objects) + 1, lock, len(out),
    )  # fmt: skip
    return out + head + table + tail
