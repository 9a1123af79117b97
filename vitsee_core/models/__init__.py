"""timm name or checkpoint -> model, its sites, and hooks that capture them."""
