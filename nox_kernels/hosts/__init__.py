"""Other programs that run H3, with our attention put in."""
