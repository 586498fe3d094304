"""Statistics of scores, without a run: pass@k, pass^k, maj@k and standard errors."""
