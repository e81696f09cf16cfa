"""The system's tools, threads and mount table."""
