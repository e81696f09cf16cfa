"""The routes of the HTTP door, one file for each noun."""
