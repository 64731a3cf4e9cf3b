"""Charts as SVG with the colours of the reader's system; each says in words what it shows."""
