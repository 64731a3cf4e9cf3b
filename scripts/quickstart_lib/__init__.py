"""The quick start: real text, a corpus of it, a server, and a small GPT that trains over HTTP.

Read in this order: text (text -> corpus), training (in a process of its own; what is trained is
client/examples/train.py), __main__ (the tour). The server is started by scripts/processes.py.
"""
