"""One kind of parallelism a file, or a folder."""
