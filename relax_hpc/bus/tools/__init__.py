"""Questions that people ask of a bus: ls, show, verify, gc, export. No role imports it."""
