"""Other packages' implementations, as benches call them."""
