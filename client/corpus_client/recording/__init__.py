"""What the trainer says of rows: their losses, summed by source and written to files."""
