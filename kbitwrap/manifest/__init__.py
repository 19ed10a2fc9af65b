"""The record of a preparation as JSON."""
