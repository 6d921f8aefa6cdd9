"""`fastpar plan`: layouts searched."""
