"""What `tapernorm VERB` does, a module per stage; each parses, loads, calls one function of the library, and writes.

Heavy imports stay inside the verbs: `tapernorm --help` must be instant.
"""
