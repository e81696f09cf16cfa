"""Commands in sessions: started, followed, collected, ended."""
