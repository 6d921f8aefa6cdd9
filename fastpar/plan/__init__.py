"""`fastpar plan`: layouts searched and checked."""
