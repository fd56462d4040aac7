"""Checks of a cluster file: each is a small pure function from a document to the mistakes that it finds."""
