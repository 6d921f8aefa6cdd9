"""Benches of single ops, and their error ledger."""
