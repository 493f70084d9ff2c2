"""The chat: conversations with a model, saved as they go. Nothing here knows what a terminal is."""
