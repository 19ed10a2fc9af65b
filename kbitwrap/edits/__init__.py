"""Edits of a model, the changes that undo them, and the journal that applies edits and undoes changes."""
