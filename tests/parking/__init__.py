"""Programs that are run by a fresh interpreter and by one that waited for them."""
