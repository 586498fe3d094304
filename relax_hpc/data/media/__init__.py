"""Turns images, video and sound into the arrays that both engine and trainer give a model.

A medium is made canonical once: its array depends only on its bytes and the recipe, so it is the
same everywhere. Only `patches` and the mel spectra of sound need torch; decoders are imported when
a medium is read.
"""
