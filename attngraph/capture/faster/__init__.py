"""What only makes torch.export faster: without this folder the same graphs come from slower traces."""
