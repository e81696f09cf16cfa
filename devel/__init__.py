"""What tests, benchmarks and the demo share and no user gets."""
