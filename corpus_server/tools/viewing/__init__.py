"""What users say about documents: tables of metadata, and views, a multiplicity of each."""

from corpus_server.tools.viewing.create import Selection, create, read_list

__all__ = ["Selection", "create", "read_list"]
