"""A vbucket's history: the memory log, the flusher that writes it down, and the stream sources that read it.

``memory`` keeps what is recent, ``flusher`` makes blocks of it, ``blocks`` and ``scan`` read them back, and ``stream``
puts both together for one reader. ``kernels`` has the code that visits every record.
"""
