"""What a compilation did, as records, as text, as files and as a page."""
