"""What stores know of attention, head by head; and attention computed once more."""
