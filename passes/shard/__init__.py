"""What passes that divide a graph among ranks have in common."""
