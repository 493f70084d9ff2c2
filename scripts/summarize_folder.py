"""Summarise every document in a folder: PDFs, Word files, e-books, web pages, subtitles, text.

    python scripts/summarize_folder.py FOLDER [MODEL]

Writes NAME.summary.txt beside each document and leaves alone those that have one. Interrupted, it goes on where it was.
Copy it and change it.
"""

from __future__ import annotations

import sys
from pathlib import Path

from hybrid import Hybrid, HybridError, summarize

KINDS = {".txt", ".md", ".html", ".htm", ".pdf", ".docx", ".epub", ".srt", ".vtt"}


def main() -> int:
    """Returns the number of documents that could not be summarised."""
    if len(sys.argv) not in (2, 3):
        sys.exit("usage: python scripts/summarize_folder.py FOLDER [MODEL]")
    folder, model = Path(sys.argv[1]), (sys.argv[2:] or ["smollm2-135m"])[0]
    failed = 0
    with Hybrid(model, n_ctx=4096, n_sequences="auto", n_draft=7) as loaded:  # several chunks at a time
        for path in sorted(p for p in folder.iterdir() if p.suffix.lower() in KINDS):
            target = path.with_name(path.name + ".summary.txt")
            if target.exists() or path.name.endswith(".summary.txt"):
                continue
            try:
                summary = summarize(path, loaded, length="short", resume=True)
            except HybridError as e:
                print(f"{path.name}: {e}", file=sys.stderr)
                failed += 1
                continue
            target.write_text(summary + "\n", "utf-8")
            print("\n".join(summary.report.lines()))
    return failed


if __name__ == "__main__":
    sys.exit(main())
