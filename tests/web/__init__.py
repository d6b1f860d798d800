"""The web pages in a real browser."""
