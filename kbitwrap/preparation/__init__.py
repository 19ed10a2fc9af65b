"""One preparation: planned, in force, verified, and the record of what was there before."""
