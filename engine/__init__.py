"""Generation, benchmark and evaluation."""
