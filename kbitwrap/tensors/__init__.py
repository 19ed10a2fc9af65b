"""A tensor's bits: compared, digested, computed when asked for, upcast at use.

The room knows no model.
"""
