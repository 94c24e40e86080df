"""Document messages in bulk, without a Python object each: frames to columns, packed records to frames.

The Python half: buffers, options and reasons to stop. The compiled half is ``wire.kernels``, loaded at the first call.
Whatever is unusual is left to the object codec, which knows every rule and its error; so the two agree.
"""
