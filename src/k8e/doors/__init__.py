"""One module per protocol that reaches the service. Doors translate and authenticate; they decide nothing."""
