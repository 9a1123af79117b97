"""Name, checkpoint or own torch module -> model, its sites, and hooks that capture them."""
