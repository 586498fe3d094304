"""Models that SGLang loads by its own hook in place of its own: it imports each module here."""
