"""`fastpar compare`: strategies measured side by side."""
