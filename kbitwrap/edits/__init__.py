"""Edits of a model, the changes that undo them, and the journal of both."""
