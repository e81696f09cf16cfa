"""The tools: what an AI agent reads about them, and what each does with the service."""
