"""Document messages in bulk, without a Python object for each: frames to columns, and packed records to frames.

These modules hold the buffers and options; the compiled half is ``wire.kernels``, loaded at the first call. Unusual
messages are left to the object codec, which knows every rule and its error, so the two codecs always agree.
"""
