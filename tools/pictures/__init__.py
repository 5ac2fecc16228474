"""Draws the pictures of the documents, for light and dark pages: `make pictures` writes docs/pictures."""
