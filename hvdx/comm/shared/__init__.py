"""Memory that the ranks of one host share: the files behind it, where they meet, and how they add."""
