"""What sessions may reach, and what they were refused."""
