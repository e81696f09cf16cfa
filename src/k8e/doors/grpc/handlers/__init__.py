"""The methods of the gateway, one file for each noun."""
