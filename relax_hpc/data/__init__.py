"""Reads prompts and documents in an order fixed by a seed; applies chat templates; decodes media.

`media/` decodes images, video and sound once, for engine and trainer alike.
"""
