"""From what torch.export traced to a program graph."""
