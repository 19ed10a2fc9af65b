"""A tensor's bits: compared, fingerprinted, computed when asked for, upcast at use. Knows no model."""
