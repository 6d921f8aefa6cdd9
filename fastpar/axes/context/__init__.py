"""Context parallelism; see README.md."""
