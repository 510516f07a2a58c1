"""What tests share that are no tests themselves."""
