"""Long documents: read, cut into chunks, summarised, with nothing skipped in silence."""
