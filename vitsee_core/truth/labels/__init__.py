"""Images with labels: which they are, and what is near them."""
