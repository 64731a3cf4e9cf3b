"""The quick start: real text, a corpus of it, a server, and a small GPT that trains over HTTP.

Read in this order: text (text -> shards), server (a process of its own), model, train, __main__ (the tour).
"""
