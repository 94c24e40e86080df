"""A vbucket's history: the memory log, the flusher that writes it to disk, and the stream sources that read it.

``memory`` holds recent changes, ``flusher`` writes them as blocks, ``blocks`` reads those, and ``stream`` combines disk
and memory for one reader. ``kernels`` has the code that visits every record.
"""
