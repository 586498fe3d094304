"""Models as ours that SGLang loads in their place, which tell what their towers are shown."""
