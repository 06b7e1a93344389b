"""Weights and KV entries in few bits: one method a file, each a pure function there and back, and what rounding did (error.py)."""
