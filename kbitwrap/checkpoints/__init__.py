"""Checkpoints that were saved while a model was prepared: read, inspected and converted."""
