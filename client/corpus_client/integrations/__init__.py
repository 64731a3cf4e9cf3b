"""A file per training framework; importing it imports the framework. docs/integrations.md has the lines."""
