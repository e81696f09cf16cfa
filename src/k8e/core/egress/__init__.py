"""Which hosts sessions may reach, and what they were denied."""
