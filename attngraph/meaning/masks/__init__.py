"""What a mask hides: tiles, later tokens, single pairs; and the mask in words."""
