"""The chat on a terminal: reading lines, drawing answers. Imported when a chat on a terminal begins, not before."""
