"""Images, video and sound: from a file to the numbers that both engine and trainer give a model.

A medium is made canonical once. What a model sees of it is a pure function of its bytes and the
recipe, so it is the same everywhere. Nothing here needs torch but `patches` and the mel spectra of
sound; the decoders are imported when a medium is looked at.
"""
