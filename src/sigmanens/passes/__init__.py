"""The pass: which members run, and how their rows ride in the batch dimension."""
