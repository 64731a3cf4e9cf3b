"""`python -m corpus_server`."""

from corpus_server.cli import main

main()
