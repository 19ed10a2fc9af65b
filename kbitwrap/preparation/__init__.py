"""One preparation: planned, in force, verified and restored.

The record of what was there before lives here too.
"""
