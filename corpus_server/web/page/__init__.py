"""The page that people open in a browser: a shell of HTML, and scripts that ask the public routes.

The server knows nothing of the page but its files: the scripts have no access to anything that curl has not.
"""

from corpus_server.web.page.routes import views

__all__ = ["views"]
