"""HTTP over the core: parse, call the core, map errors, answer."""
