"""Who may connect and what they may do: users, passwords, TLS, roles and privileges, and limits on connections.

No password is kept or logged. A client that does not log in, guesses passwords or stays silent does not slow others.
"""
