"""SubRip (.srt) and WebVTT (.vtt) to text: what was said, without numbers, times and styling."""

from __future__ import annotations

import html
import re

ARROW = re.compile(r"^\s*(\d+:)?\d+:\d+[.,]\d+\s+-->\s")
VOICE = re.compile(r"<v(?:\.[^\s>]*)?\s+([^>]+)>")
TAG = re.compile(r"</?(?:[a-zA-Z]|\d)[^>]*>|\{\\[^}]*\}")


def subtitles_to_text(source: str) -> tuple[str, int]:
    """(text, number of cues). Cues follow each other as lines; a voice becomes `Name: `; repeated lines stay once.

    A line is a cue's text unless it is an identifier (before a time), a time, or a WebVTT block (NOTE, STYLE, REGION).
    """
    said: list[str] = []
    cues = 0
    for block in re.split(r"\n[^\S\n]*\n+", source.lstrip("\ufeff").replace("\r\n", "\n").replace("\r", "\n")):
        lines = [line.strip() for line in block.strip().split("\n")]
        at = next((i for i, line in enumerate(lines[:2]) if ARROW.match(line)), None)
        if at is None:
            if not re.match(r"(WEBVTT|NOTE|STYLE|REGION)\b", lines[0]):
                said += filter(None, lines)
            continue
        cues += 1
        for line in lines[at + 1 :]:
            text = html.unescape(TAG.sub("", VOICE.sub(r"\1: ", line))).strip()
            if text and not (said and said[-1] == text):  # rolling captions say each line twice
                said.append(text)
    return "\n".join(said), cues
