"""The verbs of `tapernorm`, one module per stage. A verb parses, loads, calls one function, and writes.

Heavy imports stay inside the verbs, so that `tapernorm --help` is instant.
"""
