"""Models that replace SGLang's own, by its hook: SGLang imports each module here."""
