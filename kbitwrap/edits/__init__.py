"""What changes a model: edits, the changes that take them back, and the journal that applies and undoes both."""
